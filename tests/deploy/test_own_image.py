"""The image of a user's model, which extends ours: what its Dockerfile names exists, and can be served."""

import json
import tomllib
from pathlib import Path

from benchmarks.container import OWN, extend, last, steps, target

ROOT = Path(__file__).parents[2]
STEPS = steps((OWN / "Dockerfile").read_text())


def test_its_packages_are_those_of_the_example() -> None:
    examples = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["examples"]
    command = next(rest for name, rest in STEPS if name == "RUN")
    packages = [word for word in command.split()[2:] if not word.startswith("-")]
    assert packages
    assert set(packages) <= {each.split(">")[0] for each in examples}


def test_it_is_installed_by_the_owner_of_the_environment_and_served_by_an_unprivileged_user() -> None:
    users = [rest for name, rest in STEPS if name in ("USER", "RUN")]
    assert (users[0], users[-1]) == ("root", "batchwright")
    ours = target(steps((ROOT / "Dockerfile").read_text()), "any")
    assert ("USER", "batchwright") in ours
    assert "/opt/batchwright/.venv/bin:$PATH" in last(ours, "ENV")


def test_its_command_names_a_class_of_the_copied_file(tmp_path: Path) -> None:
    without_pip = [step for step in STEPS if step[0] != "RUN"]
    (spec,) = extend(without_pip, tmp_path)
    name, _, source = spec.partition("=")
    file, _, found = source.rpartition(":")
    assert json.loads(last(STEPS, "CMD"))[0].startswith(f"{name}=/model/")
    assert f"class {found}(Model)" in Path(file).read_text()
