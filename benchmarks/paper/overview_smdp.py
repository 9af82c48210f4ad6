"""Rows of the journal paper and the conference paper: what each prints, and ours, computed by the solver."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from benchmarks.paper import approximate_iteration, conference
from benchmarks.paper.actions import breaks, broad_cases, simple_cases, solved
from benchmarks.paper.overview import Paper, Row, judged
from benchmarks.paper.proposition_4 import SizeIndependent, optimal_control_limit
from benchmarks.paper.runs import TABLE_I, Runs
from benchmarks.paper.setting import (
    ALL_LOADS,
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
from benchmarks.paper.truncation import TABLE_II, acceptable_from, reductions, rvi
from policies.charts.averages import benchmarks
from policies.profile import Profile
from policies.queue.simulator import percentile
from policies.smdp.choice import frontier
from policies.smdp.distributions import distribution
from policies.smdp.rvi import RviResult
from policies.smdp.solver import Solution, solve

_CONSTANT = 6.0859  # ms, figure 7
_NO_DATA = "NVIDIA's measurements on a Tesla P4 and V100: no such device here, and no values are printed"


def journal(results: Runs) -> Paper:
    """The journal paper's 11 figures and 3 tables."""
    rows = [
        Row("Figure 1", "no numbers", "drawing", "-"),
        Row("Figure 2", "not possible here", "service times and energies by batch size", "the fits are used", _NO_DATA),
        _figure_3(),
        _figure_4(),
        _figure_5(),
        _figure_6(results),
        _table_i(results),
        _figure_7(),
        _figure_8(),
        _figure_9(),
        _figure_10(),
        _table_ii("Table II"),
        _figure_11(),
        _table_iii(),
    ]
    return Paper("Xu, Zhou and Niu, arXiv 2501.02181 (journal)", rows)


def conference_paper() -> Paper:
    """The conference paper's 8 figures and one table."""
    solutions, found = conference.policies(), conference.costs()
    limits = sum(conference.limit_of(s) is not None for row in solutions.values() for s in row)
    rows = [
        Row("Figure 1", "no numbers", "drawing", "-"),
        Row("Figure 2", "not possible here", "service times by batch size", "the fits are used", _NO_DATA),
        Row("Figure 3", "not possible here", "energies by batch size", "the fits are used", _NO_DATA),
        judged(
            "Figure 4",
            "control limits in general",
            f"{limits} of {sum(map(len, solutions.values()))}",
            conference.claims_4(solutions),
        ),
        judged("Figure 5", "solved costs least, w2 up to 20", "the same", conference.claims_5(found)),
        judged("Figure 6", "no policy below the curves", "the same", tradeoff_claims()),
        judged("Figure 7", "no policy above the curves", "the same", tradeoff_claims(), "power as efficiency"),
        _figure_10("Figure 8"),
        _table_ii("Table I"),
    ]
    return Paper("Xu, Sun, Zhou and Niu, ICC 2023 (conference)", rows)


def _figure_3() -> Row:
    cases = [[solved(case, w2) for w2 in WEIGHTS] for case in simple_cases()]
    every = [solution for case in cases for row in case for solution in row]
    limits = sum(not breaks(solution) for solution in every)
    agree = sum(
        _first(solution) == _closed(load, ms, w2)
        for ms, case in zip(CONSTANT_MS[1:], cases[1:], strict=True)
        for w2, row in zip(WEIGHTS, case, strict=True)
        for load, solution in zip(LOADS, row, strict=True)
    )
    same = [s.batch_size for s in cases[1][0]] == [s.batch_size for s in cases[2][0]]
    claims = [
        Claim("all are control limit policies", limits == len(every)),
        Claim("Proposition 4 gives the same limits", agree == 40),
        Claim("with w2 = 0 Cases 2 and 3 are the same", same),
        Claim("with w2 = 100 every limit is 8", all(_first(s) == 8 for case in cases for s in case[-1])),
    ]
    return judged(
        "Figure 3",
        "control limits; Cases 2 and 3 by Proposition 4",
        f"{limits} of {len(every)}; {agree} of 40",
        claims,
        "the l of Case 1 is not printed: ours is a guess",
    )


