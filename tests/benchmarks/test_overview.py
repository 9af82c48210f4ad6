"""The page's rows: what holds is reproduced, and the printed numbers are those of the papers."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.paper import batching, overview_batching, overview_smdp
from benchmarks.paper.overview import RESULTS, Paper, Row, judged, overview
from benchmarks.paper.runs import TABLE_I, Runs
from benchmarks.paper.setting import PAGE, Claim, Section, at, googlenet
from benchmarks.paper.truncation import TABLE_II, rvi
from loadgen.simulated import simulate_policy
from policies import catalog
from policies.charts.averages import benchmarks
from policies.queue.arrivals import poisson
from policies.smdp.solver import solve


@pytest.fixture(scope="module")
def results() -> Runs:
    """Table I's policies on few arrivals."""
    solutions = benchmarks(at(googlenet(), 0.7)) | {
        f"solved, w2 = {w}": solve(at(googlenet(), 0.7, w)) for w in (1.6, 2.2)
    }
    arrivals = poisson(at(googlenet(), 0.7).arrival_rate, 30.0, np.random.default_rng(0))
    return Runs(
        solutions,
        {
            name: simulate_policy(catalog.solved(solution.batch_size, googlenet()), arrivals)
            for name, solution in solutions.items()
        },
    )


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


def test_the_rows_of_the_journal_paper(results: Runs) -> None:
    found = result_of(overview_smdp.journal(results))
    assert len(found) == 14
    reproduced = {item for item, result in found.items() if result == "reproduced"}
    # Table I's percentiles need more than these arrivals
    assert reproduced | {"Table I"} == {
        "Figure 3",
        "Figure 4",
        "Figure 5",
        "Figure 6",
        "Figure 11",
        "Table I",
        "Table II",
    }
    assert {item for item, result in found.items() if result == "different"} - {"Table I"} == {
        "Figure 7",
        "Figure 8",
        "Figure 9",
        "Figure 10",
        "Table III",
    }


def test_the_means_of_table_i_are_exact() -> None:
    for name, (power, mean, *_) in TABLE_I.items():
        w2 = name.removeprefix("solved, w2 = ")
        solution = benchmarks(at(googlenet(), 0.7))[name] if w2 == name else solve(at(googlenet(), 0.7, float(w2)))
        assert solution.mean_power == pytest.approx(power, rel=1e-3)
        assert 1e3 * solution.mean_response_time == pytest.approx(mean, rel=1e-3)


def test_the_rows_of_the_conference_paper() -> None:
    found = result_of(overview_smdp.conference_paper())
    assert [found[f"Figure {n}"] for n in range(4, 9)] == ["different", *["reproduced"] * 3, "different"]
    assert found["Table I"] == "reproduced"


def test_the_rows_of_multi_bin_batching() -> None:
    found = result_of(overview_batching.multi_bin())
    reproduced = [item for item, result in found.items() if result == "reproduced"]
    assert reproduced == ["Figure 1(b)", "Figure 4", "Figure 6", "Figure 8", "Figure 9"]
    assert [item for item, result in found.items() if result == "different"] == ["Figure 3", "Table 1", "Figure 10"]


def test_the_rows_of_lazy_batching() -> None:
    found = result_of(overview_batching.lazy_batching())
    assert len([item for item in found if item.startswith("Figure")]) == 17
    assert [item for item, result in found.items() if result == "reproduced"] == ["Figure 5", "Figure 10"]
    for item in ("Figure 12", "Figure 13", "Figure 14", "Figure 15", "Section VI-C: four models"):
        assert found[item] == "different"


def test_batch_monitors_figure_is_different() -> None:
    assert result_of(overview_batching.batch_monitor()) == {"Figure 1": "no numbers", "Figure 2": "different"}


def test_every_result_is_one_of_the_four() -> None:
    for paper in (overview_batching.multi_bin(), overview_batching.lazy_batching()):
        assert sum(paper.number(result) for result in RESULTS) == len(paper.rows)


def test_iterations_of_table_ii_differ_by_at_most_one() -> None:
    problem = at(googlenet(), 0.9, 1.0)
    ours = [rvi(problem, column.overflow_cost, column.length) for column in TABLE_II[:3]]
    assert [column.iterations - each.iterations for column, each in zip(TABLE_II, ours, strict=False)] == [1, 1, 1]
    for column, each in zip(TABLE_II, ours, strict=False):
        assert each.overflow_cost_share == pytest.approx(column.share, rel=2e-3)
        assert each.gain == pytest.approx(column.gain, rel=1.1e-4)


def test_the_page_has_the_rows_of_today() -> None:
    papers = (
        overview_smdp.conference_paper(),
        overview_batching.multi_bin(),
        overview_batching.lazy_batching(),
        overview_batching.batch_monitor(),
    )
    page = PAGE.read_text()
    for section in overview(papers)[1:]:
        assert f"## {section.title}\n\n{section.text}\n" in page, f"run python -m benchmarks.paper: {section.title}"


@pytest.mark.parametrize(
    "section", [batching.multi_bin_figure_9, batching.predicted_lengths, batching.lazy_sensitivity]
)
def test_the_page_has_the_tables_of_the_records(section: Callable[[], Section]) -> None:
    page = PAGE.read_text()
    tables = [part for part in section().text.split("\n\n") if part.startswith("|")]
    assert tables
    assert all(table in page for table in tables)
