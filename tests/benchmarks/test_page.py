"""docs/benchmarks.md is what the records say."""

from pathlib import Path

import pytest

from benchmarks.page import PAGE, SECTIONS, render, table

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_the_page_is_written_from_the_records() -> None:
    assert PAGE.read_text() == render(), "run python -m benchmarks.page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.script)
def test_each_section_names_a_script_that_is_there(section: object) -> None:
    assert (BENCHMARKS / f"{section.script}.py").is_file()  # type: ignore[attr-defined]


def test_a_table_is_markdown() -> None:
    assert table(("a", "b"), [(1, "x"), (2.5, "y")]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2.5 | y |"