def _closed(load: float, service_ms: float, w2: float) -> int:
    rate = load * 8 / (service_ms / 1e3)
    return optimal_control_limit(SizeIndependent(rate, service_ms / 1e3, 8, affine_energy(0) / 1e3, w2=w2))


def _first(solution: Solution) -> int:
    return next(n for n, action in enumerate(solution.batch_size) if action)


def _figure_4() -> Row:
    found = [conference.costs_at(load, np.linspace(0.0, 15.0, 16)) for load in conference.LOADS_5]
    near = {each.load: each.above("greedy")[0] for each in found}
    last = {each.load: each.above("static 32")[-1] for each in found}
    claims = [
        Claim(
            "the solved policy costs least",
            all(each.above(name).min() >= 0.0 for each in found for name in each.others),
        ),
        Claim("at w2 = 0 greedy is close", max(near.values()) < 5.0),
        Claim("at w2 = 15 static 32 is close, except at ρ = 0.1", max(last[0.3], last[0.7]) < 5.0 < last[0.1]),
    ]
    least = max(near.values())
    ours = f"the same; greedy at most {least:.2f} per cent above at w2 = 0"
    return judged("Figure 4", "solved costs least, greedy near it at w2 = 0", ours, claims)


@cache
def tradeoff_claims() -> tuple[Claim, ...]:
    """What both papers say of power against response time: no benchmark is below the solved policies."""
    others = {load: benchmarks(at(googlenet(), load)) for load in ALL_LOADS}
    beaten = sum(_is_cheaper(other, load) for load in ALL_LOADS for other in others[load].values())
    static = others[0.9]["static 16"]
    vertices = (s for s in frontier(at(googlenet(), 0.9)) if (s.mean_power or 0.0) <= (static.mean_power or 0.0))
    slower = static.mean_response_time / min(s.mean_response_time for s in vertices)
    return (
        Claim(f"no benchmark is below a curve ({beaten} are)", beaten == 0),
        Claim("static 8 is unstable from ρ = 0.8 on", max(n for n in ALL_LOADS if "static 8" in others[n]) == 0.7),
        Claim(f"static 16 is considerably slower at ρ = 0.9 ({slower:.1f} times)", slower > 1.2),
    )


def _is_cheaper(other: Solution, load: float) -> bool:
    """Whether a policy's weighted cost is below the solved one's at some w2."""
    mean, power = 1e3 * other.mean_response_time, other.mean_power or 0.0
    weights = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 100.0)
    return any(mean + w2 * power < solve(at(googlenet(), load, w2)).gain * (1.0 - 1e-9) for w2 in weights)


def _figure_5() -> Row:
    solutions = {n / 10: solve(at(googlenet(), 0.3, n / 10)) for n in range(31)}
    within = [w2 for w2, solution in solutions.items() if solution.mean_response_time < 5e-3]
    same = [
        w2
        for w2 in within
        if abs(solutions[w2].mean_response_time / solutions[within[-1]].mean_response_time - 1.0) < 1e-6
    ]
    claims = [Claim("w2 = 1.3 has the policy of least power that keeps 5 ms at ρ = 0.3", 1.3 in same)]
    return judged(
        "Figure 5",
        "w2 = 1.3 for 5 ms at ρ = 0.3",
        f"w2 = {same[0]} to {same[-1]}, one policy",
        [*claims, *tradeoff_claims()],
    )


def _figure_6(results: Runs) -> Row:
    shares = np.array([0.1, 0.5, 0.9, 0.99])
    times = {name: 1e3 * np.quantile(run.responses, shares) for name, run in results.runs.items()}
    order = ("greedy", "static 8", "static 16", "static 32")
    crossing = [times[f"solved, w2 = {w2}"] - times["static 8"] for w2 in (1.6, 2.2)]
    claims = [
        Claim(
            "greedy, static 8, 16, 32 from left to right", all((times[a] < times[b]).all() for a, b in pairwise(order))
        ),
        Claim("the solved policies cross static 8 upwards", all(each[1] > 0.0 > each[3] for each in crossing)),
    ]
    medians = ", ".join(f"{times[name][1]:.2f}" for name in order)
    return judged("Figure 6", "greedy, static 8, 16, 32; solved ones lighter-tailed", f"medians {medians} ms", claims)


