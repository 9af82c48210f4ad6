"""List which records are older than the code that they measure.

A record is made by the script of its name. The script's code is the script and all modules of this repository that it
imports, directly or through another one, and those that benchmarks run: as `-m MODULE`, or as one of the project's
commands.
A record is older than that code if a commit after the record's last one, or a change that is not committed, is in a
module. Profiles, pages and other files do not count, nor does it matter what changes: a comment makes a record older.
Sections of the pages whose script has no record are listed as not measured.
"""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.page import PAGES
from benchmarks.support.harness import MODULES, ROOT, argument_parser

_FOLDERS = (Path("benchmarks"), Path("research"))
_SERVERS = {"serving": MODULES["serve-model"]}  # functions of the harness that run a command that they do not name


@dataclass(frozen=True)
class Age:
    """What happened to the code since a record was made.

    Attributes:
        record: its name.
        made: the record's last commit: hash and date; empty if it is not committed as it is.
        commits: number of later commits that change its code.
        latest: the last of them: hash and date; empty if there is none.
        uncommitted: number of modules with changes that are not committed.
    """

    record: str
    made: str
    commits: int
    latest: str
    uncommitted: int


def ages(root: Path) -> list[Age]:
    """The ages of all records of a repository, those with the most later commits first."""
    records = [(folder, path.stem) for folder in _FOLDERS for path in (root / folder / "records").glob("*.json")]
    return sorted(
        (age(root, folder, name) for folder, name in sorted(records)), key=lambda one: (-one.commits, -one.uncommitted)
    )


def age(root: Path, folder: Path, record: str) -> Age:
    """The age of one record of a folder."""
    path = folder / "records" / f"{record}.json"
    made = _git(root, "log", "-1", "--format=%h %cs", "--", str(path))
    if not made or _git(root, "status", "--porcelain", "--", str(path)):
        return Age(record, "", 0, "", 0)
    files = sorted(map(str, code_of(root, folder / f"{record}.py")))
    since = f"{made.split()[0]}..HEAD"
    later = _git(root, "log", "--format=%h %cs", since, "--", *files).splitlines()
    changed = _git(root, "status", "--porcelain", "--", *files).splitlines()
    return Age(record, made, len(later), later[0] if later else "", len(changed))


def code_of(root: Path, script: Path) -> set[Path]:
    """The script and the modules that it uses, relative to the root."""
    found, left = set[Path](), [script]
    while left:
        path = left.pop()
        if path not in found and (root / path).is_file():
            found.add(path)
            left += [file for name in _named(root / path) for file in _files(root, name)]
    return found


@cache
def _named(path: Path) -> frozenset[str]:
    """The modules that a file may import or run, also names that are no module."""
    return frozenset(_names(path))


def _names(path: Path) -> Iterator[str]:
    # the harness names every command, and a script runs those that it names too
    runs = any(folder.name in path.parts for folder in _FOLDERS) and path.name != "harness.py"
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Name(id=name) | ast.Attribute(attr=name) if runs and name in _SERVERS:
                yield _SERVERS[name]
            case ast.Constant(value=str(text)) if runs and (text in MODULES or "." in text):
                yield MODULES.get(text, text)


def _files(root: Path, module: str) -> list[Path]:
    """The file of a module, and those of the packages around it; none if it is not of this repository."""
    if not all(part.isidentifier() for part in module.split(".")):
        return []
    path = Path(*module.split("."))
    around = [parent / "__init__.py" for parent in (path, *path.parents)]
    return [file for file in (path.with_suffix(".py"), *around[:-1]) if (root / file).is_file()]


def _git(root: Path, *arguments: str) -> str:
    line = ["git", *arguments]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Print a line for each record."""
    argument_parser(__doc__).parse_args()
    found = ages(ROOT)
    for one in found:
        print(f"{one.record:24s} {_described(one)}")
    for script in sorted(
        {section.script for page in PAGES for section in page.sections} - {one.record for one in found}
    ):
        print(f"{script:24s} not measured")


def _described(one: Age) -> str:
    if not one.made:
        return "not committed"
    older = [f"{one.commits} commits to its code, last {one.latest}"] if one.commits else []
    older += [f"uncommitted changes of {one.uncommitted} modules"] if one.uncommitted else []
    return f"of {one.made}, " + (f"older than {' and '.join(older)}" if older else "not older than its code")


if __name__ == "__main__":
    main()
