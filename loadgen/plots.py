"""Plot of one run, or of several with the same arrivals. Functions import matplotlib, since that takes a second."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.history import (
    RunHistory,
    RunResult,
    Values,
    batch_shares,
    centres,
    percentiles,
    points,
    power,
    windows,
)
from loadgen.report import RunObjective
from policies.charts.figure_file import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARES = (0.5, 0.95, 0.99)


def plot_runs(results: Sequence[RunResult], objective: RunObjective, title: str, path: Path) -> None:
    """Plot response time over time and its distribution, batch sizes, and power over time.

    Args:
        results: results of at least one run, all with the same arrivals.
        objective: its SLO is marked.
        title: title of the figure.
        path: output file; its suffix is the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(12.5, 7.6), layout="constrained")
    axes = figure.subplot_mosaic([["time", "distribution"], ["batches", "power"]])
    figure.suptitle(title, fontsize="medium")
    edges = windows([result.history for result in results])
    limit = objective.slo if isfinite(objective.slo) else None
    _draw_times(axes["time"], results, edges, limit)
    _draw_distribution(axes["distribution"], results, limit)
    _draw_batches(axes["batches"], results)
    _draw_power(axes["power"], results, edges)
    if len(results) > 1:
        handles, labels = axes["time"].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    save_figure(figure, path, dpi=130)


def _draw_times(axes: "Axes", results: Sequence[RunResult], edges: Values, limit: float | None) -> None:
    """Draw single requests and percentiles of one run, or the 95th percentile of each of several."""
    if len(results) == 1:
        _draw_one(axes, results[0].history, edges)
        axes.set_ylabel("response time, ms")
    else:
        for i, result in enumerate(results):
            (tail,) = percentiles(result.history, edges, (0.95,))
            axes.plot(centres(edges), 1e3 * tail, label=result.policy, **_style(i))
        axes.set_ylabel("response time, 95th percentile, ms")
    if limit is not None:
        axes.axhline(1e3 * limit, color="black", linestyle=":", lw=1.2, label=f"SLO, {1e3 * limit:g} ms")
    _finish(axes, "instant of arrival, s", any(len(result.history.responses) for result in results))
    axes.set_xlim(0, edges[-1])
    if len(results) == 1 and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.85, edgecolor="none", loc="upper right", fontsize="small", ncols=4)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)  # space for the legend


def _draw_one(axes: "Axes", history: RunHistory, edges: Values) -> None:
    from policies.charts.averages import BLUE, ORANGE, VERMILLION

    if not len(history.responses):
        return
    arrivals, responses = points(history)
    axes.plot(arrivals, 1e3 * responses, ".", ms=2, color="#9aa5b1", alpha=0.5, zorder=1)
    for share, values, color in zip(
        _SHARES, percentiles(history, edges, _SHARES), (BLUE, ORANGE, VERMILLION), strict=True
    ):
        axes.plot(centres(edges), 1e3 * values, ".-", ms=4, lw=1.5, color=color, label=f"p{100 * share:g}")


def _draw_distribution(axes: "Axes", results: Sequence[RunResult], limit: float | None) -> None:
    from policies.charts.averages import PALETTE, distribution_chart

    shown = [i for i, result in enumerate(results) if len(result.history.responses)]
    runs = {results[i].policy: results[i].history.responses for i in shown}
    if runs:
        distribution_chart(axes, runs, limit, [PALETTE[i % len(PALETTE)] for i in shown])
    _finish(axes, "response time, ms", bool(runs))


def _draw_batches(axes: "Axes", results: Sequence[RunResult]) -> None:
    from matplotlib.ticker import MaxNLocator

    from policies.charts.averages import BLUE

    known = [(i, *batch_shares(result.history)) for i, result in enumerate(results) if result.history.batches]
    for i, sizes, shares in known:
        if len(results) == 1:
            axes.bar(sizes, shares, width=0.85, color=BLUE)
        else:
            axes.plot(sizes, shares, marker="o", ms=3, **_style(i))
    axes.set_ylabel("share of the batches")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "batch size", bool(known))
    if known:
        axes.set_xlim(0.3, max(8.0, *(float(sizes.max()) for _, sizes, _ in known)) + 0.7)


def _draw_power(axes: "Axes", results: Sequence[RunResult], edges: Values) -> None:
    known = False
    for i, result in enumerate(results):
        watts = power(result.history, edges)
        if watts is not None:
            axes.plot(centres(edges), watts, marker=".", ms=4, **_style(i))
            known = True
    axes.set_ylabel("mean power of the batches, W")
    axes.set_xlim(0, edges[-1])
    _finish(axes, "time, s", known, "energies are unknown")


def _style(i: int) -> dict[str, Any]:
    from policies.charts.averages import LINE_STYLES, PALETTE

    return {"color": PALETTE[i % len(PALETTE)], "linestyle": LINE_STYLES[i % len(LINE_STYLES)], "lw": 1.4}


def _finish(axes: "Axes", xlabel: str, known: bool, otherwise: str = "nothing was answered") -> None:
    """Set the common style of the panels; a panel without data shows the text `otherwise`."""
    axes.set_xlabel(xlabel)
    axes.set_ylim(bottom=0)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not known:
        axes.text(0.5, 0.5, otherwise, transform=axes.transAxes, ha="center", color="#555555")
        axes.set_yticks(np.array([]))
