"""The papers' truncation and relative value iteration, Table II and figure 10, beside our solver."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.support.harness import finish_axes, new_figure
from policies.charts.averages import LINE_STYLES, PALETTE
from policies.profile import Profile
from policies.solver.model import Problem
from policies.solver.rvi import Rvi, RviResult, relative_value_iteration
from policies.solver.solver import solve
from research.papers.setting import Claim, Section, agreement, at, difference, googlenet, save_numbered, table

_TOLERANCE = 1e-3  # delta of section VII-D
_LARGEST = 32  # B_max
_SPAN = 1e-2  # epsilon, at which relative value iteration ends
PRINTED_SAVINGS = 63.5, 98.0  # per cent of space and time, of c_o = 100 instead of 0
LEAST_SLOPE = 0.30505  # ms; of the service time, rounded to 0.3051 in the papers
LENGTHS = (32, 35, *range(40, 140, 10), 145, 150, 155, 160, 161, *range(165, 191, 5), 191, 192, *range(195, 251, 11))


@dataclass(frozen=True, slots=True)
class Printed:
    """A column of Table II (journal; Table I of the conference paper).

    Attributes:
        overflow_cost: c_o.
        length: the smallest s_max whose Delta is below 0.001.
        iterations: of relative value iteration.
        share: Delta.
        gain: g.
    """

    overflow_cost: float
    length: int
    iterations: int
    share: float
    gain: float


TABLE_II = (
    Printed(10000, 89, 1847, 9.36e-4, 66.1384),
    Printed(1000, 78, 1635, 9.78e-4, 66.1383),
    Printed(100, 70, 1483, 8.36e-4, 66.1377),
    Printed(10, 161, 10000, 6.14e-12, 66.1374),
    Printed(0, 192, 10000, 1.30e-14, 66.1374),
)


@cache
def rvi(problem: Problem, overflow_cost: float, length: int) -> RviResult:
    """The papers' scheme without its warnings, whose causes these tables show; cached for Table II and figure 10."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return relative_value_iteration(problem, Rvi(overflow_cost, length))


def acceptable_from(problem: Problem, overflow_cost: float, near: int) -> int:
    """The smallest s_max whose Delta is below 0.001, searched from `near` by ones."""

    def acceptable(length: int) -> bool:
        return rvi(problem, overflow_cost, length).overflow_cost_share < _TOLERANCE

    length = near
    while not acceptable(length):
        length += 1
    while length > _LARGEST and acceptable(length - 1):
        length -= 1
    return length


def settles_from(problem: Problem, overflow_cost: float) -> int:
    """The smallest s_max whose gain is within 1 per cent of that without truncation, searched by ones."""
    exact = solve(problem).gain
    return next(n for n in count(_LARGEST) if rvi(problem, overflow_cost, n).gain < 1.01 * exact)


def complexity(length: int, iterations: int) -> tuple[int, float]:
    """Numbers stored, and multiplications (conference paper, section IV-C)."""
    return _LARGEST * length, float(iterations) * _LARGEST * length**2


def reductions(ours: int, iterations: int, plain: int, plain_iterations: int) -> tuple[float, float]:
    """Shares of space and of time that an abstract cost saves compared with the truncation without one."""
    few, many = complexity(ours, iterations), complexity(plain, plain_iterations)
    return 1.0 - few[0] / many[0], 1.0 - few[1] / many[1]


