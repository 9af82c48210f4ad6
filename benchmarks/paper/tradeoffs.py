"""Power against response time, all exact: figures 4 and 5."""

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.paper.setting import ALL_LOADS, Section, at, googlenet, save_numbered
from benchmarks.support.harness import finish_axes, new_figure
from policies.charts.averages import GREEN, MARKERS, PALETTE, benchmarks, frontier_chart, tradeoff
from policies.profile import Profile
from policies.smdp.choice import MeanBound, choose_weight
from policies.smdp.solver import Solution, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WEIGHTS = np.linspace(0.0, 15.0, 61)
_BOUND = 5e-3  # s, of the mean response time at load 0.3


def figure_4() -> Section:
    """Average cost against w2, and by how much the benchmarks exceed the solved one."""
    sheet = new_figure(13, 7)
    panels = sheet.subplots(2, 3, sharex=True)
    least = min(_costs(panels[:, column], load) for column, load in enumerate((0.1, 0.3, 0.7)))
    panels[0, 0].set_ylabel("average cost g")
    panels[1, 0].set_ylabel("above the solved cost, per cent")
    panels[0, 0].legend(frameon=False)
    text = f"""\
{save_numbered(sheet, 4)}

Below: how much more each benchmark costs than the solved policy. Agrees with the paper: the solved cost is the lowest
everywhere (the least ratio of a benchmark's cost to it is {least:.6f}: where a static policy is optimal they meet);
near w2 = 0 greedy is close to it and the
static policies cost the more, the larger their batch; with a large w2 greedy costs much more and static 32 is close
to the
solved policy, but not yet at ρ = 0.1 and w2 = 15."""
    return Section("Figure 4: average cost", text)


def _costs(panels: "np.ndarray[Any, Any]", load: float) -> float:
    """Draw one load; return the least ratio of a benchmark's cost to the solved one."""
    cost, above = panels
    ours = np.array([solve(at(googlenet(), load, float(w2))).gain for w2 in _WEIGHTS])
    cost.plot(_WEIGHTS, ours, color="black", lw=2.2, label="solved")
    ratios = []
    for color, (name, other) in zip(PALETTE, benchmarks(at(googlenet(), load)).items(), strict=False):
        theirs = 1e3 * other.mean_response_time + _WEIGHTS * (other.mean_power or 0.0)
        style: dict[str, Any] = {"color": color, "lw": 1.1, "marker": MARKERS[name], "markevery": 10, "ms": 5}
        cost.plot(_WEIGHTS, theirs, label=name, **style)
        above.plot(_WEIGHTS, 100.0 * (theirs / ours - 1.0), **style)
        ratios.append(float((theirs / ours).min()))
    cost.set(title=f"ρ = {load}", xlim=(0, 15), ylim=(0, None))
    above.set(xlabel="w2, per W", ylim=(-2, 80))
    for axes in panels:
        finish_axes(axes)
    return min(ratios)


def figure_5() -> Section:
    """Power and efficiency against response time."""
    sheet = new_figure(15, 8)
    panels = sheet.subplot_mosaic([["a", "b"], ["a", "c"]], width_ratios=(1.35, 1))
    pair = panels["a"]
    for color, load in zip(PALETTE, (0.3, 0.7), strict=False):
        frontier_chart(pair, tradeoff(at(googlenet(), load)), color=color)
    problem = at(googlenet(), 0.3)
    vertex, mixed = (choose_weight(problem, MeanBound(_BOUND), mixed=mix) for mix in (False, True))
    _inset(pair, (0.22, 0.42), (0.7, (4.935, 4.975), (47.8, 48.1), "ρ = 0.7, left end"))
    nearby = _inset(pair, (0.65, 0.42), (0.3, (4.6, 6.0), (20.4, 21.5), "ρ = 0.3, around 5 ms"))
    nearby.axvline(1e3 * _BOUND, color="grey", lw=1, linestyle=":")
    for solution, marker, size, label in ((vertex, "X", 9, "vertex within 5 ms"), (mixed, "*", 13, "mixed optimum")):
        point = 1e3 * solution.mean_response_time, solution.mean_power or 0.0
        nearby.plot(*point, marker, ms=size, mfc=GREEN, mec="black", zorder=5, label=label)
    nearby.legend(frameon=False, fontsize=8)
    pair.set_title("(a) two loads")
    legend(pair, fontsize="small", loc="upper right", ncols=2)
    by_load(panels["b"], panels["c"], googlenet())
    return Section("Figure 5: power against response time", f"{save_numbered(sheet, 5)}\n\n{_caption_5(vertex, mixed)}")


def _caption_5(vertex: Solution, mixed: Solution) -> str:
    assert mixed.mix is not None
    saved = 1e3 * ((vertex.mean_power or 0.0) - (mixed.mean_power or 0.0))
    return f"""\
Lower and further left is better in (a) and (b), higher and further left in (c); response times logarithmic in (b)
and (c).
Agrees with the paper: no benchmark lies below a frontier; static 32 is its right end; greedy is near the left end,
but a
little slower and dearer than the fastest solved policy (left inset, ρ = 0.7); static 8 lies well above the frontier at
ρ = 0.7 and is unstable from 0.8 on; static 16 at ρ = 0.9 takes far longer than the solved policies.

A bound of 5 ms on the mean at ρ = 0.3 (right inset): the paper stops at the vertex of w2 = 1.3
({1e3 * vertex.mean_response_time:.3f} ms, {vertex.mean_power:.3f} W). Acting by its right neighbour with probability
{mixed.mix.probability:.3f} meets the bound exactly ({1e3 * mixed.mean_response_time:.3f} ms) with
{mixed.mean_power:.3f} W, {saved:.0f} mW less, which no deterministic policy does."""


def _inset(
    axes: "Axes", corner: tuple[float, float], view: tuple[float, tuple[float, float], tuple[float, float], str]
) -> "Axes":
    """Draw a magnified part of the frontier of one load."""
    load, across, upwards, title = view
    inset: Axes = axes.inset_axes((*corner, 0.34, 0.3))
    frontier_chart(inset, tradeoff(at(googlenet(), load)), color=PALETTE[0 if load < 0.5 else 1])
    for line in inset.lines:
        line.set_label("_")
    inset.set(xlim=across, ylim=upwards, xlabel="", ylabel="")
    inset.set_title(title, fontsize=9)
    inset.tick_params(labelsize=8)
    inset.locator_params(nbins=5)
    return inset


def by_load(power: "Axes", efficiency: "Axes", profile: Profile) -> None:
    """Draw panels (b) and (c) of figures 5, 7 and 8: all loads."""
    from matplotlib import colormaps

    colors = [colormaps["viridis"](0.92 * i / 8) for i in range(9)]
    for color, load in zip(colors, ALL_LOADS, strict=True):
        shown = tradeoff(at(profile, load), f"ρ = {load}")
        frontier_chart(power, shown, color=color)
        frontier_chart(efficiency, shown, color=color, efficiency=True)
    for axes, title in ((power, "(b) power, all loads"), (efficiency, "(c) energy efficiency, all loads")):
        axes.set_title(title)
        _logarithmic(axes)
    legend(efficiency, fontsize="x-small", ncols=2, loc="lower right")


def legend(axes: "Axes", **style: Any) -> None:
    """Draw a legend with the curves first, then the benchmarks."""
    entries = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: entry[1] in MARKERS)
    handles, labels = zip(*entries, strict=True)
    axes.legend(handles, labels, frameon=False, **style)


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
