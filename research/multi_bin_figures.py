"""The figures of research/multi_bin.py, from its record, in the style of the paper's figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import finish_axes, new_figure, save_figure
from policies.charts.averages import GREY, PALETTE
from research import FIGURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SEVEN = (*PALETTE, GREY)
_Spreads = Sequence[Sequence[float]] | NDArray[np.float64]  # mean, least, greatest


def draw(record: Mapping[str, Any]) -> None:
    """Draw every figure whose part is recorded."""
    parts = {"uniform": draw_uniform, "exponential_by_rate": draw_exponential, "lengths": draw_lengths}
    for part, draw_part in (parts | {"errors": draw_errors}).items():
        if part in record:
            draw_part(record[part])


def draw_uniform(record: Mapping[str, Any]) -> None:
    """Throughput and mean response time by arrival rate: figures 3 and 4."""
    figure = new_figure(12.5, 4.8)
    throughput, response = figure.subplots(1, 2)
    for colour, (bins, cells) in zip(PALETTE, record["by_rate"].items(), strict=False):
        rates = [cell["rate"] for cell in cells]
        _line(throughput, rates, [cell["throughput"] for cell in cells], colour, _name(bins))
        throughput.axhline(record["overloaded"][bins]["equation_4"], color=colour, ls=":", lw=1)
        if int(bins) <= 3:
            _line(response, rates, [cell["mean_s"] for cell in cells], colour, _name(bins))
            response.plot(rates, [cell["equation_7_s"] for cell in cells], ":", color=colour)
    throughput.axhline(record["limit"], color="black", ls="--", lw=1, label="limit of many bins")
    throughput.plot([], [], ":", color="grey", label="equation 4")
    response.plot([], [], ":", color="grey", label="equation 7: no batch waits for the server")
    throughput.set(title="(a) throughput", ylabel="requests/s", ylim=(0, None))
    response.set(title="(b) mean response time", ylabel="s", yscale="log", ylim=(20, 2e4))
    for axes in (throughput, response):
        _finish(axes)
    save_figure(figure, FIGURES / "multi-bin-uniform.png")


def draw_exponential(record: Mapping[str, Any]) -> None:
    """Throughput and mean response time by arrival rate, and the least mean by the number of bins: figure 9."""
    figure = new_figure(15, 4.8)
    throughput, response, least = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for colour, (bins, cells) in zip(_SEVEN, record["by_rate"].items(), strict=True):
        rates = [cell["rate"] for cell in cells]
        _line(throughput, rates, [cell["throughput"] for cell in cells], colour, _name(bins))
        _line(response, rates, [cell["mean_s"] for cell in cells], colour, _name(bins))
    throughput.set(title="(a) throughput", ylabel="requests/s", ylim=(0, None))
    response.set(title="(b) mean response time", ylabel="s", yscale="log", ylim=(40, 3e3))
    _finish(throughput)
    response.set_xlabel("arrival rate, 1/s")
    found = least_means(record)
    least.plot(list(found), list(found.values()), "o-", color=PALETTE[0])
    least.set(title="(c) least mean of all arrival rates", ylabel="s", xlabel="bins", ylim=(0, None))
    for axes in (response, least):
        finish_axes(axes)
    save_figure(figure, FIGURES / "multi-bin-exponential.png")


def least_means(record: Mapping[str, Any]) -> dict[int, float]:
    """The least mean response time over the arrival rates, s, by number of bins."""
    return {int(bins): min(cell["mean_s"][0] for cell in cells) for bins, cells in record["by_rate"].items()}


def draw_lengths(record: Mapping[str, Any]) -> None:
    """Throughput and response time of eight servers by arrival rate (figure 6), and the gain over one bin."""
    figure = new_figure(15, 4.8)
    throughput, response, gain = figure.subplots(1, 3)
    for colour, (bins, cells) in zip(PALETTE, record["by_rate"].items(), strict=False):
        rates = [cell["rate"] for cell in cells]
        _line(throughput, rates, [cell["throughput"] for cell in cells], colour, _name(bins))
        _line(response, rates, [cell["mean_s"] for cell in cells], colour, _name(bins))
    throughput.set(title=f"(a) throughput of {record['servers']} servers", ylabel="requests/s", ylim=(0, None))
    response.set(title="(b) mean response time", ylabel="s", yscale="log")
    for axes in (throughput, response):
        _finish(axes)
    _gains(gain, record)
    save_figure(figure, FIGURES / "multi-bin-lengths.png")


def _gains(axes: "Axes", record: Mapping[str, Any]) -> None:
    bins = list(record["gains"])
    keys = {"theory_equal": "equal, in theory", "theory_optimised": "optimised, in theory"}
    keys |= {"file_order": "optimised, file order", "learned": "learned online, file order"}
    for place, (key, label) in enumerate(keys.items()):
        x = np.arange(len(bins)) + 0.2 * (place - 1.5)
        axes.bar(x, [record["gains"][each][key] for each in bins], 0.2, color=PALETTE[place], label=label)
    axes.axhline(record["limit"], color="black", ls="--", lw=1, label="limit of many bins")
    axes.axhline(1.0, color="grey", lw=1)
    axes.set_xticks(range(len(bins)), bins)
    axes.set(title="(c) gain over one bin, one server", xlabel="bins", ylabel="throughput over one bin's")
    axes.set_ylim(0.9, 1.12 * record["limit"])
    finish_axes(axes, {"ncols": 2, "loc": "upper left", "fontsize": 8})
    axes.grid(visible=False)


def draw_errors(record: Mapping[str, Any]) -> None:
    """Gain over one bin by the probability of an error, a panel for each setting: figure 8."""
    figure = new_figure(12.5, 4.6)
    titles = {"uniform": "uniform sizes on [1, 20]", "lengths": "recorded lengths"}
    for axes, (letter, (key, title)) in zip(figure.subplots(1, 2), zip("ab", titles.items(), strict=True), strict=True):
        cells = dict(record[key]["cells"])
        one = cells.pop("1")[0][0]
        for colour, (bins, spreads) in zip(PALETTE, cells.items(), strict=False):
            _line(axes, record["errors"], np.array(spreads) / one, colour, _name(bins))
        axes.axhline(1.0, color="black", ls="--", lw=1, label="one bin")
        axes.set(title=f"({letter}) {title}, batches of {record[key]['batch_size']}", ylim=(0.9, 2.0))
        axes.set_ylabel("throughput over one bin's")
        _finish(axes, "probability of each neighbouring bin")
    save_figure(figure, FIGURES / "multi-bin-errors.png")


def _name(bins: str) -> str:
    return "one bin" if bins == "1" else f"{bins} bins"


def _line(axes: "Axes", x: Sequence[float], spreads: _Spreads, colour: str, label: str) -> None:
    mean, least, greatest = np.array(spreads).T
    axes.plot(x, mean, "-", color=colour, marker=".", label=label)
    axes.fill_between(x, least, greatest, color=colour, alpha=0.15, lw=0)


def _finish(axes: "Axes", xlabel: str = "arrival rate, 1/s") -> None:
    axes.set_xlabel(xlabel)
    finish_axes(axes, {})
