"""The pages that are written from the records."""

from pathlib import Path

import pytest

from benchmarks.page import PAGES, Page, Section
from benchmarks.support import harness
from benchmarks.support.harness import ROOT
from research.page import PAGE

EACH_PAGE = pytest.mark.parametrize("page", [*PAGES, PAGE], ids=lambda page: page.path)


@EACH_PAGE
def test_the_page_is_written_from_the_records(page: Page) -> None:
    assert (ROOT / page.path).read_text() == str(page), "run python -m benchmarks.page and research.page"


@EACH_PAGE
def test_each_section_names_an_existing_script(page: Page) -> None:
    for section in page.sections:
        module = ROOT / section.package / section.script
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()


def test_a_section_without_a_record_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RECORDS", tmp_path)
    assert str(Section("Speed", "speed", "About.")) == (
        "## Speed\n\nAbout. (`python -m benchmarks.speed`)\n\nNot measured yet.\n"
    )