def _table_i(results: Runs) -> Row:
    exact, simulated = [], []
    for name, (power, mean, *percentiles) in TABLE_I.items():
        solution, responses = results.solutions[name], results.runs[name].responses
        exact += [(solution.mean_power or 0.0) / power - 1.0, 1e3 * solution.mean_response_time / mean - 1.0]
        ours = [1e3 * percentile(responses, share).value for share in (0.5, 0.9, 0.95)]
        simulated += [value / printed - 1.0 for value, printed in zip(ours, percentiles, strict=True)]
    worst, spread = max(map(abs, exact)), max(map(abs, simulated))
    claims = [
        Claim("means and powers within 0.1 per cent", worst < 1e-3),
        Claim("percentiles within 1 per cent", spread < 1e-2),
    ]
    return judged(
        "Table I",
        "15 numbers",
        "15 numbers",
        claims,
        f"means and powers at most {worst:.2%}, simulated percentiles {spread:.2%}",
    )


def _times(profile: Profile, name: str) -> list[float]:
    """Mean response times at loads 0.1, 0.6 and 0.9, ms."""
    return [1e3 * benchmarks(at(profile, load))[name].mean_response_time for load in (0.1, 0.6, 0.9)]


def _figure_7() -> Row:
    constant = variant(32, _CONSTANT)
    greedy, static = _times(constant, "greedy"), _times(constant, "static 32")
    apart = static[1] / greedy[1] - 1.0
    usual = googlenet().service_times
    claims = [
        Claim("the service rate grows 32 times, by default 4", round(32 * usual[0] / usual[-1]) == 4),
        Claim("greedy hardly slows down", greedy[2] / greedy[0] < 1.2),
        Claim("static 32 becomes faster with load", static[0] > static[1] > static[2]),
        Claim("static 32 is very close to greedy from ρ = 0.6 on", apart < 0.05, f"it is {apart:.0%} slower there"),
    ]
    ours = f"{static[1]:.2f} and {greedy[1]:.2f} ms at ρ = 0.6"
    return judged("Figure 7", "static 32 close to greedy from ρ = 0.6 on", ours, claims)


def _figure_8() -> Row:
    concave = variant(32, None, log_energy)
    powers = [benchmarks(at(concave, load))["greedy"].mean_power or 0.0 for load in (0.6, 0.7, 0.8)]
    efficiency = np.array([b / log_energy(b) for b in range(1, 33)])
    claims = [
        Claim("greedy's power falls from ρ = 0.6 to 0.8", powers[0] > powers[2]),
        Claim(
            "the energy efficiency grows super-linearly",
            bool((efficiency[1:] / efficiency[:-1] > np.arange(2, 33) / np.arange(1, 32)).all()),
            "it falls from b = 1 to 2",
        ),
    ]
    ours = f"{powers[0]:.1f}, {powers[1]:.1f}, {powers[2]:.1f} W"
    return judged("Figure 8", "greedy's power falls from ρ = 0.6 to 0.8", ours, claims)


def _figure_9() -> Row:
    names = ("deterministic", "erlang2", "exponential", "hyperexponential")
    services = [distribution(name, googlenet()) for name in names]
    greedy = [benchmarks(at(googlenet(), 0.7, service=service))["greedy"] for service in services]
    powers = [solution.mean_power or 0.0 for solution in greedy]
    times = np.array([1.0])
    found = [float(service.second_moments(times)[0] - 1.0) ** 0.5 for service in services]
    same = all(abs(a - b) < 0.01 for a, b in zip(found, (0.0, 0.5, 1.0, 2.0), strict=True))
    listed = ", ".join(f"{value:.3g}" for value in found)
    claims = [
        Claim("greedy's power falls with the variation", all(a > b for a, b in pairwise(powers))),
        Claim("the coefficients of variation are 0, 0.5, 1 and 2", same, "these are their squares"),
    ]
    return judged("Figure 9", "coefficients of variation 0, 0.5, 1, 2", listed, claims)


