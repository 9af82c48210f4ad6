"""Tests of the console scripts in a folder whose files have the names of our packages."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from batchwright import commands
from tests.support.stub_server import Stub, serving_in_a_thread

ROOT = Path(__file__).parents[2]
OURS = ("server", "loadgen", "policies", "profiler")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in OURS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the user is imported')\n")
    (tmp_path / "helper.py").write_text("value = 5\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in the folder, which comes first on PYTHONPATH too."""
    path = os.pathsep.join([".", str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def call(folder: Path, function: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(folder, "-c", f"from batchwright.commands import {function}; {function}()", *arguments)


def test_solve_policy_solves(folder: Path) -> None:
    done = call(folder, "solve_policy", "googlenet-tesla-p4", "--load", "0.5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["profile"] == "googlenet-tesla-p4"


def test_generate_load_simulates(folder: Path) -> None:
    load = ("--policy", "greedy", "--rate", "1000", "--duration", "0.1", "--json")
    done = call(folder, "generate_load", "--simulate", "googlenet-tesla-p4", *load)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"] > 0


@pytest.mark.slow
def test_generate_load_sends_from_several_processes(folder: Path) -> None:
    script = folder / "generate-load"  # as pip writes it: a spawned process imports it again
    script.write_text(
        "from batchwright.commands import generate_load\nif __name__ == '__main__':\n    generate_load()\n"
    )
    with serving_in_a_thread(Stub()) as url:
        load = ("--rate", "20", "--duration", "0.5", "--processes", "2", "--pixels", "--json")
        done = run(folder, str(script), url, *load)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] > 0


@pytest.mark.parametrize(
    ("function", "about"),
    [("serve_model", "Serve models over HTTP"), ("profile_model", "Measure a model")],
)
def test_the_server_and_the_profiler_start(function: str, about: str, folder: Path) -> None:
    done = call(folder, function, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert about in done.stdout


def test_the_python_interface_is_imported(folder: Path) -> None:
    done = run(folder, "-c", "from batchwright import Profile, solve; print(Profile.load('googlenet-tesla-p4').name)")
    assert (done.stdout, done.stderr) == ("googlenet-tesla-p4\n", "")


def test_other_modules_of_the_user_are_importable(folder: Path) -> None:
    done = run(folder, "-c", "import batchwright.commands, helper, policies; print(helper.value, policies.__file__)")
    assert done.stdout.split() == ["5", str(ROOT / "policies" / "__init__.py")], done.stderr


def test_each_console_script_starts_in_these_functions() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(scripts) == 4
    for name, target in scripts.items():
        assert target == f"batchwright.commands:{name.replace('-', '_')}"
        assert callable(getattr(commands, name.replace("-", "_")))
