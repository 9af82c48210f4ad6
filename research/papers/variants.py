"""The device with another service time, energy or distribution: figures 7, 8 and 9."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from benchmarks.support.harness import finish_axes, new_figure
from policies.charts.averages import PALETTE, Tradeoff, benchmarks, frontier_chart, tradeoff
from policies.objectives.frontier import breakpoint_of
from policies.profile import Profile
from policies.solver.distributions import Floats, distribution
from policies.solver.model import Problem
from policies.solver.solver import Solution, solve
from research.papers.setting import (
    ALL_LOADS,
    Claim,
    Section,
    affine_energy,
    agreement,
    at,
    googlenet,
    log_energy,
    save_numbered,
    variant,
)
from research.papers.tradeoffs import by_load, legend, not_beaten, tradeoffs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONSTANT_MS = 6.0859
_SIZES = np.arange(1, 33)
_LOADS_9 = (0.3, 0.7)
_POWER_ONLY = 1e4  # w2, per W, at which only power matters
_NEAR = 0.1  # share of the frontier's range of power below which two vertices are interpolated linearly
_DISTRIBUTIONS = ("deterministic", "erlang2", "exponential", "hyperexponential")


def figure_7() -> Section:
    """A service time that does not depend on the batch size."""
    constant = variant(32, CONSTANT_MS)
    figure = new_figure(15, 4.8)
    rate, power, efficiency = figure.subplots(1, 3, width_ratios=(0.85, 1, 1))
    _lines(rate, {name: _SIZES / np.array(p.service_times) for name, p in _pair("constant", constant).items()})
    rate.set(xlabel="batch size b", ylabel="service rate b / l(b), requests per second", title="(a) service rate")
    by_load(power, efficiency, constant)
    text = f"""\
{save_numbered(figure, 7)}

l(b) = {CONSTANT_MS} ms for every b. {agreement(claims_7())}"""
    return Section("Figure 7: a service time independent of the batch size", text)


def claims_7() -> list[Claim]:
    """Section VII-C 1, on figure 7."""
    constant = variant(32, CONSTANT_MS)
    greedy, static = (_times(constant, name) for name in ("greedy", "static 32"))
    usual_greedy, usual_static = (_times(googlenet(), name) for name in ("greedy", "static 32"))
    faster, usual = (32 * p.service_time(1) / p.service_time(32) for p in (constant, googlenet()))
    return [
        Claim(
            f"the service rate at b = 32 is {faster:.0f} times that of b = 1 (default: {usual:.0f} times)",
            abs(faster - 32.0) < 1e-9 and round(usual) == 4,
        ),
        Claim("the solved policies are nowhere beaten", not_beaten(tradeoffs(constant))),
        Claim(
            f"greedy hardly slows down with load ({_listed(greedy)} ms at ρ = 0.1, 0.6 and 0.9; default "
            f"{_listed(usual_greedy)} ms)",
            greedy[-1] < 1.1 * greedy[0] and usual_greedy[-1] > 2.0 * usual_greedy[0],
        ),
        Claim(
            f"static 32 is faster than by default and becomes faster with load ({_listed(static)} ms; default "
            f"{_listed(usual_static)} ms)",
            static == sorted(static, reverse=True) and all(a < b for a, b in zip(static, usual_static, strict=True)),
        ),
        Claim(
            "greedy and static 32 are very close from ρ = 0.6 on",
            static[1] < 1.05 * greedy[1],
            f"at 0.6 static 32 is {static[1] / greedy[1] - 1:.0%} slower, at 0.9 {static[2] / greedy[2] - 1:.0%}",
        ),
    ]


def figure_8() -> Section:
    """A logarithmic energy."""
    concave = variant(32, None, log_energy)
    figure = new_figure(15, 5.6)
    panels = figure.subplot_mosaic([["e", "b", "c"], ["f", "b", "c"]], width_ratios=(0.85, 1, 1))
    energies = {name: np.array([energy(int(b)) for b in _SIZES]) for name, energy in _ENERGIES.items()}
    _lines(panels["e"], energies)
    panels["e"].set(ylabel="energy ζ(b), mJ", title="(a) energy and efficiency")
    _lines(panels["f"], {name: 1e3 * _SIZES / values for name, values in energies.items()})
    panels["f"].set(xlabel="batch size b", ylabel="b / ζ(b), requests per joule")
    by_load(panels["b"], panels["c"], concave)
    text = f"""\
{save_numbered(figure, 8)}

