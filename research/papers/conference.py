"""The conference paper's figures 4 and 5 (ICC 2023): what the journal paper does not repeat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support.harness import finish_axes, new_figure
from policies.charts.action_chart import chart_rows, control_limit_of, legend_handles, policy_chart
from policies.charts.averages import MARKERS, PALETTE, benchmarks
from policies.solver.distributions import Floats
from policies.solver.solver import Solution, solve
from research.papers.setting import ALL_LOADS, Claim, Section, agreement, at, googlenet, save_named, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 32  # B_max
WEIGHTS_4 = (0.0, 0.1, 1.0, 500.0)
WEIGHTS_5 = np.linspace(0.0, 20.0, 81)
LOADS_5 = (0.1, 0.3, 0.7)  # the text names 0.1; the others are the journal's


@cache
def policies() -> Mapping[float, Sequence[Solution]]:
    """The solved policies of figure 4: for each w2, one a load of ALL_LOADS."""
    return {w2: [solve(at(googlenet(), load, w2)) for load in ALL_LOADS] for w2 in WEIGHTS_4}


def limit_of(solution: Solution) -> int | None:
    """The control limit; None: the policy is no control limit policy (journal, equation 31)."""
    return control_limit_of(solution.batch_size, LARGEST)


def threshold_of(solution: Solution) -> int:
    """The shortest queue at which a policy launches."""
    return next(n for n, action in enumerate(solution.batch_size) if action)


def claims_4(solutions: Mapping[float, Sequence[Solution]]) -> list[Claim]:
    """What section V-A says of figure 4."""
    every = [solution for row in solutions.values() for solution in row]
    one = sum(all(solution.batch_size[threshold_of(solution) :]) for solution in every)
    limits = sum(limit_of(solution) is not None for solution in every)
    least, most = (solutions[pick(solutions)] for pick in (min, max))
    by_load = zip(*([threshold_of(solution) for solution in solutions[w2]] for w2 in sorted(solutions)), strict=True)
    low = max(threshold_of(solution) for solution in least)
    return [
        Claim(
            f"no policy waits above the shortest queue at which it launches ({one} of {len(every)})", one == len(every)
        ),
        Claim("this threshold rises with w2 or stays", all(a <= b for row in by_load for a, b in pairwise(row))),
        Claim(
            f"with w2 = {max(solutions):g} every control limit is {LARGEST}",
            all(limit_of(solution) == LARGEST for solution in most),
        ),
        Claim(f"with w2 = 0 the thresholds are close to 1 (at most {low})", low <= 2),
        Claim(
            "the control limit structure, to launch all that wait, at most 32, from a threshold on, generally exists",
            2 * limits > len(every),
            f"it does in {limits} of {len(every)} solutions",
        ),
    ]


def figure_4() -> Section:
    """Actions by queue length and load, B_max = 32."""
    solutions = policies()
    figure = new_figure(14.5, 7.5)
    panels = zip(figure.subplots(2, 2).flat, "abcd", solutions.items(), strict=True)
    for axes, letter, (w2, row) in panels:
        policy_chart(axes, chart_rows(row), LARGEST)
        axes.set_title(f"({letter}) w2 = {w2:g}", fontsize=10)
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=4, frameon=False)
    rows = [[f"{w2:g}", *(str(limit_of(s) or f"({threshold_of(s)})") for s in row)] for w2, row in solutions.items()]
    text = f"""\
{save_named(figure, "icc-figure-4", "Figure 4 of the conference paper")}

Control limits by load; in brackets the threshold of a policy that launches less than all that wait at some longer
queue:

{table(["w2", *(f"ρ = {load}" for load in ALL_LOADS)], rows)}

{agreement(claims_4(solutions))}"""
    return Section("Conference paper, figure 4: policies for batches of up to 32", text)


@dataclass(frozen=True, eq=False)
class Costs:
    """Average costs at one load, by w2.

    Attributes:
        load: rho.
        weights: w2.
        solved: the solved policy's cost at each.
        others: the other policies' by name.
    """

    load: float
    weights: Floats
    solved: Floats
    others: Mapping[str, Floats]

    def above(self, name: str) -> Floats:
        """By how much a policy costs more than the solved one, per cent."""
        return np.round(100.0 * (self.others[name] / self.solved - 1.0), 9) + 0.0  # no -0 by rounding


@cache
def costs() -> tuple[Costs, ...]:
    """Evaluate figure 5 at its loads."""
    return tuple(costs_at(load, WEIGHTS_5) for load in LOADS_5)


def costs_at(load: float, weights: Floats) -> Costs:
    """The cost of the solved policy and of the benchmarks at a load, w1 = 1."""
    solved = np.array([solve(at(googlenet(), load, float(w2))).gain for w2 in weights])
    others = {
        name: 1e3 * other.mean_response_time + weights * (other.mean_power or 0.0)
        for name, other in benchmarks(at(googlenet(), load)).items()
    }
    return Costs(load, weights, solved, others)


def claims_5(found: Sequence[Costs]) -> list[Claim]:
    """What section V-B says of figure 5; the numbers are where a statement is closest to failing."""
    least = min(float(each.above(name).min()) for each in found for name in each.others)
    greedy = min(float(each.above("greedy")[each.weights > 5.0].min()) for each in found)
    static = {each.load: float(each.above("static 32").min()) for each in found}
    low, rest = static[min(static)], max(static[load] for load in sorted(static)[1:])
    near = max(min(float(each.above(n).min()) for each in found) for n in ("static 8", "static 16"))
    return [
        Claim("the solved policy costs least everywhere", least >= 0.0),
        Claim(f"greedy is far from the optimum for w2 above 5 (at least {greedy:.1f}% above)", greedy > 5.0),
        Claim(f"static 32 does badly at ρ = {min(static)} (at least {low:.1f}% above)", low > max(5.0, 2.0 * rest)),
        Claim("static 8 and 16 come near the optimum for some weights", near < 2.0),
    ]


def figure_5() -> Section:
    """Average cost against w2 up to 20."""
    sheet = new_figure(13, 7)
    panels = sheet.subplots(2, len(LOADS_5), sharex=True)
    for column, found in enumerate(costs()):
        _draw(panels[0, column], panels[1, column], found)
    panels[0, 0].set_ylabel("average cost g")
    panels[1, 0].set_ylabel("above the solved cost, per cent")
    panels[0, 0].legend(frameon=False)
    text = f"""\
{save_named(sheet, "icc-figure-5", "Figure 5 of the conference paper")}

As the journal's figure 4, up to w2 = 20. {agreement(claims_5(costs()))}"""
    return Section("Conference paper, figure 5: average cost up to w2 = 20", text)


def _draw(cost: "Axes", above: "Axes", found: Costs) -> None:
    cost.plot(found.weights, found.solved, color="black", lw=2.2, label="solved")
    for color, (name, theirs) in zip(PALETTE, found.others.items(), strict=False):
        style: dict[str, Any] = {"color": color, "lw": 1.1, "marker": MARKERS[name], "markevery": 10, "ms": 5}
        cost.plot(found.weights, theirs, label=name, **style)
        above.plot(found.weights, found.above(name), **style)
    cost.set(title=f"ρ = {found.load}", xlim=(0, float(found.weights[-1])), ylim=(0, None))
    above.set(xlabel="w2, per W", ylim=(-2, 80))
    for axes in (cost, above):
        finish_axes(axes)
