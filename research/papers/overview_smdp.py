"""Rows of the journal paper and the conference paper: what each prints, and ours."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from policies.charts.averages import benchmarks
from policies.objectives.frontier import MeanBound, choose_weight
from policies.solver.distributions import distribution
from policies.solver.solver import solve
from research.papers import approximate_iteration, conference
from research.papers.actions import breaks, broken_solutions, claims_3, claims_11, simple_cases, solved
from research.papers.overview import Paper, Row, judged
from research.papers.proposition_4 import SizeIndependent, optimal_control_limit
from research.papers.runs import TABLE_I, claims_6, claims_table_i, exact_figures, table_i_policies
from research.papers.setting import (
    CONSTANT_MS,
    LOADS,
    WEIGHTS,
    Claim,
    affine_energy,
    at,
    difference,
    googlenet,
    log_energy,
    variant,
)
from research.papers.tradeoffs import claims_4, claims_5
from research.papers.truncation import TABLE_II, acceptable_from, claims_10, reductions, rvi
from research.papers.variants import CONSTANT_MS as CONSTANT
from research.papers.variants import claims_7, claims_8, claims_9

_NO_DATA = "NVIDIA's measurements on a Tesla P4 and V100: no such device here, and no values are printed"
_LENGTHS: dict[float, tuple[int, ...]] = {  # by c_o, the s_max at which figure 10's statements are checked
    **dict.fromkeys((10000, 1000, 100), (32, 50, 90, 120)),
    10: (32, 50, 90, 160, 161),
    0: (32, 50, 90, 160, 161, 191, 192, 195, 250),
}


@cache
def journal() -> Paper:
    """The journal paper's 11 figures and 3 tables."""
    rows = [
        Row("Figure 1", "no numbers", "drawing", "-"),
        Row("Figure 2", "not possible here", "service times and energies by batch size", "the fits are used", _NO_DATA),
        _figure_3(),
        judged("Figure 4", "solved costs least, greedy near it at w2 = 0", "the same", claims_4()),
        _figure_5(),
        judged("Figure 6", "greedy, static 8, 16, 32; solved ones lighter-tailed", "the same", claims_6()),
        _table_i(),
        _figure_7(),
        _figure_8(),
        _figure_9(),
        _figure_10("Figure 10"),
        _table_ii("Table II"),
        _figure_11(),
        _table_iii(),
    ]
    return Paper("Xu, Zhou and Niu, arXiv 2501.02181 (journal)", rows)


@cache
def conference_paper() -> Paper:
    """The conference paper's 8 figures and one table."""
    solutions = conference.policies()
    limits = sum(conference.limit_of(s) is not None for row in solutions.values() for s in row)
    total = sum(map(len, solutions.values()))
    below = _tradeoff_claims()[:5]  # without the journal's bound of 5 ms
    rows = [
        Row("Figure 1", "no numbers", "drawing", "-"),
        Row("Figure 2", "not possible here", "service times by batch size", "the fits are used", _NO_DATA),
        Row("Figure 3", "not possible here", "energies by batch size", "the fits are used", _NO_DATA),
        judged("Figure 4", "control limits in general", f"{limits} of {total}", conference.claims_4(solutions)),
        judged("Figure 5", "solved costs least, w2 up to 20", "the same", conference.claims_5(conference.costs())),
        judged("Figure 6", "no policy below the curves", "the same", below),
        judged("Figure 7", "no policy above the curves", "the same", below, "power as efficiency"),
        _figure_10("Figure 8"),
        _table_ii("Table I"),
    ]
    return Paper("Xu, Sun, Zhou and Niu, ICC 2023 (conference)", rows)


def _figure_3() -> Row:
    cases = [[solved(case, w2) for w2 in WEIGHTS] for case in simple_cases()]
    every = [solution for case in cases for row in case for solution in row]
    limits = sum(not breaks(solution) for solution in every)
    agree = sum(
        conference.threshold_of(solution) == _closed(load, ms, w2)
        for ms, case in zip(CONSTANT_MS[1:], cases[1:], strict=True)
        for w2, row in zip(WEIGHTS, case, strict=True)
        for load, solution in zip(LOADS, row, strict=True)
    )
    return judged(
        "Figure 3",
        "control limits; Cases 2 and 3 by Proposition 4",
        f"{limits} of {len(every)}; {agree} of 40",
        [*claims_3(), Claim("Proposition 4 gives the same limits", agree == 40)],
        "the l of Case 1 is not printed: ours is a guess",
    )


def _closed(load: float, service_ms: float, w2: float) -> int:
    rate = load * 8 / (service_ms / 1e3)
    return optimal_control_limit(SizeIndependent(rate, service_ms / 1e3, 8, affine_energy(0) / 1e3, w2=w2))


@cache
def _tradeoff_claims() -> tuple[Claim, ...]:
    return tuple(claims_5())


def _figure_5() -> Row:
    chosen = choose_weight(at(googlenet(), 0.3), MeanBound(5e-3), mixed=False)
    found = {w2: solve(at(googlenet(), 0.3, w2)) for w2 in (n / 10 for n in range(31))}
    same = [w2 for w2, s in found.items() if abs(s.mean_response_time / chosen.mean_response_time - 1.0) < 1e-6]
    ours = f"w2 = {same[0]} to {same[-1]}, one policy"
    return judged("Figure 5", "w2 = 1.3 for 5 ms at ρ = 0.3", ours, _tradeoff_claims())


