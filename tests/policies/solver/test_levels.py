"""Priority levels that share batches: against value iteration, one queue, a first calculation, and simulation."""

from collections.abc import Callable, Sequence
from itertools import product
from math import exp, factorial, inf

import numpy as np
import pytest

from policies.profile import Profile, load_profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import simulate
from policies.rules.by_level import SmdpLevels, solve_for_shares
from policies.solver.distributions import Ints
from policies.solver.levels import (
    LevelProblem,
    LevelSolution,
    evaluate_levels,
    greedy_by_level,
    solve_levels,
)
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import BatchKey, Request, SpecError

P4 = load_profile("googlenet-tesla-p4")
OF_8 = P4.truncated(8)
SMALL = Profile("small", (1.0, 1.3, 1.5, 1.9), energies=(2.0, 2.5, 3.0, 3.2))


def control_limits(limits: tuple[int, ...], max_batch_size: int) -> Callable[[Ints], Ints]:
    """Launch all waiting requests once a level has as many as its limit, or once a batch is full."""

    def batch_size(queues: Ints) -> Ints:
        total = queues.sum(axis=0)
        launches = np.any(queues >= np.array(limits)[:, np.newaxis], axis=0) | (total >= max_batch_size)
        return np.where(launches, np.minimum(total, max_batch_size), 0)

    return batch_size


def problem(
    load: float, share: float, weights: tuple[float, ...], profile: Profile = OF_8, w2: float = 0.0
) -> LevelProblem:
    rate = load * profile.capacity
    return LevelProblem(profile, (share * rate, (1.0 - share) * rate), weights, w2)


def by_value_iteration(given: LevelProblem, limit: int) -> float:
    """The least average cost of the truncated chain, by the discrete-time chain of Schweitzer's transformation.

    Written out for two levels, apart from the solver: states, actions and probabilities are enumerated.
    """
    states = list(product(range(limit + 1), repeat=2))
    rate, index = given.arrival_rate, {state: i for i, state in enumerate(states)}
    actions: list[tuple[float, int, np.ndarray, float]] = []
    for i, (first, second) in enumerate(states):
        waiting = given.weights[0] * first + given.weights[1] * second
        if first + second < given.profile.max_batch_size:
            row = np.zeros(len(states))
            for j, each in enumerate(given.arrival_rates):
                after = (min(first + (j == 0), limit), min(second + (j == 1), limit))
                row[index[after]] += each / rate
            actions.append((1e3 * waiting / rate / rate, i, row, 1.0 / rate))
        for size in range(1, min(first + second, given.profile.max_batch_size) + 1):
            left = first - min(first, size), second - (size - min(first, size))
            time = given.profile.service_time(size)
            row = np.zeros(len(states))
            for (a, p), (b, q) in product(
                *(arrivals(r * time, limit - n) for r, n in zip(given.arrival_rates, left, strict=True))
            ):
                row[index[left[0] + a, left[1] + b]] += p * q
            weighted = float(np.dot(given.weights, given.arrival_rates))
            cost = 1e3 * (waiting * time + weighted * time**2 / 2) / rate + given.w2 * given.costs[size - 1]
            actions.append((cost, i, row, time))
    costs, of, rows, times = (np.array(column) for column in zip(*actions, strict=True))
    step = 0.99 * times.min()
    values = np.zeros(len(states))
    while True:
        found = costs / times + (rows @ values - values[of]) / times
        least = np.full(len(states), inf)
        np.minimum.at(least, of, found)
        if least.max() - least.min() < 1e-11 * least.max():
            return float(least.mean())
        values = values + step * least
        values -= values[0]


def arrivals(mean: float, room: int) -> list[tuple[int, float]]:
    """Numbers of arrivals and probabilities; those beyond the room are lost."""
    masses = [exp(-mean) * mean**k / factorial(k) for k in range(room)]
    return [*enumerate(masses), (room, 1.0 - sum(masses))]


