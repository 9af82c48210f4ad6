"""Who may import whom: the table of ARCHITECTURE.md, kept true."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "policies": set[str](),
    "server": {"policies"},
    "profiler": {"policies", "server"},
    "loadgen": {"policies"},
}
IMPURE = {"asyncio", "time", "datetime", "random", "torch", "fastapi", "pynvml", "prometheus_client", "typer", "rich"}
EDGES = {"cli.py", "command.py", "plots.py"}  # of policies: where it meets people


def _modules(package: str) -> Iterator[Path]:
    yield from (ROOT / package).rglob("*.py")


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    for path in _modules(package):
        if path.name != "cli.py":
            siblings = {name.split(".")[0] for name in _imported(path)} & ALLOWED.keys()
            assert siblings <= ALLOWED[package] | {package}, path


def test_nobody_imports_a_command_line() -> None:
    for package in ALLOWED:
        for path in _modules(package):
            assert not any(name.endswith(".cli") for name in _imported(path)), path


def test_policies_have_no_clock_no_randomness_no_device() -> None:
    for path in _modules("policies"):
        if path.name not in EDGES:
            assert not {name.split(".")[0] for name in _imported(path)} & IMPURE, path


def test_the_api_imports_no_backend() -> None:
    assert "server.backends.executor" not in _imported(ROOT / "server" / "gateway.py")


def test_no_file_is_over_seven_hundred_lines() -> None:
    for package in ALLOWED:
        for path in _modules(package):
            assert len(path.read_text().splitlines()) <= 700, path
