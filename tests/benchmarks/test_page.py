"""docs/benchmarks.md against the records."""

from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.page import PAGE, SECTIONS, Section, render
from benchmarks.support.harness import ROOT


def test_the_page_is_written_from_the_records() -> None:
    assert PAGE.read_text() == render(), "run python -m benchmarks.page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.script)
def test_each_section_names_an_existing_script(section: object) -> None:
    module = ROOT / "benchmarks" / section.script  # type: ignore[attr-defined]
    assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def test_a_section_without_a_record_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    assert str(Section("Speed", "speed", "About.")) == (
        "## Speed\n\nAbout. (`python -m benchmarks.speed`)\n\nNot measured yet.\n"
    )