ζ(b) = 105 ln b + 60 mJ. {agreement(claims_8())}"""
    return Section("Figure 8: a logarithmic energy", text)


def claims_8() -> list[Claim]:
    """Section VII-C 2, on figure 8."""
    concave = variant(32, None, log_energy)
    powers = [_at(concave, load, "greedy").mean_power or 0.0 for load in (0.5, 0.6, 0.7, 0.8, 0.9)]
    shown, usual = tradeoffs(concave), tradeoffs(googlenet())
    steeper = [_slope(shown[load]) / _slope(usual[load]) for load in ALL_LOADS]
    grown, usually = (4.0 * energy(8) / energy(32) for energy in (log_energy, affine_energy))
    return [
        Claim(
            "greedy needs less power as the load rises from 0.6 to 0.8 "
            f"({', '.join(f'{power:.1f}' for power in powers)} W at ρ = 0.5, 0.6, ..., 0.9)",
            powers[1] > powers[2] > powers[3],
        ),
        Claim(
            f"the frontiers are {min(steeper):.1f} to {max(steeper):.1f} times as steep as those of figure 5",
            min(steeper) > 2.0,
        ),
        Claim("the solved policies are nowhere beaten", not_beaten(shown)),
        Claim(
            f"from b = 8 to 32 the efficiency b/ζ(b) grows {grown:.2f} times, by default {usually:.2f} times",
            grown > 2.0 and usually < 1.2,
        ),
        Claim(
            "b/ζ(b) grows super-linearly",
            grown > 4.0 and log_energy(1) > log_energy(2) / 2.0,
            f"it falls from b = 1 to 2 ({1e3 / log_energy(1):.1f} to {2e3 / log_energy(2):.1f} requests per joule) and "
            "then grows less than linearly",
        ),
    ]


def _slope(shown: Tradeoff) -> float:
    """The power saved between the ends of a frontier over the response time that it costs, W/s."""
    first, last = shown.vertices[0], shown.vertices[-1]
    saved = (first.mean_power or 0.0) - (last.mean_power or 0.0)
    return saved / (last.mean_response_time - first.mean_response_time)


_ENERGIES = {"default": affine_energy, "logarithmic": log_energy}


def figure_9() -> Section:
    """Distributions of the service time."""
    figure = new_figure(14, 4.8)
    functions, *panels = figure.subplots(1, 3)
    curves = service_functions(googlenet().service_time(8), times := np.linspace(0.0, 16e-3, 400))
    for color, (name, shares) in zip(PALETTE, curves.items(), strict=False):
        functions.plot(1e3 * times, shares, color=color, label=name)
    functions.set(xlabel="service time, ms", ylabel="share of batches", title="(a) service time of a batch of 8")
    functions.legend(frameon=False)
    finish_axes(functions)
    shown = by_distribution()
    for axes, load in zip(panels, shown, strict=True):
        for color, one in zip(PALETTE, shown[load], strict=False):
            frontier_chart(axes, one, color=color)
        axes.set_title(f"(b) ρ = {load}")
    legend(panels[0])
    text = f"""\
{save_numbered(figure, 9)}

