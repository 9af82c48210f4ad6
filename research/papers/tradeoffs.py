"""Power against response time, all exact: figures 4 and 5."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support.harness import finish_axes, new_figure
from policies.charts.averages import GREEN, MARKERS, PALETTE, Tradeoff, benchmarks, frontier_chart, tradeoff
from policies.objectives.frontier import MeanBound, choose_weight
from policies.profile import Profile
from policies.solver.distributions import Floats
from policies.solver.solver import Solution, solve
from research.papers.setting import ALL_LOADS, Claim, Section, agreement, at, googlenet, save_numbered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WEIGHTS = np.linspace(0.0, 15.0, 61)
_BOUND = 5e-3  # s, of the mean response time at load 0.3
_COST_LOADS = (0.1, 0.3, 0.7)
_ROUNDING = 1e-6  # of exact averages; a policy by less than 1e-7 below a line through two others is no vertex


@dataclass(frozen=True, eq=False)
class Costs:
    """Average costs at one load, by w2.

    Attributes:
        solved: of the solved policies, shape (weights,).
        benchmarks: of the benchmark policies, by name, each of the same shape.
    """

    solved: Floats
    benchmarks: Mapping[str, Floats]

    def ratios(self, weight: int) -> dict[str, float]:
        """The costs of the benchmarks over the solved cost, at the index of a weight."""
        return {name: float(costs[weight] / self.solved[weight]) for name, costs in self.benchmarks.items()}


def costs(load: float) -> Costs:
    """The costs at a load, for w2 from 0 to 15."""
    ours = np.array([solve(at(googlenet(), load, float(w2))).gain for w2 in _WEIGHTS])
    others = benchmarks(at(googlenet(), load))
    return Costs(ours, {n: 1e3 * s.mean_response_time + _WEIGHTS * (s.mean_power or 0.0) for n, s in others.items()})


def claims_4(found: Mapping[float, Costs] | None = None) -> list[Claim]:
    """Section VII-B 1, on figure 4."""
    found = found or {load: costs(load) for load in _COST_LOADS}
    first, last = ({load: one.ratios(weight) for load, one in found.items()} for weight in (0, -1))
    least = min(float((cost / one.solved).min()) for one in found.values() for cost in one.benchmarks.values())
    near = max(ratios["greedy"] for ratios in first.values()) - 1.0
    dear = [ratios["greedy"] - 1.0 for ratios in last.values()]
    low, *high = (ratios["static 32"] - 1.0 for ratios in last.values())
    ascending = all(r["greedy"] < r["static 8"] < r["static 16"] < r["static 32"] for r in first.values())
    return [
        Claim(
            f"the solved cost is the lowest everywhere (the least ratio of a benchmark's cost to it is {least:.6f}: "
            "where a static policy is optimal they meet)",
            least >= 1.0 - _ROUNDING,
        ),
        Claim(
            f"at w2 = 0 greedy costs at most {near:.2%} more, and the static policies cost the more, the larger their "
            "batch",
            near < 0.01 and ascending,
        ),
        Claim(
            f"at w2 = 15 greedy costs {min(dear):.0%} to {max(dear):.0%} more than the solved policy, the most of all",
            all(ratios["greedy"] == max(ratios.values()) for ratios in last.values()) and min(dear) > 0.05,
        ),
        Claim(
            f"static 32 then costs at most {max(high):.1%} more at ρ = 0.3 and 0.7, but {low:.0%} more at ρ = 0.1, "
            "where w2 = 15 is not large enough",
            max(high) < 0.05 < low,
        ),
    ]


def figure_4() -> Section:
    """Average cost against w2, and by how much the benchmarks exceed the solved one."""
    sheet = new_figure(13, 7)
    panels = sheet.subplots(2, 3, sharex=True)
    found = {load: costs(load) for load in _COST_LOADS}
    for column, (load, one) in enumerate(found.items()):
        _draw_costs(panels[:, column], load, one)
    panels[0, 0].set_ylabel("average cost g")
    panels[1, 0].set_ylabel("above the solved cost, per cent")
    panels[0, 0].legend(frameon=False)
    text = f"""\
{save_numbered(sheet, 4)}

