"""Optimality of the solved policy, against other policies, random tables and plain value iteration."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.profile import Profile, load_profile
from policies.solver.distributions import Floats, Hyperexponential, distribution
from policies.solver.model import Problem, build_model
from policies.solver.solver import _valued, evaluate, solve
from policies.solver.tail import ShortModel, close
from policies.types import SpecError
from tests.support.random_profiles import profiles

P4 = load_profile("googlenet-tesla-p4")
# The solver stops when the gain moves by less than 1e-10 and improves actions that gain more than 1e-12 of the largest
# bias; the bias is a hundred times the cost of a step at most here. 1e-8 covers both with room to spare.
TOLERANCE = 1e-8
# The largest state space leaves more than that where sizes tie to a part in a million at a load near 1: not drawn.
LOADS = st.floats(0.02, 0.9)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any profile, monotone or not, of up to six sizes, with any distribution of service times."""
    profile = draw(profiles())
    w2 = draw(st.sampled_from([0.0, 0.1, 1.0, 20.0, 500.0]))
    service = distribution(
        draw(st.sampled_from(["deterministic", "erlang2", "exponential", "hyperexponential"])), profile
    )
    return Problem(profile, draw(LOADS) * profile.capacity, 1.0, w2, service=service)


def benchmark_tables(largest: int) -> Iterator[list[int]]:
    """Every static and every control-limit policy, whatever its largest batch; greedy is the control limit 1."""
    for size in range(1, largest + 1):
        yield [0] * size + [size]
        for limit in range(1, size + 1):
            yield [0] * limit + list(range(limit, size + 1))


def keeps_up(problem: Problem, table: Sequence[int]) -> bool:
    return problem.arrival_rate < table[-1] / problem.profile.service_time(table[-1])


SLOW_SMALL_BATCHES = Profile("slow small batches", (0.0078125, 0.0078125, 1e-4, 1e-4, 1e-4), energies=(0, 0, 1, 0.5, 1))
ONE_FAST_BATCH = Profile("one fast batch", (1 / 512, 1 / 128, 1 / 128, 1e-4, 1 / 128), energies=(0.0625, 1, 1, 0, 1))
CHEAP_BATCHES_OF_3 = Profile("cheap batches of 3", (1e-4, 1e-4, 1e-4, 1e-4), energies=(0.0625, 1, 0, 0.5))
CHEAP_BATCHES_OF_1 = Profile(
    "cheap batches of 1", (0.01, 1e-4, 1 / 128, 0.01, 1e-4), energies=(0, 1 / 16, 1 / 16, 0.5, 1)
)


@settings(max_examples=40)
@given(problems())
@example(Problem(SLOW_SMALL_BATCHES, 12500.0, 1.0, 20.0))  # 98 requests arrive during a batch of two
@example(Problem(CHEAP_BATCHES_OF_1, 2500.0, 1.0, 20.0, service=Hyperexponential()))  # 25 arrive in one, sometimes more
# a policy on the way to the best keeps short queues short and long ones long
@example(Problem(ONE_FAST_BATCH, 20_000.0, 1.0, 1.0))
@example(Problem(CHEAP_BATCHES_OF_3, 2000.0, 1.0, 20.0))
def test_no_static_greedy_or_control_limit_policy_costs_less(problem: Problem) -> None:
    least = solve(problem).gain * (1.0 - TOLERANCE)
    for table in benchmark_tables(problem.profile.max_batch_size):
        if keeps_up(problem, table):
            assert least <= evaluate(problem, table).gain
        else:  # an unstable policy is rejected
            with pytest.raises(SpecError, match="cannot keep up"):
                evaluate(problem, table)


@pytest.mark.parametrize(
    ("times", "energies", "rate", "policy"),
    [
        ((2e-4, 2e-4, 1e-4, 1e-4), (0.06, 0.06, 0.0, 1.0), 1e-5, [0, 1, 0, 1, 1, 0, 0, 4]),
        ((2e-4, 1e-4, 1e-4, 2e-4, 1e-4, 2e-4), (0.5, 0.0, 0.06, 0.06, 0.0, 1.0), 1e-5, [0, 0, 2, 0, 4, 0, 0, 1, 5]),
        (
            (1e-4, 2e-4, 1e-4, 1e-4, 2e-4, 2e-4),
            (0.0, 0.5, 0.06, 1.0, 0.5, 0.0),
            1e-8,
            [0, 1, 0, 0, 0, 1, 0, 0, 1, 1, 4],
        ),
    ],
)
def test_a_policy_without_a_single_average_is_repaired_by_feasible_actions(
    times: tuple[float, ...], energies: tuple[float, ...], rate: float, policy: list[int]
) -> None:
    model = build_model(Problem(Profile("drawn", times, energies=energies), rate, 1.0, 20.0))
    short = ShortModel(close(model, policy[-1]), 16)
    # singular up to rounding: processors differ in whether LAPACK says so, and in the average that it returns else
    repaired, value = _valued(short, short.extend(np.array(policy)))
    assert np.all(repaired <= short.states)
    assert 0.0 < value.average[0] < policy[-1] / rate, "s, the time in which the tail's size arrives"


