"""Percentiles of response times, simulated as in the journal, and exact: Table I and figure 6."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import finish_axes, new_figure
from policies import catalog
from policies.charts.averages import BLUE, MARKERS, VERMILLION, benchmarks, distribution_chart
from policies.objectives.frontier import frontier
from policies.percentile.response_law import ResponseLaw, response_law
from policies.planning.simulation import simulate_policy
from policies.queue.arrivals import poisson
from policies.queue.simulator import Estimate, Run, estimate, percentile, share_within
from policies.solver.distributions import Floats
from policies.solver.solver import Solution, solve
from research.papers.setting import Claim, Section, agreement, at, difference, googlenet, save_numbered, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REQUESTS, _FEWER = 1_660_000, 500_000
_LOAD, _LIMIT = 0.7, 10e-3
_RESOLUTION = 1e-4  # of shares of late requests that are compared
TABLE_I = {
    "static 8": (46.27, 6.85, 6.51, 9.85, 11.34),
    "solved, w2 = 1.6": (44.96, 6.90, 6.83, 9.23, 9.96),
    "solved, w2 = 2.2": (44.41, 7.81, 7.72, 10.45, 11.24),
}


@dataclass(frozen=True, eq=False)
class Runs:
    """Every policy of Table I and figure 6a on the same arrivals.

    Attributes:
        solutions: exact averages, by name.
        runs: simulations, by name.
    """

    solutions: Mapping[str, Solution]
    runs: Mapping[str, Run]


def simulated() -> Runs:
    """Simulate 1.66 million requests at load 0.7 under each policy."""
    solutions = benchmarks(at(googlenet(), _LOAD))
    solutions |= table_i_policies()
    arrivals = _arrivals(_REQUESTS)
    return Runs(solutions, {name: _run(solution, arrivals) for name, solution in solutions.items()})


def table_i(results: Runs) -> Section:
    """Table I beside the printed one."""
    rows = [row for name in TABLE_I for row in _rows(name, results)]
    heads = ["", "mean power, W", "mean, ms", "p50, ms", "p90, ms", "p95, ms"]
    text = f"""\
ρ = 0.7; {_REQUESTS / 1e6:g} million simulated requests, the same arrivals for the three policies. Standard errors by
batch means. The exact figures are those of the model, without simulation.

{table(heads, rows)}

{agreement(claims_table_i())} The largest difference from an exact figure is that of the 95th percentile of static 8: at
load 0.9 of its own capacity that policy's queue has a long memory."""
    return Section("Table I: power and percentiles", text)


def exact_figures(solution: Solution) -> tuple[float, ...]:
    """The columns of Table I in the model: mean power, W; mean, 50th, 90th and 95th percentile, ms."""
    law = _law(solution)
    percentiles = (1e3 * law.percentile(share) for share in (0.5, 0.9, 0.95))
    return (solution.mean_power or 0.0, 1e3 * solution.mean_response_time, *percentiles)


def table_i_policies() -> dict[str, Solution]:
    """The policies of Table I, by its names."""
    solutions = {name: benchmarks(at(googlenet(), _LOAD))[name] for name in ("static 8",)}
    return solutions | {f"solved, w2 = {w2}": solve(at(googlenet(), _LOAD, w2)) for w2 in (1.6, 2.2)}


def claims_table_i() -> list[Claim]:
    """Section VII-B 3, on Table I."""
    static, fast, slow = (exact_figures(solution) for solution in table_i_policies().values())
    return [
        Claim("both solved policies use less power than static 8", max(fast[0], slow[0]) < static[0]),
        Claim("their mean response times are longer", min(fast[1], slow[1]) > static[1]),
        Claim("with w2 = 1.6 the 90th and 95th percentile are shorter", fast[3] < static[3] and fast[4] < static[4]),
        Claim("with w2 = 2.2 the 95th is", slow[4] < static[4]),
    ]


@lru_cache(maxsize=16)
def _law(solution: Solution) -> ResponseLaw:
    return response_law(at(googlenet(), _LOAD), solution.batch_size)


def _rows(name: str, results: Runs) -> list[list[str]]:
    run, solution, printed = results.runs[name], results.solutions[name], TABLE_I[name]
    mean = estimate(run.responses, lambda block: float(block.mean()))
    shares = [percentile(run.responses, share) for share in (0.5, 0.9, 0.95)]
    ours = [Estimate(run.mean_power or 0.0, 0.0), *(_in_ms(e) for e in (mean, *shares))]
    return [
        [f"{name}, printed", *(f"{value:.2f}" for value in printed)],
        ["ours", *(f"{e.value:.3f}" + (f" ± {e.standard_error:.3f}" if e.standard_error else "") for e in ours)],
        ["difference", *(difference(p, e.value) for p, e in zip(printed, ours, strict=True))],
        ["exact", *(f"{value:.3f}" for value in exact_figures(solution))],
    ]