@pytest.mark.parametrize(
    ("load", "share", "weights", "w2"), [(0.5, 0.3, (8.0, 1.0), 0.0), (0.7, 0.1, (16.0, 1.0), 40.0)]
)
def test_the_average_cost_is_that_of_value_iteration(
    load: float, share: float, weights: tuple[float, ...], w2: float
) -> None:
    given = problem(load, share, weights, SMALL, w2)
    assert solve_levels(given, limit=12).average_cost == pytest.approx(by_value_iteration(given, 12), rel=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_levels_of_equal_weights_cost_as_much_as_one_queue(load: float) -> None:
    given = problem(load, 0.3, (1.0, 1.0), SMALL, 0.5)
    one = solve(Problem(SMALL, given.arrival_rate, w2=0.5))
    assert solve_levels(given, settled=1e-6).average_cost == pytest.approx(one.gain, rel=1e-5)


# A first calculation of the optimum, of greedy by level, and of control limits by level
@pytest.mark.parametrize(
    ("load", "share", "weight", "optimum", "greedy"),
    [
        (0.3, 0.1, 16.0, 5.151, 5.355),
        (0.6, 0.1, 4.0, 4.058, 4.062),
        (0.6, 0.1, 16.0, 7.336, 7.804),
        (0.6, 0.3, 16.0, 16.155, 17.159),
        (0.85, 0.3, 16.0, 23.418, 24.166),
    ],
)
def test_the_first_calculation_is_repeated(
    load: float, share: float, weight: float, optimum: float, greedy: float
) -> None:
    given = problem(load, share, (weight, 1.0))
    assert solve_levels(given).average_cost == pytest.approx(optimum, abs=2e-3)
    assert evaluate_levels(given, greedy_by_level(8)).average_cost == pytest.approx(greedy, abs=2e-3)
    limited = [evaluate_levels(given, control_limits(each, 8)).average_cost for each in product((1, 2, 3), repeat=2)]
    assert limited[0] == pytest.approx(greedy, abs=2e-3), "limits of 1 are greedy"
    assert optimum - 2e-3 < min(limited) < optimum * 1.07


def means_by_level(policy: SmdpLevels, given: LevelProblem, count: int) -> list[tuple[float, float]]:
    """Simulated mean response time of each level, s, and its standard error over 20 parts of the run."""
    rng = np.random.default_rng(7)
    instants = np.cumsum(rng.exponential(1.0 / given.arrival_rate, count))
    shares = np.cumsum(given.arrival_rates) / given.arrival_rate
    levels = np.searchsorted(shares, rng.random(count), side="right") + 1
    requests = [
        Request(i, at, BatchKey("m"), level=level)
        for i, (at, level) in enumerate(zip(instants.tolist(), levels.tolist(), strict=True))
    ]
    largest = given.profile.max_batch_size
    batcher = Batcher(policy, {"m": largest}, NoMonitor(), levels={"m": len(given.weights)})
    responses: Sequence[list[float]] = [[] for _ in given.weights]
    for service in simulate(batcher, requests, lambda launch: given.profile.service_time(len(launch.requests))):
        for request in service.finished:
            responses[request.level - 1].append(service.finish - request.arrival)
    found = []
    for each in responses:
        parts = [part.mean() for part in np.array_split(np.array(each), 20)]
        found.append((float(np.mean(each)), float(np.std(parts, ddof=1) / 20**0.5)))
    return found


def test_a_simulation_has_the_mean_response_times_of_the_levels() -> None:
    given = problem(0.7, 0.2, (8.0, 1.0), SMALL)
    solution = solve_levels(given)
    policy = SmdpLevels([given.arrival_rate], [solution], 4)
    for (mean, error), exact in zip(means_by_level(policy, given, 60_000), solution.mean_response_times, strict=True):
        assert abs(mean - exact) < 4 * error


def test_the_first_level_is_answered_earlier_the_more_it_weighs() -> None:
    by_weight = [solve_levels(problem(0.6, 0.3, (weight, 1.0))) for weight in (1.0, 4.0, 16.0)]
    first, second = zip(*(each.mean_response_times for each in by_weight), strict=True)
    assert list(first) == sorted(first, reverse=True)
    assert list(second) == sorted(second)


@pytest.mark.parametrize("shares", [(0.2, 0.3, 0.5), (0.1, 0.1, 0.8)])
def test_levels_after_the_first_may_count_as_one(shares: tuple[float, float, float]) -> None:
    """The pair's policy on the chain of three levels costs at most one per cent more than the optimum."""
    profile, weights = SMALL, (16.0, 4.0, 1.0)
    rate = 0.6 * profile.capacity
    given = LevelProblem(profile, tuple(share * rate for share in shares), weights)
    optimum = solve_levels(given, limit=16)
    merged = (shares[1] * weights[1] + shares[2] * weights[2]) / (shares[1] + shares[2])
    pair = solve_levels(LevelProblem(profile, (shares[0] * rate, (1.0 - shares[0]) * rate), (weights[0], merged)))

    def as_pair(queues: np.ndarray) -> np.ndarray:
        return np.array([pair.launch((int(n[0]), int(n[1] + n[2]))) for n in queues.T])

    found = evaluate_levels(given, as_pair, limit=16)
    assert optimum.average_cost <= found.average_cost * (1 + 1e-9)
    assert found.average_cost < 1.01 * optimum.average_cost


@pytest.mark.parametrize(
    ("rates", "weights", "message"),
    [
        ((1.0, 1.0), (1.0, 2.0), "priority weights 1, 2: give one of at least 0 for each level"),
        ((1.0, 1.0), (1.0,), "priority weights 1"),
        ((2.0, 2.0), (2.0, 1.0), "the arrival rate is 4/s, and the device serves 2.1"),
        ((0.0, 1.0), (2.0, 1.0), "a level has the arrival rate 0/s"),
    ],
)
def test_problems_that_cannot_be_solved_are_refused(
    rates: tuple[float, ...], weights: tuple[float, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        solve_levels(LevelProblem(SMALL, rates, weights))


def test_too_many_states_are_refused() -> None:
    given = LevelProblem(P4, (100.0,) * 4, (4.0, 3.0, 2.0, 1.0))
    with pytest.raises(SpecError, match="4 levels with batches of 32 have more than 150000 states"):
        solve_levels(given)


def test_a_solution_is_read_at_any_queues() -> None:
    solution: LevelSolution = solve_levels(problem(0.5, 0.2, (8.0, 1.0), SMALL))
    assert solution.launch((0, 0)) == 0
    assert solution.launch((10_000, 0)) == 4
    assert all(solution.launch((first, second)) <= first + second for first in range(5) for second in range(5))


def test_tables_for_measured_shares_cover_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.rules.by_level._LOADS", (0.2, 0.6))
    policy = solve_for_shares((0.3, 0.7), SMALL, (8.0, 1.0), 0.0)
    assert policy.rates == pytest.approx([0.2 * SMALL.capacity, 0.6 * SMALL.capacity])
    assert policy.max_batch_size == 4
    exact = solve_levels(problem(0.6, 0.3, (8.0, 1.0), SMALL))
    assert policy.tables[1].average_cost == pytest.approx(exact.average_cost, rel=2e-3)