The same means l(b). {agreement(claims_9())} The coefficients of variation are 0, 0.707, 1 and 1.414; the paper's
0.5 and 2 are their squares."""
    return Section("Figure 9: distributions of the service time", text)


def claims_9() -> list[Claim]:
    """Section VII-C 3, on figure 9."""
    mean = googlenet().service_time(8)
    tails = [1.0 - float(function[0]) for function in service_functions(mean, np.array([4.0 * mean])).values()]
    problems = {load: list(_by_distribution(load).values()) for load in _LOADS_9}
    greedy = {load: [benchmarks(problem)["greedy"] for problem in found] for load, found in problems.items()}
    powers = {load: [solution.mean_power or 0.0 for solution in found] for load, found in greedy.items()}
    sizes = {load: [solution.mean_batch_size for solution in found] for load, found in greedy.items()}
    times = {load: _times_at_middle(found) for load, found in problems.items()}
    slower = {load: found[-1] / found[0] - 1.0 for load, found in times.items()}
    return [
        Claim("the more the service time varies, the heavier its tail", tails == sorted(tails)),
        Claim(
            f"the slower are the answers for the same power, at ρ = 0.3 by up to {slower[0.3]:.0%}, at 0.7 by "
            f"{slower[0.7]:.0%}",
            all(found == sorted(found) for found in times.values()) and slower[0.7] > 2.0 * slower[0.3],
        ),
        Claim(
            f"greedy needs less power the more it varies ({_listed(powers[0.3])} W at ρ = 0.3 and "
            f"{_listed(powers[0.7])} W at 0.7, in the order of the legend), for its batches grow",
            all(found == sorted(found, reverse=True) for found in powers.values())
            and all(found == sorted(found) for found in sizes.values()),
        ),
    ]


def by_distribution() -> dict[float, list[Tradeoff]]:
    """For loads 0.3 and 0.7 the frontiers of the four distributions, and of the benchmarks greedy alone."""
    curves = {load: [tradeoff(problem, name) for name, problem in _by_distribution(load).items()] for load in _LOADS_9}
    return {
        load: [replace(one, benchmarks={"greedy": one.benchmarks["greedy"]}) for one in found]
        for load, found in curves.items()
    }


def _by_distribution(load: float) -> dict[str, Problem]:
    return {name: at(googlenet(), load, service=distribution(name, googlenet())) for name in _DISTRIBUTIONS}


def _times_at_middle(problems: Sequence[Problem]) -> list[float]:
    """Mean response times on the frontiers, s, at the middle of the powers of the first frontier's ends."""
    middle = sum(end.mean_power or 0.0 for end in _ends(problems[0])) / 2.0
    return [_time_at(problem, middle) for problem in problems]


def _ends(problem: Problem) -> tuple[Solution, Solution]:
    """The fastest and the cheapest solved policy."""
    return solve(problem), solve(replace(problem, w2=_POWER_ONLY))


def _time_at(problem: Problem, power: float) -> float:
    """Mean response time on the frontier, s, at this power, W; between two vertices that are near each other."""
    fast, cheap = _ends(problem)
    width = (fast.mean_power or 0.0) - (cheap.mean_power or 0.0)
    while (fast.mean_power or 0.0) - (cheap.mean_power or 0.0) > _NEAR * width:
        between = solve(replace(problem, w2=breakpoint_of(fast, cheap)))
        if between.batch_size in (fast.batch_size, cheap.batch_size):
            break
        fast, cheap = (between, cheap) if (between.mean_power or 0.0) > power else (fast, between)
    powers, times = zip(*((end.mean_power or 0.0, end.mean_response_time) for end in (cheap, fast)), strict=True)
    return float(np.interp(power, powers, times))


def service_functions(mean: float, times: Floats) -> dict[str, Floats]:
    """Distribution functions of the four service times, by their mean, s, at these times, s."""
    fast, slow = (stats.expon.cdf(times, scale=factor * mean) for factor in (0.5, 2.0))
    return {
        "deterministic": np.where(times >= mean, 1.0, 0.0),
        "erlang2": np.asarray(stats.gamma.cdf(times, 2, scale=mean / 2)),
        "exponential": np.asarray(stats.expon.cdf(times, scale=mean)),
        "hyperexponential": np.asarray((2.0 * fast + slow) / 3.0),
    }


def _pair(name: str, profile: Profile) -> dict[str, Profile]:
    return {"default": googlenet(), name: profile}


def _lines(axes: "Axes", curves: Mapping[str, Floats]) -> None:
    for color, (name, values) in zip(PALETTE, curves.items(), strict=False):
        axes.plot(_SIZES, values, "o-", ms=3, color=color, label=name)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    finish_axes(axes)


def _at(profile: Profile, load: float, name: str) -> Solution:
    return benchmarks(at(profile, load))[name]


def _times(profile: Profile, name: str) -> list[float]:
    """Mean response times of a benchmark at loads 0.1, 0.6 and 0.9, ms."""
    return [1e3 * _at(profile, load, name).mean_response_time for load in (0.1, 0.6, 0.9)]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
