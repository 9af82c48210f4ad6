"""Charts of actions, figures 3 and 11, and the closed form of Proposition 4 beside the solver."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.support.harness import new_figure
from policies.charts.action_chart import (
    chart_rows,
    control_limit_of,
    control_limit_violations,
    legend_handles,
    policy_chart,
)
from policies.profile import Profile
from policies.solver.distributions import DETERMINISTIC, Gamma, ServiceDistribution
from policies.solver.solver import Solution, solve
from research.papers.proposition_4 import SizeIndependent, optimal_control_limit
from research.papers.setting import (
    CONSTANT_MS,
    LOADS,
    WEIGHTS,
    Claim,
    Section,
    affine_energy,
    agreement,
    at,
    log_energy,
    save_numbered,
    table,
    variant,
)

_LARGEST = 8  # B_max
_EXPONENTIAL = Gamma((1.0,))


@dataclass(frozen=True, slots=True)
class Case:
    """One of the paper's Cases 1-7.

    Attributes:
        name: number and description.
        profile: service times and energies for batches of 1 to 8.
        min_batch_size: B_min.
        service: distribution of the service times.
    """

    name: str
    profile: Profile
    min_batch_size: int = 1
    service: ServiceDistribution = DETERMINISTIC


def simple_cases() -> list[Case]:
    """Cases 1-3: service times that do not depend on the batch size."""
    services = (DETERMINISTIC, _EXPONENTIAL, _EXPONENTIAL)
    names = ("deterministic", "exponential", "exponential")
    return [
        Case(f"Case {i}: {name}, l = {ms} ms", variant(_LARGEST, ms), service=service)
        for i, (name, ms, service) in enumerate(zip(names, CONSTANT_MS, services, strict=True), 1)
    ]


def even_energy(batch_size: int) -> float:
    """zeta(b), mJ, with odd batches padded to the next even size: our choice for Cases 5 and 7."""
    return affine_energy(2 * -(-batch_size // 2))


def broad_cases() -> list[Case]:
    """Cases 4-7 (appendix E); the energies of 5 and 7 are ours, since the paper prints none."""
    constant = CONSTANT_MS[0]
    return [
        Case("Case 4: B_min = 5", variant(_LARGEST, constant), 5),
        Case("Case 5: energy of even sizes", variant(_LARGEST, constant, even_energy)),
        Case("Case 6: l(b) = 0.3051 b + 1.0524 ms", variant(_LARGEST)),
        Case("Case 7: all three", variant(_LARGEST, None, even_energy), 5),
    ]


def solved(case: Case, w2: float) -> list[Solution]:
    """The case's policies at the five loads."""
    return [solve(at(case.profile, load, w2, case.min_batch_size, case.service)) for load in LOADS]


def breaks(solution: Solution) -> bool:
    """Whether a policy departs from the control-limit structure."""
    return any(control_limit_violations(solution.batch_size, _LARGEST))


def proposition_4() -> Section:
    """The closed form beside the solver's control limits: two service times, four weights, five loads."""
    rows, agreeing = [], 0
    for case, ms in list(zip(simple_cases(), CONSTANT_MS, strict=True))[1:]:
        for w2 in WEIGHTS:
            closed = [_closed(load, ms, w2) for load in LOADS]
            limits = [control_limit_of(solution.batch_size, _LARGEST) for solution in solved(case, w2)]
            agreeing += sum(a == b for a, b in zip(closed, limits, strict=True))
            rows.append([f"l = {ms} ms, w2 = {w2:g}", " ".join(map(str, closed)), " ".join(map(str, limits))])
    text = f"""\
Exponential service times that do not depend on the batch size, B_max = 8, ζ(b) = 19.899 b + 19.603 mJ. The control
limits for ρ = 0.1, 0.3, 0.5, 0.7, 0.9:

{table(["", "Proposition 4", "solver"], rows)}

They agree in {agreeing} of {len(rows) * len(LOADS)}."""
    return Section("Proposition 4: control limits in closed form", text)


def _closed(load: float, service_ms: float, w2: float) -> int:
    fixed = affine_energy(0) / 1e3
    return optimal_control_limit(
        SizeIndependent(load * _LARGEST / (service_ms / 1e3), service_ms / 1e3, _LARGEST, fixed, w2=w2)
    )


def figure_3() -> Section:
    """Actions of Cases 1-3."""
    text = f"""\
{_draw(simple_cases(), 3)}

Action by queue length and load; a frame marks the control limit. {agreement(claims_3())}"""
    return Section("Figure 3: solutions where the control limit is optimal", text)