@settings(max_examples=40)
@given(problems(), st.data())
def test_no_table_drawn_at_random_costs_less(problem: Problem, data: st.DataObject) -> None:
    largest = problem.profile.max_batch_size
    solution = solve(problem)
    prefix = [data.draw(st.integers(0, min(s, largest))) for s in range(2 * largest)]
    table = [*prefix, solution.batch_size[-1]]
    assert solution.gain * (1.0 - TOLERANCE) <= evaluate(problem, table).gain


@settings(max_examples=40)
@given(problems())
def test_the_value_of_the_solved_table_is_the_solvers(problem: Problem) -> None:
    solution = solve(problem)
    value = evaluate(problem, solution.batch_size)
    assert value.gain == pytest.approx(solution.gain, rel=TOLERANCE)
    assert value.mean_response_time == pytest.approx(solution.mean_response_time, rel=TOLERANCE)
    assert value.mean_batch_size == pytest.approx(solution.mean_batch_size, rel=TOLERANCE)
    assert value.mean_power is not None
    assert value.gain == pytest.approx(1e3 * value.mean_response_time + problem.w2 * value.mean_power, rel=1e-12)


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("w2", [0.0, 1.0, 15.0])
def test_no_benchmark_policy_of_the_paper_costs_less(load: float, w2: float) -> None:
    problem = Problem(P4, load * P4.capacity, 1.0, w2)
    least = solve(problem).gain * (1.0 - TOLERANCE)
    limits = ([0] * q + list(range(q, 33)) for q in (1, 2, 4, 8, 16, 32))
    for table in (*limits, *([0] * b + [b] for b in (4, 8, 16))):
        if keeps_up(problem, table):
            assert least <= evaluate(problem, table).gain


def transitions(problem: Problem, action: int, length: int) -> Floats:
    """Equation (7) on queue lengths 0..length; arrivals to a full queue are lost."""
    matrix = np.zeros((length + 1, length + 1))
    if action == 0:
        for state in range(length + 1):
            matrix[state, min(state + 1, length)] = 1.0
        return matrix
    mean = problem.arrival_rate * problem.profile.service_time(action)
    for state in range(action, length + 1):
        probability = np.exp(-mean)
        for k in range(length - state + action):
            matrix[state, state - action + k] = probability
            probability *= mean / (k + 1)
        matrix[state, length] = 1.0 - matrix[state].sum()
    return matrix


def costs(problem: Problem, action: int, length: int) -> Floats:
    """Equation (11); infinite where the action launches more than waits, and for waiting at a full queue.

    Otherwise losing all arrivals would be optimal for the truncated queue. For the same reason the weight of power must
    be small here: a queue that is nearly always full loses arrivals and saves power.
    """
    states = np.arange(length + 1)
    if action == 0:
        return np.where(states == length, np.inf, 1e3 * problem.w1 * states / problem.arrival_rate**2)
    time, joules = problem.profile.service_time(action), problem.profile.energy(action)
    assert joules is not None
    held = states / problem.arrival_rate * time + time**2 / 2.0
    return np.where(states < action, np.inf, problem.w2 * joules + 1e3 * problem.w1 * held)


def gain_by_value_iteration(problem: Problem, length: int) -> float:
    """The paper's method: a truncated queue, equations (23) and (26), relative value iteration."""
    actions = range(problem.profile.max_batch_size + 1)
    matrix = np.array([transitions(problem, a, length) for a in actions])
    cost = np.array([costs(problem, a, length) for a in actions])
    sojourn = np.array([problem.profile.service_time(a) if a else 1.0 / problem.arrival_rate for a in actions])
    y, step, h = sojourn[:, None], 0.9 * sojourn.min(), np.zeros(length + 1)
    for _ in range(20_000):
        growth = (cost / y + step * (matrix @ h - h) / y).min(axis=0)
        if np.ptp(growth) < 1e-9 * growth[0]:
            return float(growth[0])
        h += growth - growth[0]
    raise AssertionError("value iteration did not converge")


@pytest.mark.parametrize(
    ("load", "w2"),
    [(0.1, 0.0), (0.3, 2.0), (0.6, 0.0), (0.6, 2.0), (0.6, 10.0), (0.75, 2.0)],
)
def test_value_iteration_on_a_long_queue_agrees(load: float, w2: float) -> None:
    # neither throughput nor service time is monotone
    profile = Profile("uneven", (1.0e-3, 1.3e-3, 1.9e-3, 1.8e-3), energies=(0.03, 0.05, 0.06, 0.09))
    problem = Problem(profile, load * profile.capacity, 1.0, w2)
    # 2e-9: the gain lies within the span of 1e-9 at which the iteration stops. The truncation adds nothing: at load
    # 0.75 the tail of the queue falls by a factor near 1 + 2 d / Var(N) = 1.7 a state, and 1.7^-100 is 1e-23
    assert solve(problem).gain == pytest.approx(gain_by_value_iteration(problem, 100), rel=2e-9)
