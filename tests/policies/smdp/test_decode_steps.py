"""The SMDP of continuous batching against a value iteration written out, and systems with known answers."""

from dataclasses import replace
from itertools import product
from math import comb, exp, factorial

import numpy as np
import pytest

from policies.profile import Profile
from policies.smdp.decode_steps import DecodeProblem, solve_decode_steps
from policies.smdp.model import Problem
from policies.smdp.solver import solve
from policies.types import SpecError


def step(size: int, joined: int) -> float:
    return 1.0 + 0.1 * size + 0.25 * joined


_State = tuple[int, int]
TINY = DecodeProblem(step, 4.0, 0.15, 2, (3.0, 4.0))


def least_cost(problem: DecodeProblem, limit: int) -> float:
    """The least average cost by relative value iteration, after the transformation to equal times."""
    rate, largest, goes_on = problem.arrival_rate, problem.max_batch_size, 1.0 - 1.0 / problem.mean_steps
    moves = dict[_State, list[tuple[float, float, dict[_State, float]]]]()
    states = [(a, n) for a in range(largest + 1) for n in range(limit + 1)]
    for a, n in states:
        options = moves.setdefault((a, n), [])
        if a == 0 and n < largest:
            options.append((1.0 / rate, 1e3 * n / rate / rate, {(0, n + 1): 1.0}))
        for joined in range(min(n, largest - a) + 1):
            size = a + joined
            if not size:
                continue
            time = problem.step_time(size, joined)
            cost = 1e3 * ((a + n) * time + rate * time**2 / 2.0) / rate + problem.w2 * problem.powers[size - 1] * time
            after = dict[_State, float]()
            for stay, more in product(range(size + 1), range(40)):
                state = stay, min(limit, n - joined + more)
                p = comb(size, stay) * goes_on**stay * (1.0 - goes_on) ** (size - stay)
                p *= exp(-rate * time) * (rate * time) ** more / factorial(more)
                after[state] = after.get(state, 0.0) + p
            options.append((time, cost, after))
    least = 0.9 * min(time for options in moves.values() for time, *_ in options)
    values = dict.fromkeys(states, 0.0)
    for _ in range(20_000):
        better = {
            state: min(
                cost / time
                + least / time * sum(p * values[s] for s, p in after.items())
                + (1.0 - least / time) * values[state]
                for time, cost, after in options
            )
            for state, options in moves.items()
        }
        change = [better[s] - values[s] for s in states]
        values = {s: better[s] - better[0, 0] for s in states}
        if max(change) - min(change) < 1e-6 * abs(max(change)):
            return max(change)
    raise AssertionError("value iteration did not converge")


@pytest.mark.parametrize("w2", [0.0, 3000.0])
def test_the_average_cost_is_that_of_value_iteration(w2: float) -> None:
    problem = replace(TINY, w2=w2)
    # a step time is divided between two instants of the grid, whose arrivals vary a little more
    assert solve_decode_steps(problem, limit=6).gain == pytest.approx(least_cost(problem, 6), rel=2e-4)


def test_requests_of_one_step_are_batches_of_the_journal_paper() -> None:
    profile = Profile("steps", (1.0, 1.2, 1.4), energies=(3.0, 3.6, 4.2))
    alone = solve(Problem(profile, 1.3, w2=500.0))
    problem = DecodeProblem(lambda size, _: profile.service_time(size), 1.0, 1.3, 3, (3.0,) * 3, 1.0, 500.0)
    found = solve_decode_steps(problem)
    assert found.gain == pytest.approx(alone.gain, rel=1e-3)
    assert found.mean_response_time == pytest.approx(alone.mean_response_time, rel=1e-3)


def test_without_a_weight_of_power_an_idle_device_does_not_wait() -> None:
    found = solve_decode_steps(replace(TINY, arrival_rate=0.05))
    assert all(found.joining(0, n) for n in range(1, 10))


def test_power_is_saved_by_waiting_at_an_idle_device() -> None:
    fast = solve_decode_steps(TINY)
    frugal = solve_decode_steps(replace(TINY, w2=100_000.0))
    assert frugal.joining(0, 1) == 0
    assert frugal.mean_power < 0.97 * fast.mean_power
    assert frugal.mean_response_time > fast.mean_response_time


def test_queues_longer_than_the_table_join_as_its_last_entry() -> None:
    found = solve_decode_steps(TINY, limit=6)
    assert found.joining(1, 100) == found.joining(1, 6) <= 1


def test_the_capacity_is_that_of_full_batches_and_higher_rates_are_refused() -> None:
    assert TINY.capacity == pytest.approx(0.5 / (0.5 * step(2, 0) + 0.5 * step(2, 1)))
    with pytest.raises(SpecError, match="give a lower rate"):
        solve_decode_steps(replace(TINY, arrival_rate=1.01 * TINY.capacity))


def test_powers_that_are_not_known_cost_nothing() -> None:
    found = solve_decode_steps(replace(TINY, powers=()), limit=10)
    assert found.mean_power == 0.0
    assert np.array_equal(found.joins, solve_decode_steps(TINY, limit=10).joins)
