"""Which records are older than their code, in a small repository."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import records_age
from benchmarks.page import Page, Section
from benchmarks.records_age import Age, age, ages, code_of
from benchmarks.support.harness import ROOT

FILES = {
    "benchmarks/__init__.py": "",
    "benchmarks/speed.py": "import json\n\nfrom policies.rules import limit\n\nCOMMAND = 'benchmarks.servers.slow'\n",
    "benchmarks/power.py": "from policies import power\n",
    "benchmarks/servers/slow.py": "import server\n",
    "benchmarks/records/speed.json": "{}\n",
    "benchmarks/records/power.json": "{}\n",
    "policies/__init__.py": "",
    "policies/rules/__init__.py": "",
    "policies/rules/limit.py": "from policies.types import Request\n",
    "policies/types.py": "class Request: ...\n",
    "policies/power.py": "",
    "policies/unused.py": "",
    "server/__init__.py": "",
}


class Repository:
    """A git repository with two benchmarks and their records."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        self.commit("first")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def change(self, name: str) -> None:
        """Commit another version of a file."""
        (self.root / name).write_text(f"{(self.root / name).read_text()}\n")
        self.commit(f"change {name}")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_the_code_of_a_record_is_what_its_script_imports_and_runs(repository: Repository) -> None:
    assert {str(path) for path in code_of(repository.root, Path("benchmarks/speed.py"))} == {
        *("benchmarks/__init__.py", "benchmarks/speed.py", "benchmarks/servers/slow.py", "server/__init__.py"),
        *("policies/__init__.py", "policies/rules/__init__.py", "policies/rules/limit.py", "policies/types.py"),
    }


def test_a_record_made_with_its_code_is_not_older(repository: Repository) -> None:
    assert [(one.record, one.commits, one.latest) for one in ages(repository.root)] == [
        ("power", 0, ""),
        ("speed", 0, ""),
    ]


@pytest.mark.parametrize(
    "name", ["benchmarks/speed.py", "policies/types.py", "benchmarks/servers/slow.py", "server/__init__.py"]
)
def test_a_commit_to_a_module_makes_the_records_that_use_it_older(repository: Repository, name: str) -> None:
    repository.change(name)
    repository.change("policies/unused.py")
    assert [(one.record, one.commits) for one in ages(repository.root)] == [("speed", 1), ("power", 0)]


def test_a_new_record_is_as_old_as_its_code_again(repository: Repository) -> None:
    repository.change("policies/types.py")
    repository.change("benchmarks/records/speed.json")
    assert age(repository.root, Path("benchmarks"), "speed").commits == 0


def test_a_record_that_is_not_committed_as_it_is_has_no_age(repository: Repository) -> None:
    (repository.root / "benchmarks/records/speed.json").write_text("[]\n")
    assert age(repository.root, Path("benchmarks"), "speed") == Age("speed", "", 0, "", 0)


def test_a_module_that_is_not_committed_as_it_is_makes_the_records_that_use_it_older(repository: Repository) -> None:
    for name in ("policies/types.py", "policies/unused.py"):
        (repository.root / name).write_text("# changed\n")
    assert [(one.record, one.commits, one.uncommitted) for one in ages(repository.root)] == [
        ("speed", 0, 1),
        ("power", 0, 0),
    ]


def test_sections_of_the_page_without_a_record_are_listed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.change("policies/types.py")
    (repository.root / "policies/types.py").write_text("# changed\n")
    monkeypatch.setattr(records_age, "ROOT", repository.root)
    sections = [Section("Speed", "speed", ""), Section("Soak", "soak", "")]
    monkeypatch.setattr(records_age, "PAGES", [Page("", "", "", sections)])
    monkeypatch.setattr("sys.argv", ["records_age"])
    records_age.main()
    speed, power, soak = capsys.readouterr().out.splitlines()
    assert "older than 1 commits to its code, last" in speed
    assert speed.endswith("and uncommitted changes of 1 modules")
    assert power.endswith("not older than its code")
    assert soak.split() == ["soak", "not", "measured"]


def test_of_the_own_benchmarks_only_those_with_a_server_depend_on_it() -> None:
    solver, ceiling = (code_of(ROOT, Path(f"benchmarks/{name}.py")) for name in ("solver", "ceiling"))
    assert Path("policies/solver/tail.py") in solver
    assert Path("server/cli.py") in ceiling
    assert not any(path.parts[0] == "server" for path in solver)