def table_ii() -> Section:
    """Table II beside the printed one."""
    problem = at(googlenet(), 0.9, 1.0)
    results = [rvi(problem, column.overflow_cost, column.length) for column in TABLE_II]
    lengths = [acceptable_from(problem, column.overflow_cost, column.length) for column in TABLE_II]
    rows = [_row(*columns) for columns in zip(TABLE_II, lengths, results, strict=True)]
    heads = ["c_o", "s_max", "ours", "iterations", "ours", "Δ", "ours", "", "g", "ours", "", "space", "time"]
    space, time = reductions(lengths[2], results[2].iterations, lengths[4], results[4].iterations)
    text = f"""\
ρ = 0.9, w1 = w2 = 1, ε = 0.01, at most 10000 iterations. Printed figures, then ours at the same s_max; a column without
a name is the relative difference. s_max is the smallest with Δ below 0.001, searched again. Space is B_max s_max, time
iterations × B_max s_max², both from our figures.

{table(heads, rows)}

c_o = 100 instead of 0 saves {space:.1%} of the space and {time:.1%} of the time (printed: {PRINTED_SAVINGS[0]:g}
and {PRINTED_SAVINGS[1]:g} per cent).
{beside_printed(lengths, results)} The last printed Δ is near the rounding of double precision: compare its magnitude
only. Ours is computed without subtraction.

{_beside_ours(problem, results[2])}"""
    return Section("Table II (Table I of the conference paper): the abstract cost", text)


def beside_printed(lengths: Sequence[int], results: Sequence[RviResult]) -> str:
    """Sentences on what of Table II is the same, and on the rounding that explains the gains."""
    same = sum(column.length == length for column, length in zip(TABLE_II, lengths, strict=True))
    fewer = [column.iterations - ours.iterations for column, ours in zip(TABLE_II, results, strict=True)]
    low = [column.gain - ours.gain for column, ours in zip(TABLE_II, results, strict=True)]
    steeper = solve(at(with_slope(LEAST_SLOPE), 0.9, 1.0)).gain
    return (
        f"s_max is the same in {same} of {len(TABLE_II)}. {fewer.count(0)} numbers of iterations are the same, "
        f"{fewer.count(1)} of ours are one lower. Our gains are {min(low):.4f} to {max(low):.4f} lower, which the "
        f"rounding of the printed coefficients explains: the least slope that is printed as 0.3051 ms, {LEAST_SLOPE} "
        f"ms, has the gain {steeper:.4f}."
    )


def with_slope(slope: float) -> Profile:
    """The device with l(b) = slope b + 1.0524 ms."""
    profile = googlenet()
    times = tuple((slope * size + 1.0524) / 1e3 for size in range(1, profile.max_batch_size + 1))
    return replace(profile, service_times=times)


def _row(printed: Printed, length: int, ours: RviResult) -> list[str]:
    space, time = complexity(printed.length, ours.iterations)
    return [
        f"{printed.overflow_cost:g}",
        str(printed.length),
        str(length),
        str(printed.iterations),
        str(ours.iterations),
        f"{printed.share:.2e}",
        f"{ours.overflow_cost_share:.2e}",
        difference(printed.share, ours.overflow_cost_share),
        f"{printed.gain:.4f}",
        f"{ours.gain:.4f}",
        difference(printed.gain, ours.gain),
        str(space),
        f"{time:.2e}",
    ]


def _beside_ours(problem: Problem, scheme: RviResult) -> str:
    """Time and accuracy of the exact solver and of the scheme with its best parameters."""
    long = rvi(problem, 0.0, 250)
    ours, exact = _seconds(lambda: solve(problem)), solve(problem)
    theirs = _seconds(lambda: relative_value_iteration(problem, Rvi(100.0, 70)))
    rows = [
        [
            f"relative value iteration, c_o = 100, s_max = 70, ε = 0.01: {scheme.iterations} iterations",
            f"{1e3 * theirs:.1f}",
            f"{scheme.gain:.10f}",
            f"{abs(scheme.gain / exact.gain - 1.0):.0e}",
        ],
        [
            f"relative value iteration, c_o = 0, s_max = 250, ε = 0.01: {long.iterations} iterations",
            f"{1e3 * _seconds(lambda: relative_value_iteration(problem, Rvi(0.0, 250)), 1):.1f}",
            f"{long.gain:.10f}",
            f"{abs(long.gain / exact.gain - 1.0):.0e}",
        ],
        [
            f"policy iteration on the exact closure: {exact.iterations} linear systems",
            f"{1e3 * ours:.1f}",
            f"{exact.gain:.10f}",
            "-",
        ],
    ]
    return f"""\
Ours needs neither c_o nor s_max. On this machine it is {theirs / ours:.0f} times as fast as the scheme at its best, and
two independent algorithms agree on the gain:

{table(["method", "ms", "g", "relative difference"], rows)}"""


