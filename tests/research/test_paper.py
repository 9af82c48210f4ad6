"""The arithmetic of the paper's page."""

from pathlib import Path

import numpy as np
import pytest

from research.papers import setting
from research.papers.actions import breaks, broad_cases, even_energy, solved
from research.papers.setting import difference, googlenet, table, variant
from research.papers.truncation import PRINTED_SAVINGS, TABLE_II, complexity, reductions
from research.papers.variants import service_functions


def test_the_printed_reductions_follow_from_the_printed_lengths_and_iterations() -> None:
    chosen, plain = TABLE_II[2], TABLE_II[4]
    space, time = reductions(chosen.length, chosen.iterations, plain.length, plain.iterations)
    assert 100.0 * space == pytest.approx(PRINTED_SAVINGS[0], abs=0.05)  # printed with three digits
    assert 100.0 * time == pytest.approx(PRINTED_SAVINGS[1], abs=0.5)  # printed with two


def test_complexity_is_as_printed() -> None:
    space, time = complexity(70, 1483)
    assert space == 2240
    assert time == pytest.approx(2.33e8, rel=2e-3)  # printed with three digits


@pytest.mark.parametrize(
    ("printed", "ours", "said"), [(2.0, 2.0, "0"), (2.0, 2.1, "+5.00 %"), (66.1377, 66.1310, "-1.0e-04")]
)
def test_a_difference_is_relative_to_the_printed_figure(printed: float, ours: float, said: str) -> None:
    assert difference(printed, ours) == said


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_a_variant_keeps_what_is_not_said() -> None:
    assert variant(8).service_times == googlenet().truncated(8).service_times
    assert variant(8).energies == pytest.approx(googlenet().truncated(8).energies)
    assert variant(8, 2.0).service_times == (2e-3,) * 8


def test_an_odd_batch_costs_as_much_as_the_next_even_one() -> None:
    assert even_energy(3) == even_energy(4) > even_energy(2)


def test_case_5_has_more_than_one_threshold() -> None:
    assert any(breaks(solution) for solution in solved(broad_cases()[1], 1.0))


def test_service_functions_have_the_mean_in_common() -> None:
    times = np.linspace(0.0, 0.5, 200_001)
    for shares in service_functions(3e-3, times).values():
        mean = float(np.sum(1.0 - shares) * (times[1] - times[0]))
        assert mean == pytest.approx(3e-3, abs=3e-6)  # the sum's own error is half a step


def test_one_section_is_written_anew_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "paper.md"
    monkeypatch.setattr(setting, "PAGE", page)
    page.write_text("# Title\n\n## First\n\nold\n\n## Second\n\nkept\n")
    setting.replace_section(setting.Section("First", "new\ntext\n\n    x  =  1\n\n| a |"))
    assert page.read_text() == "# Title\n\n## First\n\nnew text\n\n    x  =  1\n\n| a |\n\n## Second\n\nkept\n"
    setting.replace_section(setting.Section("Third", "added"))
    assert page.read_text().endswith("kept\n\n## Third\n\nadded\n")
