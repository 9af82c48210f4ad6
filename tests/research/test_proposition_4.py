"""Control limits: the closed form against the papers' grid and the solver, and policies without the structure."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.charts.action_chart import control_limit_of
from policies.profile import Profile
from policies.solver.distributions import Gamma
from policies.solver.model import Problem
from policies.solver.solver import evaluate, solve
from policies.types import SpecError
from research.papers.proposition_4 import SizeIndependent, optimal_control_limit

LARGEST = 8
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
FIXED, EACH = 19.603e-3, 19.899e-3  # J, the journal's section VII
JOULES = tuple(EACH * b + FIXED for b in range(1, LARGEST + 1))
CASE_2, CASE_3 = 2.4252e-3, 1.7465e-3  # s, the journal's section VII-A
# the limits at each load, by (service time, w2): the journal's figure 3, as exact-tail.md reads it
GRID = {
    (CASE_2, 0.0): (1, 3, 5, 8, 8),
    (CASE_2, 0.5): (2, 5, 8, 8, 8),
    (CASE_2, 1.0): (2, 6, 8, 8, 8),
    (CASE_2, 100.0): (8, 8, 8, 8, 8),
    (CASE_3, 0.0): (1, 3, 5, 8, 8),
    (CASE_3, 0.5): (2, 6, 8, 8, 8),
    (CASE_3, 1.0): (3, 8, 8, 8, 8),
    (CASE_3, 100.0): (8, 8, 8, 8, 8),
}
CELLS = [
    (time, w2, load, limit) for (time, w2), limits in GRID.items() for load, limit in zip(LOADS, limits, strict=True)
]


def constant(service_time: float, largest: int = LARGEST) -> Profile:
    return Profile(
        "constant", (service_time,) * largest, energies=tuple(EACH * b + FIXED for b in range(1, largest + 1))
    )


def control_limit(limit: int, largest: int = LARGEST) -> list[int]:
    return [0] * limit + list(range(limit, largest + 1))


@pytest.mark.parametrize(("service_time", "w2", "load", "limit"), CELLS)
def test_proposition_4_gives_the_limits_of_figure_3(service_time: float, w2: float, load: float, limit: int) -> None:
    case = SizeIndependent(load * LARGEST / service_time, service_time, LARGEST, FIXED, 1.0, w2)
    assert optimal_control_limit(case) == limit


@pytest.mark.parametrize(("service_time", "w2", "load", "limit"), CELLS)
def test_the_solver_finds_the_limits_of_figure_3(service_time: float, w2: float, load: float, limit: int) -> None:
    profile = constant(service_time)
    problem = Problem(profile, load * profile.capacity, 1.0, w2, service=Gamma((1.0,)))
    assert control_limit_of(solve(problem).batch_size, LARGEST) == limit


@settings(max_examples=30)
@given(load=st.floats(0.02, 0.95), largest=st.integers(1, 12), w2=st.floats(0.0, 10.0))
def test_no_other_limit_costs_less_than_that_of_proposition_4(load: float, largest: int, w2: float) -> None:
    profile = constant(CASE_2, largest)
    problem = Problem(profile, load * profile.capacity, 1.0, w2, service=Gamma((1.0,)))
    limit = optimal_control_limit(SizeIndependent(problem.arrival_rate, CASE_2, largest, FIXED, 1.0, w2))
    cost = evaluate(problem, control_limit(limit, largest)).gain
    for other in {max(limit - 1, 1), min(limit + 1, largest)}:
        # 1e-9: two limits tie at the border between them, and the solver settles to 1e-10
        assert cost <= evaluate(problem, control_limit(other, largest)).gain * (1.0 + 1e-9)


@given(
    load=st.floats(0.01, 0.99),
    largest=st.integers(1, 64),
    fixed=st.floats(0.0, 10.0),
    w1=st.floats(0.01, 100.0),
)
def test_without_w2_or_fixed_energy_the_limit_depends_on_chi_and_the_largest_batch(
    load: float, largest: int, fixed: float, w1: float
) -> None:
    # Corollary 1
    plain = SizeIndependent(load * largest, 1.0, largest)
    limit = optimal_control_limit(plain)
    # chi = lambda l must be the same to the last bit, or a limit at the border could change: powers of 2 keep it
    for scale in (2.0**-12, 2.0**9):
        scaled = replace(plain, arrival_rate=plain.arrival_rate / scale, service_time=scale, w1=w1)
        assert optimal_control_limit(replace(scaled, fixed_energy=fixed)) == limit
        assert optimal_control_limit(replace(scaled, w2=50.0)) == limit


@given(load=st.floats(1e-6, 0.999999), largest=st.integers(1, 256), w2=st.floats(0.0, 1e6))
def test_the_limit_lies_between_1_and_the_largest_batch_and_rises_with_w2(load: float, largest: int, w2: float) -> None:
    case = SizeIndependent(load * largest / CASE_3, CASE_3, largest, FIXED, 1.0, w2)
    limit = optimal_control_limit(case)
    assert 1 <= optimal_control_limit(replace(case, w2=0.0)) <= limit <= largest


@pytest.mark.parametrize(
    ("actions", "limit"),
    [
        ([0, 1, 2, 3, 4], 1),
        ([0, 0, 2, 3, 4], 2),
        ([0, 0, 0, 0, 4], 4),
        ([0, 0, 2, 3, 4, 4, 4], 2),
        ([0, 0, 0, 0, 0, 0, 4], 6),  # waits even with a full batch at hand, as (31) allows
        ([0, 0, 2], None),  # never launches more than two
        ([0, 0, 2, 2, 4], None),  # less than there is
        ([0, 1, 0, 3, 4], None),  # two limits
        ([0, 1, 2, 3, 4, 3, 4], None),  # less than the largest batch, later
        ([0, 0, 0], None),  # waits forever
        ([], None),
    ],
)
def test_control_limits_are_detected(actions: Sequence[int], limit: int | None) -> None:
    assert control_limit_of(actions, 4) == limit
    assert control_limit_of(tuple(actions), 4) == limit


@pytest.mark.parametrize("w2", [0.0, 0.5, 1.0])
def test_a_minimum_batch_size_breaks_the_structure(w2: float) -> None:
    # Case 4 of appendix E at load 0.1: states beyond B_max with actions below it, printed for exactly these weights
    profile = constant(CASE_2)
    batch_size = solve(Problem(profile, 0.1 * profile.capacity, 1.0, w2, min_batch_size=5)).batch_size
    assert control_limit_of(batch_size, LARGEST) is None
    assert any(0 < action < LARGEST for action in batch_size[LARGEST + 1 :])


def test_a_service_time_that_grows_with_the_batch_breaks_the_structure() -> None:
    # Case 6 of appendix E: batches smaller than what there is
    times = tuple(1.0524e-3 + 0.3051e-3 * b for b in range(1, LARGEST + 1))
    profile = Profile("affine", times, energies=JOULES)
    batch_size = solve(Problem(profile, 0.1 * profile.capacity)).batch_size
    assert control_limit_of(batch_size, LARGEST) is None
    assert any(0 < action < min(length, LARGEST) for length, action in enumerate(batch_size))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (SizeIndependent(1000.0, 0.008, 8), "load 1 is 1 or more.*capacity 1000.*lower the rate"),
        (SizeIndependent(2000.0, 0.008, 8), "load 2 is 1 or more"),
        (SizeIndependent(0.0, 0.008, 8), "arrival_rate 0 is not positive"),
        (SizeIndependent(1.0, inf, 8), "service_time inf"),
        (SizeIndependent(1.0, 0.008, 0), "maximum batch size 0 is below 1"),
        (SizeIndependent(1.0, 0.008, 8, w1=0.0), "w1 0 is not positive"),
        (SizeIndependent(1.0, 0.008, 8, w2=nan), "w2 nan"),
        (SizeIndependent(1.0, 0.008, 8, fixed_energy=-1.0), "fixed_energy -1 is negative"),
    ],
)
def test_invalid_cases_are_rejected_in_one_line(case: SizeIndependent, message: str) -> None:
    with pytest.raises(SpecError, match=message) as rejected:
        optimal_control_limit(case)
    assert "\n" not in str(rejected.value)
