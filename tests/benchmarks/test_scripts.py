"""The benchmark scripts and the Makefile's targets."""

import ast

import pytest

from benchmarks.mutations import MUTATIONS, Mutation
from benchmarks.support.harness import ROOT

SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_is_run_by_a_target_of_the_makefile(script: object) -> None:
    assert f"-m benchmarks.{script.stem}" in (ROOT / "Makefile").read_text()  # type: ignore[attr-defined]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_parses_its_command_line(script: object) -> None:
    tree = ast.parse(script.read_text())  # type: ignore[attr-defined]
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in called}
    assert names & {"argument_parser", "measure_parts"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.about)
def test_each_mutation_changes_the_code_as_it_is(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