@cache
def _converging() -> Mapping[float, int]:
    """By c_o the first s_max from 32 on, in steps of 2, from which on the gain is within 1 per cent of its limit."""
    problem = at(googlenet(), 0.9, 1.0)
    limit = solve(problem).gain
    found = {}
    for cost in (10000.0, 1000.0, 100.0):
        lengths = range(32, 80, 2)
        near = [abs(rvi(problem, cost, length).gain / limit - 1.0) < 0.01 for length in lengths]
        found[cost] = next(length for i, length in enumerate(lengths) if all(near[i:]))
    return found


def _figure_10(item: str = "Figure 10") -> Row:
    found = list(_converging().values())
    claims = [
        Claim(
            "c_o = 10000 settles first, then 1000, then 100", found[0] < found[1] < found[2], "the order is the reverse"
        )
    ]
    ours = f"{', '.join(map(str, found))} (within 1 per cent)"
    return judged(item, "gain settles at s_max = 35, 50, 70 for c_o = 10000, 1000, 100", ours, claims)


@cache
def _columns() -> tuple[Sequence[RviResult], Sequence[int]]:
    problem = at(googlenet(), 0.9, 1.0)
    results = [rvi(problem, column.overflow_cost, column.length) for column in TABLE_II]
    return results, [acceptable_from(problem, column.overflow_cost, column.length) for column in TABLE_II]


def _table_ii(item: str) -> Row:
    results, lengths = _columns()
    pairs = list(zip(TABLE_II, results, lengths, strict=True))
    same = sum(printed.length == length for printed, _, length in pairs)
    fewer = max(abs(printed.iterations - ours.iterations) for printed, ours, _ in pairs)
    gain = max(abs(ours.gain / printed.gain - 1.0) for printed, ours, _ in pairs)
    shares = [abs(ours.overflow_cost_share / printed.share - 1.0) for printed, ours, _ in pairs]
    space, time = reductions(lengths[2], results[2].iterations, lengths[4], results[4].iterations)
    claims = [
        Claim("the same s_max", same == len(pairs)),
        Claim("iterations within one", fewer <= 1),
        Claim("gains within 2e-4", gain < 2e-4),
        Claim("Δ within 0.2 per cent where it is not rounding", max(shares[:4]) < 2e-3),
        Claim("63.5 and 98 per cent saved", f"{space:.1%}" == "63.5%" and f"{time:.0%}" == "98%"),
    ]
    note = (
        f"iterations at most {fewer} apart, gain {gain:.1e} by the rounding of printed coefficients, "
        f"Δ {max(shares[:4]):.1e} and {shares[4]:.0%} at c_o = 0, where it is rounding"
    )
    return judged(item, "s_max 89, 78, 70, 161, 192", f"{', '.join(map(str, lengths))}", claims, note)


def _figure_11() -> Row:
    counts = [sum(breaks(s) for w2 in WEIGHTS for s in solved(case, w2)) for case in broad_cases()]
    fourth = [solve(at(broad_cases()[0].profile, 0.1, w2, 5)).batch_size for w2 in (0.0, 0.5, 1.0)]
    claims = [
        Claim("each of Cases 4 to 7 has solutions without the structure", min(counts) > 0),
        Claim("Case 7 has the most", counts[3] > max(counts[:3])),
        Claim("Case 4 launches less than 8 above 8", all(min(t[9:] or (8,)) < 8 for t in fourth)),
    ]
    note = "the energies of Cases 5 and 7 and the l of Cases 4 and 5 are not printed: ours are guesses"
    ours = f"{', '.join(map(str, counts))} of 20 in Cases 4 to 7"
    return judged("Figure 11", "Cases 4 to 7 break the structure", ours, claims, note)


def _table_iii() -> Row:
    ours = approximate_iteration.measured()
    gains = [scheme.gains[-1] for scheme in ours.schemes.values()][:4]
    listed = ", ".join(f"{gain:.2f}" for gain in gains)
    note = f"38.86: {difference(38.86, gains[0])}; 42.53: {difference(42.53, gains[2])}, it is greedy's gain"
    return judged("Table III", "38.86, 38.86, 42.53, 42.53", listed, ours.claims, note)