def _seconds(work: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def figure_10() -> Section:
    """Gain and Delta by s_max."""
    problem = at(googlenet(), 0.9, 1.0)
    exact = solve(problem).gain
    figure = new_figure(11, 4.6)
    gains, shares = figure.subplots(1, 2)
    found = {(column.overflow_cost, n): rvi(problem, column.overflow_cost, n) for column in TABLE_II for n in LENGTHS}
    for i, cost in enumerate(column.overflow_cost for column in TABLE_II):
        results = [found[cost, length] for length in LENGTHS]
        style: dict[str, Any] = {
            "color": PALETTE[i],
            "linestyle": LINE_STYLES[i],
            "lw": 1.6,
            "label": f"c_o = {cost:g}",
        }
        gains.plot(LENGTHS, [result.gain for result in results], **style)
        shares.semilogy(LENGTHS, [result.overflow_cost_share for result in results], **style)
    gains.axhline(exact, color="black", lw=0.8, label=f"exact, {exact:.4f}")
    shares.axhline(_TOLERANCE, color="black", lw=0.8, label="accepted, 0.001")
    gains.set(xlabel="s_max", ylabel="gain g of the truncated model", ylim=(0, 200))
    shares.set(xlabel="s_max", ylabel="Δ, the part that the overflow state contributes")
    for axes in (gains, shares):
        finish_axes(axes, {"fontsize": "small"})
    text = f"{save_numbered(figure, 10)}\n\nρ = 0.9, w1 = w2 = 1. {agreement(claims_10(problem, found))}"
    return Section("Figure 10: gain and Δ by s_max", text)


def claims_10(problem: Problem, found: Mapping[tuple[float, int], RviResult]) -> list[Claim]:
    """Section VII-D, on figure 10.

    Args:
        problem: of the figure.
        found: its results by c_o and s_max; for each c_o of Table II several s_max, ascending.
    """
    exact = solve(problem).gain
    gains = {cost: [found[key].gain for key in found if key[0] == cost] for cost in (10000, 1000, 100)}
    settled = [settles_from(problem, cost) for cost in gains]
    falling = all(
        all(after < before + _SPAN for before, after in pairwise(values)) and values[-1] < exact + _SPAN
        for values in gains.values()
    )
    lengths = {cost: [n for other, n in found if other == cost] for cost in (10, 0)}
    drops = {
        cost: next(n for n in searched if found[cost, n].overflow_cost_share < _TOLERANCE)
        for cost, searched in lengths.items()
    }
    waits = all(
        found[cost, n].overflow_cost_share > 0.999 * found[cost, n].gain
        for cost, drop in drops.items()
        for n in lengths[cost]
        if n < drop
    )
    late = [n for n in lengths[0] if n >= 195]
    first, last = (found[0, n].overflow_cost_share for n in (late[0], late[-1]))
    return [
        Claim("with c_o = 10000, 1000 and 100 the gain falls to its limit", falling),
        Claim(
            "with 10 and 0 the policy waits for ever (the gain is then s_max / λ + c_o, all of it Δ) until Δ drops "
            f"sharply, at s_max = {drops[10]} and {drops[0]}",
            waits and list(drops.values()) == [column.length for column in TABLE_II[3:]],
        ),
        Claim(
            "the gains of c_o = 10000, 1000 and 100 settle around s_max = 35, 50 and 70",
            settled == sorted(settled),
            f"they are within 1 per cent of the limit from {settled[0]}, {settled[1]} and {settled[2]} on, c_o = 100 "
            "first, as its own Table II has it",
        ),
        Claim(
            "Δ almost converges beyond s_max = 200",
            last > 0.5 * first,
            f"it goes on falling, for c_o = 0 from {first:.0e} at {late[0]} to {last:.0e} at {late[-1]}; a floor of "
            "1e-13 is the rounding of a subtraction",
        ),
    ]
