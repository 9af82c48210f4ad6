"""The figure of benchmarks/text_live.py, from its record: throughput by bins, response time by arrival rate."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support.harness import FIGURES, finish_axes, new_figure, save_figure
from policies.charts.averages import BLUE, GREY, ORANGE, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND = {"fontsize": 8, "loc": "upper left", "ncols": 2}


def draw(record: Mapping[str, Any], name: Callable[[str], str], path: Path = FIGURES / "text-live.png") -> None:
    """Draw both models' throughput and the generator's response time; nothing if one of them is not recorded.

    Args:
        record: the benchmark's record.
        name: returns the name of a policy from its spec.
        path: the figure's file.
    """
    if {"generator", "classifier"} - record.keys():
        return
    figure = new_figure(16, 4.8)
    decoder, response, encoder = figure.subplots(1, 3)
    _throughputs(decoder, record["generator"], name)
    _throughputs(encoder, record["classifier"], name)
    _responses(response, record["generator"], name)
    decoder.set_title("(a) decoder: throughput")
    response.set_title("(b) decoder: mean response time")
    encoder.set_title("(c) encoder: throughput, and padding")
    for place, cell in enumerate(record["classifier"]["cells"].values()):
        padding = f"+{fmean(cell['live_padding']):.0%}"
        encoder.text(place - 0.2, 0.5, padding, ha="center", va="bottom", color="white", fontsize=8)
    save_figure(figure, path)


def _throughputs(axes: "Axes", part: Mapping[str, Any], name: Callable[[str], str]) -> None:
    cells = part["cells"]
    places = np.arange(len(cells))
    live = [cell["live_hz"] for cell in cells.values()]
    means = [fmean(runs) for runs in live]
    spread = [[m - min(runs) for m, runs in zip(means, live, strict=True)]]
    spread += [[max(runs) - m for m, runs in zip(means, live, strict=True)]]
    simulated = [cell["simulated_hz"] for cell in cells.values()]
    axes.bar(places - 0.2, means, 0.4, yerr=spread, color=BLUE, label="live")
    axes.bar(places + 0.2, simulated, 0.4, color=ORANGE, label="simulated")
    axes.axhline(part["limit_hz"], color="black", ls="--", lw=1, label="limit of many bins")
    axes.set_xticks(places, [name(spec) for spec in cells])
    axes.set(ylabel="requests/s", ylim=(0, 1.25 * max(*means, *simulated, part["limit_hz"])))
    finish_axes(axes, _LEGEND)


def _responses(axes: "Axes", part: Mapping[str, Any], name: Callable[[str], str]) -> None:
    rates, responses = part["rates_hz"], part["responses"]
    for colour, spec in zip(PALETTE, responses[0], strict=False):
        axes.plot(rates, [found[spec]["live_ms"] for found in responses], "-o", color=colour, ms=4, label=name(spec))
        axes.plot(rates, [found[spec]["simulated_ms"] for found in responses], ":", color=colour)
    axes.plot([], [], ":", color=GREY, label="simulated")
    most = part["cells"]["static:8,max_wait_ms=inf"]["simulated_hz"]
    axes.axvline(most, color="black", ls="--", lw=1, label="maximum throughput of one bin")
    axes.set(xlabel="arrival rate, 1/s", ylabel="ms", yscale="log")
    axes.set_ylim(top=5 * axes.get_ylim()[1])  # room for the legend
    finish_axes(axes, _LEGEND)
