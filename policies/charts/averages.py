"""Charts of what policies give, drawn on Axes that the caller gives, so that they can stand side by side.

Mean power against mean response time, and distributions of response times: the journal's (arXiv 2501.02181) figures
5 and 6a. The colours are told apart by the colour-blind (those of Okabe and Ito).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.smdp.choice import frontier
from policies.smdp.distributions import DETERMINISTIC
from policies.smdp.model import Problem, build_model
from policies.smdp.solver import Solution, evaluate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    *("#0072b2", "#d55e00", "#009e73", "#aa3388", "#e69f00", "#56b4e9", "#555555"),
)
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = {"greedy": "^", "static 8": "s", "static 16": "D", "static 32": "p"}
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_IN_VIEW = 4.0  # benchmarks slower than this many times the slowest vertex would leave nothing of the rest to see
_NEAR = 0.1  # of the frontier's width and height: nearer vertices are left out where service times vary
_DRAWN = 1000  # points of a distribution function: more cannot be told apart
_SHARES = (0.5, 0.9, 0.95)
_Pair = tuple[Solution, Solution]


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """What a frontier chart shows of one problem.

    Attributes:
        name: the curve's, for the legend.
        vertices: solved policies, the fastest first.
        benchmarks: other policies by name, those of MARKERS.
    """

    name: str
    vertices: Sequence[Solution]
    benchmarks: Mapping[str, Solution]


def tradeoff(problem: Problem, name: str = "") -> Tradeoff:
    """The solved frontier of a problem, and the benchmark policies that are stable there and within its batch sizes.

    Args:
        problem: its profile has energies; its w2 is not looked at.
        name: of the curve; empty for one that names the load.

    Raises:
        SpecError: the problem cannot be solved, or has no energies.
    """
    resolution = 0.0 if problem.service == DETERMINISTIC else _NEAR
    vertices = frontier(replace(problem, w1=problem.w1 or 1.0), resolution)  # the vertices are the same for any w1
    return Tradeoff(name or f"solved, ρ = {vertices[0].load:.2g}", vertices, benchmarks(problem))


def benchmarks(problem: Problem) -> dict[str, Solution]:
    """The journal's benchmark policies (section VII-B) with their exact averages: greedy, static 8, 16 and 32.

    Left out is what the problem's batch sizes do not allow, and what cannot keep up with the arrival rate.
    """
    model = build_model(problem)
    tables = {"greedy": _launching_from(model.min_batch_size, model.max_batch_size)}
    tables |= {f"static {size}": _launching_from(size, size) for size in (8, 16, 32)}
    possible = {
        name: table
        for name, table in tables.items()
        if model.min_batch_size <= table[-1] <= model.max_batch_size
        and model.throughput[table[-1]] > model.arrival_rate
    }
    return {name: evaluate(problem, table) for name, table in possible.items()}


def frontier_chart(
    axes: "Axes",
    shown: Tradeoff,
    chosen: Solution | None = None,
    color: Any = BLUE,
    efficiency: bool = False,
) -> None:
    """Mean response time (ms) against mean power (W): the solved frontier, the benchmarks, and one policy marked.

    Args:
        axes: may hold other frontiers already; each benchmark stands in the legend once.
        shown: what to draw.
        chosen: the policy to mark with a star.
        color: of the curve.
        efficiency: requests per joule instead of power, the inverse of the energy of a request.
    """

    def at(solution: Solution) -> tuple[float, float]:
        energy, power = solution.energy_per_request, solution.mean_power
        assert energy is not None
        assert power is not None
        return 1e3 * solution.mean_response_time, (1.0 / energy if efficiency else power)

    style = {"color": color, "lw": 1.4, "marker": "o", "ms": 2.6, "zorder": 2}
    axes.plot(*zip(*map(at, shown.vertices), strict=True), label=shown.name, **style)
    limit = _IN_VIEW * max(solution.mean_response_time for solution in shown.vertices)
    known = axes.get_legend_handles_labels()[1]
    style = {"linestyle": "none", "mfc": "white", "mec": "black", "ms": 6, "zorder": 3}
    for name, solution in shown.benchmarks.items():
        if solution.mean_response_time <= limit:
            axes.plot(*at(solution), marker=MARKERS[name], label="_" if name in known else name, **style)
    if chosen is not None:
        style = {"linestyle": "none", "mfc": VERMILLION, "mec": "black", "ms": 13, "zorder": 4}
        axes.plot(*at(chosen), marker="*", label="this policy", **style)
    axes.set_xlabel("mean response time, ms")
    axes.set_ylabel("energy efficiency, requests per joule" if efficiency else "mean power, W")
    _plain(axes)


def distribution_chart(
    axes: "Axes", runs: Mapping[str, NDArray[np.float64]], limit: float | None = None, colors: Sequence[str] = PALETTE
) -> None:
    """Empirical distribution functions of response times, with the 50th, 90th and 95th percentile of each.

    Args:
        axes: where to draw.
        runs: response times, s, by the run's name; at least one each.
        limit: a response time to mark, s, with the share of each run within it.
        colors: one a run, taken in turn.
    """
    for i, (name, responses) in enumerate(runs.items()):
        milliseconds = 1e3 * np.sort(responses)
        marks = np.quantile(milliseconds, _SHARES)
        said = ", ".join(f"p{100 * share:g} {mark:.3g}" for share, mark in zip(_SHARES, marks, strict=True))
        within = "" if limit is None else f"; {np.mean(milliseconds <= 1e3 * limit):.1%} in time"
        color, line = colors[i % len(colors)], LINE_STYLES[i % len(LINE_STYLES)]
        label = f"{name}: {said} ms{within}".lstrip(": ")
        axes.plot(*_steps(milliseconds), color=color, linestyle=line, lw=1.5, label=label)
        axes.plot(marks, _SHARES, "o", color=color, ms=4)
    across = axes.get_yaxis_transform()
    axes.hlines(_SHARES, 0, 1, transform=across, color=GREY, lw=0.5, alpha=0.6)
    for share in _SHARES:
        axes.text(1.0, share, f"p{100 * share:g}", transform=across, ha="right", va="bottom", fontsize=7, color=GREY)
    if limit is not None:
        axes.axvline(1e3 * limit, color="black", linestyle=":", lw=1.2, label=f"limit, {1e3 * limit:g} ms")
    axes.set_xlabel("response time, ms")
    axes.set_ylabel("share of requests answered within it")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    _plain(axes)


def _launching_from(limit: int, most: int) -> tuple[int, ...]:
    return tuple(0 if n < limit else min(n, most) for n in range(most + 1))


def _steps(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of the distribution function of sorted values, from 0; thinned out where there are very many."""
    shares = np.linspace(0.0, 1.0, min(len(values), _DRAWN) + 1)
    places = np.maximum(np.ceil(shares * len(values)).astype(int) - 1, 0)
    return np.append(0.0, values[places]), np.append(0.0, shares)


def _plain(axes: "Axes") -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