def _table_i() -> Row:
    solutions = table_i_policies()
    apart = [
        [abs(ours / figure - 1.0) for ours, figure in zip(exact_figures(solutions[name]), printed, strict=True)]
        for name, printed in TABLE_I.items()
    ]
    means, percentiles = (max(max(row[part]) for row in apart) for part in (slice(2), slice(2, None)))
    claims = [
        *claims_table_i(),
        Claim("means and powers within 0.1 per cent", means < 1e-3),
        Claim("percentiles within 1 per cent", percentiles < 1e-2),
    ]
    note = f"means and powers at most {means:.2%}, percentiles {percentiles:.2%} (the paper's are simulated)"
    return judged("Table I", "15 numbers", "15 numbers, exact", claims, note)


def _figure_7() -> Row:
    found = benchmarks(at(variant(32, CONSTANT), 0.6))
    static, greedy = (1e3 * found[name].mean_response_time for name in ("static 32", "greedy"))
    ours = f"{static:.2f} and {greedy:.2f} ms at ρ = 0.6"
    return judged("Figure 7", "static 32 close to greedy from ρ = 0.6 on", ours, claims_7())


def _figure_8() -> Row:
    concave = variant(32, None, log_energy)
    powers = [benchmarks(at(concave, load))["greedy"].mean_power or 0.0 for load in (0.6, 0.7, 0.8)]
    ours = f"{', '.join(f'{power:.1f}' for power in powers)} W"
    return judged("Figure 8", "greedy's power falls from ρ = 0.6 to 0.8", ours, claims_8())


def _figure_9() -> Row:
    names = ("deterministic", "erlang2", "exponential", "hyperexponential")
    second = [distribution(name, googlenet()).second_moments(np.array([1.0]))[0] for name in names]
    found = [float(moment - 1.0) ** 0.5 for moment in second]
    same = all(abs(a - b) < 0.01 for a, b in zip(found, (0.0, 0.5, 1.0, 2.0), strict=True))
    claim = Claim("the coefficients of variation are 0, 0.5, 1 and 2", same, "these are their squares")
    listed = ", ".join(f"{value:.3g}" for value in found)
    return judged("Figure 9", "coefficients of variation 0, 0.5, 1, 2", listed, [*claims_9(), claim])


@cache
def _figure_10_claims() -> tuple[Claim, ...]:
    problem = at(googlenet(), 0.9, 1.0)
    found = {(cost, n): rvi(problem, cost, n) for cost, lengths in _LENGTHS.items() for n in lengths}
    return tuple(claims_10(problem, found))


def _figure_10(item: str) -> Row:
    printed = "gain settles at s_max = 35, 50, 70 for c_o = 10000, 1000, 100"
    return judged(item, printed, "in the reverse order", _figure_10_claims())


@cache
def _table_ii_claims() -> tuple[Sequence[Claim], str, str]:
    """Statements, our s_max, and the differences."""
    problem = at(googlenet(), 0.9, 1.0)
    results = [rvi(problem, column.overflow_cost, column.length) for column in TABLE_II]
    lengths = [acceptable_from(problem, column.overflow_cost, column.length) for column in TABLE_II]
    pairs = list(zip(TABLE_II, results, strict=True))
    fewer = max(abs(printed.iterations - ours.iterations) for printed, ours in pairs)
    gain = max(abs(ours.gain / printed.gain - 1.0) for printed, ours in pairs)
    shares = [abs(ours.overflow_cost_share / printed.share - 1.0) for printed, ours in pairs]
    space, time = reductions(lengths[2], results[2].iterations, lengths[4], results[4].iterations)
    claims = [
        Claim("the same s_max", lengths == [column.length for column in TABLE_II]),
        Claim("iterations within one", fewer <= 1),
        Claim("gains within 2e-4", gain < 2e-4),
        Claim("Δ within 0.2 per cent where it is not rounding", max(shares[:4]) < 2e-3),
        Claim("63.5 and 98 per cent saved", f"{space:.1%}" == "63.5%" and f"{time:.0%}" == "98%"),
    ]
    note = (
        f"iterations at most {fewer} apart, gain {gain:.1e} by the rounding of printed coefficients, "
        f"Δ {max(shares[:4]):.1e} and {shares[4]:.0%} at c_o = 0, where it is rounding"
    )
    return claims, ", ".join(map(str, lengths)), note


def _table_ii(item: str) -> Row:
    claims, lengths, note = _table_ii_claims()
    return judged(item, f"s_max {', '.join(str(column.length) for column in TABLE_II)}", lengths, claims, note)


def _figure_11() -> Row:
    note = "the energies of Cases 5 and 7 and the l of Cases 4 and 5 are not printed: ours are guesses"
    ours = f"{', '.join(map(str, broken_solutions()))} of 20 in Cases 4 to 7"
    return judged("Figure 11", "Cases 4 to 7 break the structure", ours, claims_11(), note)


def _table_iii() -> Row:
    ours = approximate_iteration.measured()
    gains = [scheme.gains[-1] for scheme in ours.schemes.values()][:4]
    listed = ", ".join(f"{gain:.2f}" for gain in gains)
    note = f"38.86: {difference(38.86, gains[0])}; 42.53: {difference(42.53, gains[2])}, it is greedy's gain"
    return judged("Table III", "38.86, 38.86, 42.53, 42.53", listed, ours.claims, note)