def figure_6(results: Runs) -> Section:
    """Distributions, and power against the 95th percentile and the share in time."""
    figure = new_figure(14, 6)
    axes = figure.subplot_mosaic([["a", "b"], ["a", "c"]], width_ratios=(1.35, 1))
    distribution_chart(axes["a"], {name: run.responses for name, run in results.runs.items()}, _LIMIT)
    axes["a"].set_title(f"(a) distribution functions, {_REQUESTS / 1e6:g} million requests each")
    points = measured() + measured({name: results.solutions[name] for name in MARKERS})
    _draw(axes["b"], points, share=False)
    axes["b"].set(xlabel="95th percentile of the response time, ms", title="(b) power and 95th percentile")
    _draw(axes["c"], points, share=True)
    axes["c"].set(xlabel="answered within 10 ms, per cent", title="(c) power and share in time")
    chosen = min((p for p in points if p.p95.value < _LIMIT), key=lambda p: p.solution.mean_power or 0.0)
    for name, across in (("b", 1e3 * chosen.p95.value), ("c", 100.0 * chosen.share.value)):
        axes[name].plot(across, chosen.solution.mean_power or 0.0, "*", label="chosen for p95 < 10 ms", **_STAR)
    axes["b"].legend(frameon=False)
    return Section(
        "Figure 6: distributions and percentiles", f"{save_numbered(figure, 6)}\n\n{_caption(points, chosen)}"
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A policy on figures 6b and 6c.

    Attributes:
        name: the benchmark's; empty for a vertex of the frontier.
        solution: its exact averages.
        p95: 95th percentile of the response time, s.
        share: requests answered within 10 ms over all requests.
    """

    name: str
    solution: Solution
    p95: Estimate
    share: Estimate


def _caption(points: Sequence[Point], chosen: Point) -> str:
    bars = [max(getattr(p, key).standard_error for p in points) for key in ("p95", "share")]
    return f"""\
ρ = 0.7. {agreement(claims_6())} (b) and (c) show the frontier of figure 5 again, {_FEWER / 1e6:g} million requests a
point, power exact; the bars of one standard error are mostly smaller than the points (at most {1e3 * bars[0]:.3f} ms
and {100 * bars[1]:.2f} percentage points). The vertex of least power with a p95 below 10 ms:
{chosen.solution.mean_power:.3f} W, p95 {1e3 * chosen.p95.value:.2f} ± {1e3 * chosen.p95.standard_error:.2f} ms,
{chosen.share.value:.2%} within 10 ms; it is the solution for w2 = 1.6 of Table I."""


def claims_6() -> list[Claim]:
    """Section VII-B 3, on figure 6, with exact distributions."""
    times = np.linspace(1e-3, 25e-3, 241).tolist()  # s; beyond, all but 1e-4 are answered under static 8
    found = benchmarks(at(googlenet(), _LOAD)) | table_i_policies()
    late = {name: _law(solution).late(times) for name, solution in found.items()}
    order = [late[name] for name in ("greedy", "static 8", "static 16", "static 32")]
    ordered = 1.0 - max(float(left[left > right + _RESOLUTION].max(initial=0.0)) for left, right in pairwise(order))
    crossings = {name: _upward_crossing(late["static 8"], late[name]) for name in found if name.startswith("solved")}
    marks = [f"{1e3 * times[mark]:.1f}" for mark in crossings.values() if mark is not None]
    return [
        Claim(
            "greedy, static 8, 16 and 32 follow each other from left to right in (a), in all but the tail (up to "
            f"{ordered:.1%} of the requests; then static 16 is faster than static 8)",
            ordered > 0.99,
        ),
        Claim(
            f"both solved policies cross static 8 upwards, at {' and '.join(marks)} ms, and beyond the crossing they "
            "are the faster",
            len(marks) == len(crossings),
        ),
    ]


def _upward_crossing(one: Floats, other: Floats) -> int | None:
    """The index from which on `other` has the smaller share of late requests; None if `one` has it at the end too."""
    above = np.flatnonzero(other > one + _RESOLUTION)  # where `other` is the slower
    if not len(above) or not np.any(other[above[-1] :] < one[above[-1] :] - _RESOLUTION):
        return None
    return int(above[-1]) + 1


def measured(solutions: Mapping[str, Solution] | None = None) -> list[Point]:
    """Points of these policies, or of the frontier's vertices, simulated with the same half a million arrivals."""
    arrivals = _arrivals(_FEWER)
    named = [("", s) for s in frontier(at(googlenet(), _LOAD))] if solutions is None else list(solutions.items())
    points = []
    for name, solution in named:
        responses = _run(solution, arrivals).responses
        points.append(Point(name, solution, percentile(responses, 0.95), share_within(responses, _LIMIT)))
    return points


def _draw(axes: "Axes", points: Sequence[Point], share: bool) -> None:
    """Draw power against the 95th percentile, ms, or the share in time, per cent, with bars of one standard error."""
    scale = 100.0 if share else 1e3
    for name in dict.fromkeys(point.name for point in points):
        mine = [point for point in points if point.name == name]
        across = [scale * (point.share if share else point.p95).value for point in mine]
        errors = [scale * (point.share if share else point.p95).standard_error for point in mine]
        style: dict[str, Any] = (
            {"color": "black", "mfc": "white", "marker": MARKERS[name], "ms": 6, "ls": "none"} if name else _CURVE
        )
        axes.errorbar(
            across, [point.solution.mean_power or 0.0 for point in mine], xerr=errors, label=name or "solved", **style
        )
    axes.axvline(95.0 if share else 1e3 * _LIMIT, color="black", linestyle=":", lw=1.2)
    finish_axes(axes)
    axes.set_ylabel("mean power, W")


def _arrivals(requests: int) -> NDArray[np.float64]:
    rate = at(googlenet(), _LOAD).arrival_rate
    return poisson(rate, 1.02 * requests / rate, np.random.default_rng(0))[:requests]


def _run(solution: Solution, arrivals: NDArray[np.float64]) -> Run:
    return simulate_policy(catalog.solved(solution.batch_size, googlenet()), arrivals)


def _in_ms(seconds: Estimate) -> Estimate:
    return Estimate(1e3 * seconds.value, 1e3 * seconds.standard_error)


_STAR: dict[str, Any] = {"color": VERMILLION, "mec": "black", "ms": 13, "ls": "none", "zorder": 4}
_CURVE: dict[str, Any] = {"color": BLUE, "marker": "o", "ms": 3, "lw": 1.2, "capsize": 2, "ecolor": VERMILLION}
