"""The page's rows: what holds is reproduced, and the printed numbers are those of the papers."""

from collections.abc import Callable
from functools import partial

import pytest

from research.papers import batching, overview_batching, overview_smdp
from research.papers.overview import RESULTS, Paper, Row, judged, overview
from research.papers.setting import PAGE, Claim, Section, agreement

# Tests with this mark use the same results, which take more than five seconds. They are computed once if one process
# runs all of these tests.
SHARED = pytest.mark.slow


def result_of(paper: Paper) -> dict[str, str]:
    return {row.item: row.result for row in paper.rows}


def test_a_row_is_reproduced_only_if_every_claim_holds() -> None:
    assert judged("T", "a", "b", [Claim("x", True)]).result == "reproduced"
    row = judged("T", "a", "b", [Claim("x", True), Claim("y", False, "z")], "why")
    assert (row.result, row.note) == ("different", "not so: y: z; why")


def test_the_counts_are_those_of_the_rows() -> None:
    paper = Paper("P", [Row("a", "reproduced", "", ""), Row("b", "different", "", ""), Row("c", "different", "", "")])
    first, second = overview([paper, paper])[0].text.splitlines()[-2:]
    assert first == "| P | 1 | 2 | 0 | 0 |"
    assert second == "| all | 2 | 4 | 0 | 0 |"


def test_the_page_counts_the_rows_of_the_journal_paper() -> None:
    """Those that take long to compute are not computed here: test_paper_claims.py asserts their statements."""
    table = PAGE.read_text().partition("(journal)\n\n")[2].partition("\n\n")[0]
    found = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in table.splitlines()[2:]}
    assert len(found) == 14
    different = {"Figure 7", "Figure 8", "Figure 9", "Figure 10", "Table III"}
    assert {item for item, result in found.items() if result == "different"} == different
    assert sum(result == "reproduced" for result in found.values()) == 7


@pytest.mark.parametrize(
    "compute",
    [
        overview_smdp._table_i,
        overview_smdp._figure_7,
        overview_smdp._figure_8,
        pytest.param(partial(overview_smdp._figure_10, "Figure 10"), marks=SHARED),
        pytest.param(partial(overview_smdp._table_ii, "Table II"), marks=SHARED),
        overview_smdp._figure_11,
    ],
)
def test_the_page_has_the_rows_of_the_journal_paper(compute: Callable[[], Row]) -> None:
    row = compute()
    line = f"| {row.item} | {row.result} | {row.printed} | {row.ours} | {row.note} |"
    assert line in PAGE.read_text().partition("(journal)\n\n")[2].partition("\n\n")[0].splitlines()


@SHARED
def test_the_statements_on_figure_10() -> None:
    claims = overview_smdp._figure_10_claims()
    assert [claim.holds for claim in claims] == [True, True, False, False]
    page = " ".join(PAGE.read_text().split())
    assert agreement([*claims]) in page
    assert all(page.count(claim.instead) == 3 for claim in claims[2:])  # in two rows and in the section


@SHARED
def test_the_rows_of_the_conference_paper() -> None:
    found = result_of(overview_smdp.conference_paper())
    assert [found[f"Figure {n}"] for n in range(4, 9)] == ["different", *["reproduced"] * 3, "different"]
    assert found["Table I"] == "reproduced"


def test_the_rows_of_multi_bin_batching() -> None:
    found = result_of(overview_batching.multi_bin())
    reproduced = [item for item, result in found.items() if result == "reproduced"]
    assert reproduced == ["Figure 1(b)", "Figure 4", "Figure 6", "Figure 8", "Figure 9"]
    assert [item for item, result in found.items() if result == "different"] == ["Figure 3"]


def test_the_rows_of_lazy_batching() -> None:
    found = result_of(overview_batching.lazy_batching())
    assert len([item for item in found if item.startswith("Figure")]) == 17
    assert [item for item, result in found.items() if result == "reproduced"] == ["Figure 5", "Figure 10"]
    for item in ("Figure 12", "Figure 13", "Figure 14", "Figure 15"):
        assert found[item] == "different"
    assert found["Section VI-C: four models"] == "not possible here"


def test_batch_monitors_figure_is_different() -> None:
    assert result_of(overview_batching.batch_monitor()) == {"Figure 1": "no numbers", "Figure 2": "different"}


@pytest.mark.parametrize(
    ("values", "holds"),
    [([3, 1, 2], True), ([3, 1], False), ([1, 2], False), ([3, 1, 2, 1.5], False), ([3, 4, 1, 2], False)],
)
def test_falling_and_rising_are_both_checked(values: list[float], holds: bool) -> None:
    assert overview_batching.falls_then_rises(values) == holds


def test_policies_with_smaller_batches_are_named() -> None:
    policies = {name: {"mean_batch_size": mean} for name, mean in {"Serial": 1.0, "greedy": 61.0, "lazy": 60.0}.items()}
    said = overview_batching.full_batches(policies, 64)
    assert said == "every policy but Serial launches full batches (in the mean at least 94% of the largest)"


def test_every_result_is_one_of_the_four() -> None:
    for paper in (overview_batching.multi_bin(), overview_batching.lazy_batching()):
        assert sum(paper.number(result) for result in RESULTS) == len(paper.rows)


@SHARED
def test_the_page_has_the_rows_of_today() -> None:
    papers = (
        overview_smdp.conference_paper(),
        overview_batching.multi_bin(),
        overview_batching.lazy_batching(),
        overview_batching.batch_monitor(),
    )
    page = PAGE.read_text()
    for section in overview(papers)[1:]:
        assert f"## {section.title}\n\n{section.text}\n" in page, f"run python -m research.papers: {section.title}"


@pytest.mark.parametrize(
    "section", [batching.multi_bin_figure_9, batching.predicted_lengths, batching.lazy_sensitivity]
)
def test_the_page_has_the_tables_of_the_records(section: Callable[[], Section]) -> None:
    page = PAGE.read_text()
    tables = [part for part in section().text.split("\n\n") if part.startswith("|")]
    assert tables
    assert all(table in page for table in tables)
