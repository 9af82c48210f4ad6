"""Charts of mean power against mean response time and of response time distributions, drawn on given Axes.

They correspond to the journal's (arXiv 2501.02181) figures 5 and 6a. The colours are the colour-blind safe palette of
Okabe and Ito.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.objectives.frontier import frontier
from policies.solver.distributions import DETERMINISTIC
from policies.solver.model import Problem, build_model
from policies.solver.solver import Solution, evaluate
from policies.traits import control_limit_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa3388"
ORANGE, SKY, GREY = "#e69f00", "#56b4e9", "#555555"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = {"greedy": "^", "static 8": "s", "static 16": "D", "static 32": "p"}
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_IN_VIEW = 4.0  # times the response time of the slowest vertex; slower benchmarks would compress the rest
_NEAR = 0.1  # of the frontier's width and height: nearer vertices are omitted for random service times
_MAX_POINTS = 1000  # of a distribution function
_SHARES = (0.5, 0.9, 0.95)
_Pair = tuple[Solution, Solution]


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """The data of a frontier chart for one problem.

    Attributes:
        name: name of the curve in the legend.
        vertices: solved policies, the fastest first.
        benchmarks: other policies by name, those of MARKERS.
    """

    name: str
    vertices: Sequence[Solution]
    benchmarks: Mapping[str, Solution]


def tradeoff(problem: Problem, name: str = "") -> Tradeoff:
    """Solve the frontier of a problem, and evaluate the benchmark policies that are stable and allowed in it.

    Args:
        problem: a problem; its w2 is ignored.
        name: name of the curve; if empty, it is the load.

    Raises:
        SpecError: the problem cannot be solved.
    """
    resolution = 0.0 if problem.service == DETERMINISTIC else _NEAR
    vertices = frontier(replace(problem, w1=problem.w1 or 1.0), resolution)  # the vertices are the same for any w1
    return Tradeoff(name or f"solved, ρ = {vertices[0].load:.2g}", vertices, benchmarks(problem))


def benchmarks(problem: Problem) -> dict[str, Solution]:
    """Evaluate the journal's benchmark policies (section VII-B): greedy, static 8, 16 and 32.

    Policies that the problem's batch sizes do not allow, or that are unstable, are omitted.
    """
    model = build_model(problem)
    tables = {"greedy": control_limit_table(model.min_batch_size, model.max_batch_size).batch_size}
    tables |= {f"static {size}": control_limit_table(size, size).batch_size for size in (8, 16, 32)}
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
    """Draw mean response time (ms) against mean power (W): the frontier, the benchmarks, and one marked policy.

    Args:
        axes: where to draw; with several frontiers each benchmark is in the legend once.
        shown: the data to draw.
        chosen: the policy to mark with a star.
        color: color of the curve.
        efficiency: requests per joule instead of power, the inverse of the energy of a request.
    """

    def at(solution: Solution) -> tuple[float, float]:
        other = 1.0 / solution.energy_per_request if efficiency else solution.mean_power
        return 1e3 * solution.mean_response_time, other

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
    """Draw empirical distribution functions of response times, with the 50th, 90th and 95th percentile of each.

    Args:
        axes: where to draw.
        runs: response times, s, by the run's name; at least one each.
        limit: a response time to mark, s, with the share of each run within it.
        colors: colors of the runs, used cyclically.
    """
    for i, (name, responses) in enumerate(runs.items()):
        milliseconds = 1e3 * np.sort(responses)
        marks = np.quantile(milliseconds, _SHARES)
        percentiles = ", ".join(f"p{100 * share:g} {mark:.3g}" for share, mark in zip(_SHARES, marks, strict=True))
        within = "" if limit is None else f"; {np.mean(milliseconds <= 1e3 * limit):.1%} in time"
        color, line = colors[i % len(colors)], LINE_STYLES[i % len(LINE_STYLES)]
        label = f"{name}: {percentiles} ms{within}".lstrip(": ")
        axes.plot(*_steps(milliseconds), color=color, linestyle=line, lw=1.5, label=label)
        axes.plot(marks, _SHARES, "o", color=color, ms=4)
    transform = axes.get_yaxis_transform()
    axes.hlines(_SHARES, 0, 1, transform=transform, color=GREY, lw=0.5, alpha=0.6)
    for share in _SHARES:
        axes.text(1.0, share, f"p{100 * share:g}", transform=transform, ha="right", va="bottom", fontsize=7, color=GREY)
    if limit is not None:
        axes.axvline(1e3 * limit, color="black", linestyle=":", lw=1.2, label=f"limit, {1e3 * limit:g} ms")
    axes.set_xlabel("response time, ms")
    axes.set_ylabel("share of requests answered within it")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    _plain(axes)


def _steps(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of the distribution function of sorted values, from 0; thinned if there are very many."""
    shares = np.linspace(0.0, 1.0, min(len(values), _MAX_POINTS) + 1)
    places = np.maximum(np.ceil(shares * len(values)).astype(int) - 1, 0)
    return np.append(0.0, values[places]), np.append(0.0, shares)


def _plain(axes: "Axes") -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
