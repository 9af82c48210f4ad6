"""docs/benchmarks.md against the records."""

import pytest

from benchmarks.page import PAGE, SECTIONS, render
from benchmarks.support.harness import ROOT


def test_the_page_is_written_from_the_records() -> None:
    assert PAGE.read_text() == render(), "run python -m benchmarks.page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.script)
def test_each_section_names_an_existing_script(section: object) -> None:
    assert (ROOT / "benchmarks" / f"{section.script}.py").is_file()  # type: ignore[attr-defined]