Below: how much more each benchmark costs than the solved policy. {agreement(claims_4(found))}"""
    return Section("Figure 4: average cost", text)


def _draw_costs(panels: "np.ndarray[Any, Any]", load: float, found: Costs) -> None:
    cost, above = panels
    cost.plot(_WEIGHTS, found.solved, color="black", lw=2.2, label="solved")
    for color, (name, theirs) in zip(PALETTE, found.benchmarks.items(), strict=False):
        style: dict[str, Any] = {"color": color, "lw": 1.1, "marker": MARKERS[name], "markevery": 10, "ms": 5}
        cost.plot(_WEIGHTS, theirs, label=name, **style)
        above.plot(_WEIGHTS, 100.0 * (theirs / found.solved - 1.0), **style)
    cost.set(title=f"ρ = {load}", xlim=(0, 15), ylim=(0, None))
    above.set(xlabel="w2, per W", ylim=(-2, 80))
    for axes in panels:
        finish_axes(axes)


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
and (c). {agreement(claims_5())}

A bound of 5 ms on the mean at ρ = 0.3 (right inset): the paper stops at the vertex of w2 = 1.3
({1e3 * vertex.mean_response_time:.3f} ms, {vertex.mean_power:.3f} W). Acting by its right neighbour with probability
{mixed.mix.probability:.3f} meets the bound exactly ({1e3 * mixed.mean_response_time:.3f} ms) with
{mixed.mean_power:.3f} W, {saved:.0f} mW less."""


def claims_5() -> list[Claim]:
    """Section VII-B 2, on figure 5."""
    shown = tradeoffs(googlenet())
    greedy, fastest = shown[0.7].benchmarks["greedy"], shown[0.7].vertices[0]
    slower = greedy.mean_response_time / fastest.mean_response_time - 1.0
    dearer = (greedy.mean_power or 0.0) / (fastest.mean_power or 1.0) - 1.0
    ends = [
        one.benchmarks["static 32"].mean_response_time / one.vertices[-1].mean_response_time for one in shown.values()
    ]
    stable = [load for load, one in shown.items() if "static 8" in one.benchmarks]
    high = above_frontier(shown[0.7])["static 8"]
    long = 1e3 * shown[0.9].benchmarks["static 16"].mean_response_time
    longest = 1e3 * shown[0.9].vertices[-1].mean_response_time
    bounded = choose_weight(at(googlenet(), 0.3), MeanBound(_BOUND), mixed=False)
    return [
        Claim("no benchmark lies below a frontier", not_beaten(shown)),
        Claim("static 32 is the right end of each", all(abs(end - 1.0) < _ROUNDING for end in ends)),
        Claim(
            f"greedy is near the left end, but at ρ = 0.7 (left inset) {slower:.2%} slower and {dearer:.2%} dearer "
            "than the fastest solved policy",
            0.0 < slower < 0.01 and 0.0 < dearer < 0.01,
        ),
        Claim(
            f"static 8 takes {high:.1%} more power than the frontier at ρ = 0.7 and is unstable from 0.8 on",
            high > 0.01 and max(stable) == 0.7,
        ),
        Claim(
            f"static 16 takes {long:.1f} ms at ρ = 0.9, the slowest solved policy {longest:.1f} ms",
            long > 1.2 * longest,
        ),
        Claim(
            "w2 = 1.3 gives the solved policy of least power within 5 ms at ρ = 0.3",
            abs(solve(at(googlenet(), 0.3, 1.3)).mean_response_time / bounded.mean_response_time - 1.0) < _ROUNDING,
        ),
    ]


@cache
def tradeoffs(profile: Profile) -> dict[float, Tradeoff]:
    """The frontier and the benchmarks at each load; those of the default device are used by several figures."""
    return {load: tradeoff(at(profile, load)) for load in ALL_LOADS}


def above_frontier(shown: Tradeoff) -> dict[str, float]:
    """Relative power of each benchmark above the frontier at the same response time."""
    times = [vertex.mean_response_time for vertex in shown.vertices]
    powers = [vertex.mean_power or 0.0 for vertex in shown.vertices]
    return {
        name: (other.mean_power or 0.0) / float(np.interp(other.mean_response_time, times, powers)) - 1.0
        for name, other in shown.benchmarks.items()
    }


def not_beaten(shown: Mapping[float, Tradeoff]) -> bool:
    """Whether no benchmark is below a frontier, or faster than its fastest policy."""
    return all(
        above >= -_ROUNDING and one.benchmarks[name].mean_response_time >= fastest * (1.0 - _ROUNDING)
        for one in shown.values()
        for fastest in [one.vertices[0].mean_response_time]
        for name, above in above_frontier(one).items()
    )


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
    for color, (load, one) in zip(colors, tradeoffs(profile).items(), strict=True):
        shown = replace(one, name=f"ρ = {load}")
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