def claims_3() -> list[Claim]:
    """Section VII-A, on Cases 1-3 of figure 3, and Corollary 1."""
    cases = [[solved(case, w2) for w2 in WEIGHTS] for case in simple_cases()]
    every = [solution for case in cases for solutions in case for solution in solutions]
    keeping = sum(not breaks(solution) for solution in every)
    first, second, third = ([_limits(solutions) for solutions in case] for case in cases)
    pairs = [pair for two in zip(second[1:], third[1:], strict=True) for pair in zip(*two, strict=True)]
    above = sum(b >= a for a, b in pairs)
    rising = all(a <= b for case in (first, second, third) for two in pairwise(case) for a, b in zip(*two, strict=True))
    return [
        Claim(f"{keeping} of {len(every)} solutions are control limit policies", keeping == len(every)),
        Claim(
            "the limits rise with w2, to 8 at every load for w2 = 100",
            rising and {limit for case in (first, second, third) for limit in case[-1]} == {_LARGEST},
        ),
        Claim("with w2 = 0, Cases 2 and 3 have the same solutions (Corollary 1)", second[0] == third[0]),
        Claim(
            f"with w2 > 0, the limits of Case 3 are equal to or above those of Case 2 in {above} of {len(pairs)}",
            above == len(pairs),
        ),
    ]


def _limits(solutions: Sequence[Solution]) -> list[int]:
    """Control limits, B_max + 1 where there is none."""
    return [control_limit_of(solution.batch_size, _LARGEST) or _LARGEST + 1 for solution in solutions]


def figure_11() -> Section:
    """Actions of Cases 4-7."""
    text = f"""\
{_draw(broad_cases(), 11)}

Cells that break the control-limit structure are filled; of 20 solutions each,
{", ".join(map(str, broken_solutions()))} of Cases 4 to 7 have some. Case 4 is Case 1 with B_min = 5; Case 5 is Case 1
where an odd batch costs the energy of the next even size (padding), ours, for the paper prints no function; Case 6 is
Case 1 with the default l(b); Case 7 is all three together, its energy ours again. {agreement(claims_11())}"""
    return Section("Figure 11: where the control-limit structure breaks", text)


def broken_solutions() -> list[int]:
    """The number of solutions that break the control-limit structure, of 20 each of Cases 4 to 7."""
    return [sum(breaks(solution) for w2 in WEIGHTS for solution in solved(case, w2)) for case in broad_cases()]


def claims_11() -> list[Claim]:
    """Appendix E, on Cases 4-7 of figure 11."""
    fourth, fifth, sixth, _ = broad_cases()
    small = [solved(fourth, w2)[0].batch_size for w2 in WEIGHTS[:3]]
    curved = solve(at(variant(_LARGEST, CONSTANT_MS[0], log_energy), 0.1, 1.0)).batch_size
    partial = any(
        0 < action < min(length, _LARGEST)
        for w2 in WEIGHTS
        for solution in solved(sixth, w2)
        for length, action in enumerate(solution.batch_size)
    )
    counts = broken_solutions()
    return [
        Claim(
            "in Case 4 batches below 8 are launched at queues above 8 for ρ = 0.1 and w2 = 0, 0.5 and 1",
            all(any(0 < action < _LARGEST for action in actions[_LARGEST + 1 :]) for actions in small),
        ),
        Claim(
            "in Case 5 more than one threshold parts waiting from launching (so it does with the logarithmic energy of "
            f"figure 8: at ρ = 0.1 and w2 = 1 the actions are {' '.join(map(str, curved))})",
            any(_thresholds(s.batch_size) > 1 for w2 in WEIGHTS for s in solved(fifth, w2)) and _thresholds(curved) > 1,
        ),
        Claim("in Case 6 batches smaller than could be are launched", partial),
        Claim("in Case 7 more solutions break the structure than in the others", counts[3] > max(counts[:3])),
    ]


def _thresholds(actions: Sequence[int]) -> int:
    """Number of queue lengths at which waiting changes to launching."""
    return sum(before == 0 < after for before, after in pairwise(actions))


def _draw(cases: Sequence[Case], number: int) -> str:
    figure = new_figure(14.5, 2.15 * len(cases) + 0.5)
    grid = figure.subplots(len(cases), len(WEIGHTS), squeeze=False)
    for line, case in zip(grid, cases, strict=True):
        for axes, w2 in zip(line, WEIGHTS, strict=True):
            policy_chart(axes, chart_rows(solved(case, w2)), _LARGEST)
            axes.set_title(f"{case.name}; w2 = {w2:g}", fontsize=9)
            axes.set(xlabel="queue length" if case is cases[-1] else "", ylabel="load ρ" if w2 == 0.0 else "")
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=4, frameon=False)
    return f"{save_numbered(figure, number)}\n\n{_CASE_1}"


_CASE_1 = f"""\
The text of the paper has the service times of Cases 2 and 3, and not that of Case 1, which is also that of Cases 4 and
5: ours, {CONSTANT_MS[0]} ms, is a guess."""
