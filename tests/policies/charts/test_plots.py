"""Charts, read back from their Axes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from policies.charts.action_chart import ChartRow, chart_rows, control_limit_violations, legend_handles, policy_chart
from policies.charts.averages import Tradeoff, benchmarks, distribution_chart, frontier_chart, tradeoff
from policies.charts.plots import plot_policy, plot_table
from policies.objectives.frontier import MeanBound, choose_weight, frontier
from policies.profile import Profile, load_profile
from policies.solver.distributions import Gamma
from policies.solver.model import Problem
from policies.solver.solver import solve

PROFILE = load_profile("googlenet-tesla-p4")
BUSY = replace(PROFILE, energies=None)
LIMIT = (0, 0, 0, 3, 4)  # a control limit of 3
BROKEN = (0, 1, 0, 3, 2, 4)  # waits at 2 after launching at 1, and launches 2 where 4 wait


def at(load: float, largest: int = 32) -> Problem:
    return Problem(PROFILE, load * PROFILE.truncated(largest).capacity, w2=1.0, max_batch_size=largest)


@pytest.fixture
def axes() -> Axes:
    return Figure(figsize=(8, 5)).subplots()


def legend_of(axes: Axes) -> list[str]:
    return [str(label) for label in axes.get_legend_handles_labels()[1]]


def frames(axes: Axes) -> list[tuple[float, float]]:
    """Queue length and row of each framed control limit."""
    return [(round(p.get_x() + 0.46), round(p.get_y() + 0.46)) for p in axes.patches if not p.get_fill()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (LIMIT, []),
        (BROKEN, [2, 4]),
        ((0, 1, 2, 3, 4), []),
        ((0, 1, 2, 3, 3, 4), [4]),
        ((0, 0, 0, 0), []),
    ],
)
def test_deviations_from_the_control_limit_of_the_first_launch(table: Sequence[int], expected: list[int]) -> None:
    assert list(control_limit_violations(table, 4)) == expected


def test_a_policy_chart_has_numbers_if_there_is_room(axes: Axes) -> None:
    policy_chart(axes, [ChartRow("0.1", LIMIT), ChartRow("0.9", BROKEN)], 4)
    assert [text.get_text() for text in axes.texts] == [*map(str, (0, 0, 0, 3, 4, 4, 4)), *map(str, (*BROKEN, 4))]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.1", "0.9"]


def test_waits_are_masked_in_the_colour_map(axes: Axes) -> None:
    mesh = policy_chart(axes, [ChartRow("0.1", LIMIT)], 4)
    values = mesh.get_array()
    assert isinstance(values, np.ma.MaskedArray)
    assert values.mask.ravel().tolist() == [True, True, True, False, False, False]
    assert to_hex(mesh.cmap(values)[0, 0]) not in {to_hex(mesh.cmap(n / 4)) for n in range(5)}


def test_a_control_limit_is_framed_and_deviations_are_filled(axes: Axes) -> None:
    policy_chart(axes, [ChartRow("0.1", LIMIT), ChartRow("0.9", BROKEN)], 4)
    assert frames(axes) == [(3, 0)]
    assert len([patch for patch in axes.patches if patch.get_fill()]) == 2


def test_a_chart_of_many_columns_marks_deviations_by_dots(axes: Axes) -> None:
    long = tuple(min(n, 30) for n in range(100))
    policy_chart(axes, [ChartRow("0.1", (*long, 32))], 32)
    assert not axes.texts
    assert len(axes.lines[0].get_xdata()) == sum(1 for n in range(100) if n > 30)  # type: ignore[arg-type]


def test_a_mix_is_two_rows_with_their_probabilities() -> None:
    mixed = choose_weight(at(0.3), MeanBound(5.3e-3))
    first, second = chart_rows([mixed])
    assert mixed.mix is not None
    assert (first.batch_size, second.batch_size) == (mixed.batch_size, tuple(mixed.mix.batch_size))
    assert first.label.startswith("0.3 (")
    assert first.label != second.label


def test_the_legend_has_an_entry_for_each_type_of_cell() -> None:
    assert len({str(handle.get_label()) for handle in legend_handles()}) == 4


@pytest.mark.parametrize(
    ("load", "largest", "names"),
    [
        (0.7, 32, ["greedy", "static 8", "static 16", "static 32"]),
        (0.8, 32, ["greedy", "static 16", "static 32"]),  # the capacity of static 8 is 0.774
        (0.7, 16, ["greedy", "static 8", "static 16"]),
        (0.5, 4, ["greedy"]),
    ],
)
def test_unstable_or_too_large_benchmarks_are_omitted(load: float, largest: int, names: list[str]) -> None:
    assert list(benchmarks(at(load, largest))) == names


def test_benchmarks_below_the_minimum_batch_size_are_omitted() -> None:
    problem = replace(at(0.3), min_batch_size=10)
    assert list(benchmarks(problem)) == ["greedy", "static 16", "static 32"]
    assert benchmarks(problem)["greedy"].batch_size[:11] == (0,) * 10 + (10,)


def test_a_frontier_chart_draws_each_vertex_each_benchmark_and_the_policy(axes: Axes) -> None:
    problem = at(0.7, 8)
    shown = tradeoff(problem)
    frontier_chart(axes, shown, solve(problem))
    assert [len(line.get_xdata()) for line in axes.lines] == [len(shown.vertices), 1, 1, 1]  # type: ignore[arg-type]
    assert legend_of(axes) == ["solved, ρ = 0.7", "greedy", "static 8", "this policy"]
    assert axes.lines[0].get_xdata()[0] == 1e3 * shown.vertices[0].mean_response_time  # type: ignore[index]
    assert axes.lines[0].get_ydata()[0] == shown.vertices[0].mean_power  # type: ignore[index]


def test_a_frontier_of_random_service_times_is_thinned_between_the_same_ends() -> None:
    problem = replace(at(0.5, 8), service=Gamma((1.0,)))
    drawn, all_of_it = tradeoff(problem).vertices, frontier(problem)
    assert 5 <= len(drawn) < len(all_of_it)
    for one, other in ((drawn[0], all_of_it[0]), (drawn[-1], all_of_it[-1])):
        assert one.mean_response_time == pytest.approx(other.mean_response_time, rel=1e-6)  # the frontier's tolerance
    times, powers = zip(*((s.mean_response_time, -(s.mean_power or 0.0)) for s in drawn), strict=True)
    assert sorted(times) == list(times)
    assert sorted(powers) == list(powers)


def test_benchmarks_are_in_the_legend_of_two_frontiers_once(axes: Axes) -> None:
    for load in (0.3, 0.6):
        frontier_chart(axes, tradeoff(at(load, 8)))
    assert legend_of(axes) == ["solved, ρ = 0.3", "greedy", "static 8", "solved, ρ = 0.6"]


def test_efficiency_is_requests_per_joule(axes: Axes) -> None:
    shown = tradeoff(at(0.5, 4))
    frontier_chart(axes, shown, efficiency=True)
    power = shown.vertices[0].mean_power
    assert power is not None
    assert axes.lines[0].get_ydata()[0] == pytest.approx(shown.vertices[0].arrival_rate / power)  # type: ignore[index]


def test_a_benchmark_near_instability_is_not_drawn(axes: Axes) -> None:
    shown = tradeoff(at(0.5, 4))
    slow = replace(shown.vertices[0], mean_response_time=1.0)
    frontier_chart(axes, Tradeoff("", shown.vertices, {"greedy": slow}))
    assert len(axes.lines) == 1


def test_a_distribution_chart_ends_at_one_and_marks_percentiles_and_limit(axes: Axes) -> None:
    responses = np.arange(1, 101) / 1e3
    distribution_chart(axes, {"a": responses, "b": 2 * responses}, limit=50e-3)
    curve, marks = axes.lines[0], axes.lines[1]
    assert (curve.get_xdata()[-1], curve.get_ydata()[-1]) == (100.0, 1.0)  # type: ignore[index]
    assert np.asarray(marks.get_xdata()) == pytest.approx(1e3 * np.quantile(responses, (0.5, 0.9, 0.95)))
    said = legend_of(axes)
    assert "50.0% in time" in said[0]
    assert "25.0% in time" in said[1]
    assert said[2] == "limit, 50 ms"
    assert {text.get_text() for text in axes.texts} == {"p50", "p90", "p95"}


def test_a_large_distribution_is_thinned_and_ends_at_the_largest(axes: Axes) -> None:
    responses = np.random.default_rng(0).exponential(1e-3, 50_000)
    distribution_chart(axes, {"": responses})
    x = np.asarray(axes.lines[0].get_xdata())
    assert len(x) < 2000
    assert x[-1] == 1e3 * responses.max()


@pytest.mark.parametrize("energies", [True, False])
@pytest.mark.parametrize("simulated", [True, False])
def test_a_policy_is_plotted_with_and_without_energies_and_responses(
    tmp_path: Path, energies: bool, simulated: bool
) -> None:
    problem = at(0.5, 4)
    if not energies:
        problem = replace(problem, profile=BUSY)
    plot_policy(problem, solve(problem), np.array([1e-3, 2e-3]) if simulated else None, tmp_path / "policy.png")
    assert (tmp_path / "policy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("profile", "label"), [(PROFILE, "mean power, W"), (BUSY, "busy time, share")])
def test_a_table_is_plotted_with_the_resource_that_it_saves(tmp_path: Path, profile: Profile, label: str) -> None:
    solutions = [solve(replace(at(load, 4), profile=profile)) for load in (0.2, 0.8)]
    plot_table(solutions, profile, tmp_path / "table.svg")
    assert f"<!-- {label} -->" in (tmp_path / "table.svg").read_text()


def test_a_plot_raises_for_an_invalid_file(tmp_path: Path) -> None:
    problem = at(0.5, 4)
    solution = solve(problem)
    with pytest.raises(ValueError, match="parrot"):
        plot_policy(problem, solution, None, tmp_path / "policy.parrot")
    with pytest.raises(ValueError, match="parrot"):
        plot_table([solution], PROFILE, tmp_path / "table.parrot")
    with pytest.raises(OSError, match="nowhere"):
        plot_table([solution], PROFILE, tmp_path / "nowhere" / "table.png")
