"""The SMDP over several bins against a value iteration written out, a simulation, and systems with known answers."""

from dataclasses import replace
from itertools import product
from math import exp, factorial, prod

import numpy as np
import pytest

from policies.profile import Profile
from policies.solver import several_bins
from policies.solver.model import Problem
from policies.solver.several_bins import BinnedProblem, BinnedSolution, capacity, solve_bins
from policies.solver.solver import solve
from policies.types import SpecError

SHORT, LONG = np.array([1.0]), np.array([3.0])
TINY = BinnedProblem((SHORT, LONG), (0.25, 0.15), 2)
UNIFORM = np.linspace(1.0, 20.0, 2001)
HALVES = (UNIFORM[:1000], UNIFORM[1000:])


def least_cost(problem: BinnedProblem, limit: int) -> float:
    """The least average cost by relative value iteration, after the transformation to equal times; for fixed times."""
    rates, rate, largest = problem.arrival_rates, sum(problem.arrival_rates), problem.max_batch_size
    states = list(product(range(limit + 1), repeat=len(rates)))

    def lengths(left: int, mean: float) -> dict[int, float]:
        """Probabilities of the length of one queue when a batch ends."""
        found = dict[int, float]()
        for k in range(40):
            length = min(limit, left + k)
            found[length] = found.get(length, 0.0) + exp(-mean) * mean**k / factorial(k)
        return found

    def next_states(left: tuple[int, ...], time: float) -> dict[tuple[int, ...], float]:
        laws = [lengths(n, r * time) for n, r in zip(left, rates, strict=True)]
        return {state: prod(law[n] for law, n in zip(laws, state, strict=True)) for state in product(*laws)}

    moves = dict[tuple[int, ...], list[tuple[float, float, float, dict[tuple[int, ...], float]]]]()
    for state in states:
        for taken in product(*(range(min(n, largest) + 1) for n in state)):
            used = [j for j, n in enumerate(taken) if n]
            if not 0 < sum(taken) <= largest or (len(used) > 1 and not problem.mixing):
                continue
            time = float(problem.sizes[used[-1]][0])
            energy = problem.powers[sum(taken) - 1] * time if problem.powers else 0.0
            held = sum(state) * time + rate * time**2 / 2.0
            left = tuple(n - a for n, a in zip(state, taken, strict=True))
            moves.setdefault(state, []).append((time, held, energy, next_states(left, time)))
        if max(state) < largest:
            following = {(*state[:j], state[j] + 1, *state[j + 1 :]): r / rate for j, r in enumerate(rates)}
            moves.setdefault(state, []).append((1.0 / rate, sum(state) / rate, 0.0, following))
    step = 0.9 * min(time for options in moves.values() for time, *_ in options)
    values = dict.fromkeys(states, 0.0)
    for _ in range(4000):
        better = {
            state: min(
                (1e3 * problem.w1 * held / rate + problem.w2 * energy) / time
                + step / time * sum(p * values[s] for s, p in after.items())
                + (1.0 - step / time) * values[state]
                for time, held, energy, after in options
            )
            for state, options in moves.items()
        }
        change = [better[s] - values[s] for s in states]
        values = {s: better[s] - better[states[0]] for s in states}
        if max(change) - min(change) < 1e-7 * abs(max(change)):
            return max(change)
    raise AssertionError("value iteration did not converge")


@pytest.mark.parametrize("mixing", [True, False])
@pytest.mark.parametrize(("powers", "w2"), [((), 0.0), ((2.0, 2.5), 400.0)])
def test_the_average_cost_is_that_of_value_iteration(mixing: bool, powers: tuple[float, ...], w2: float) -> None:
    problem = replace(TINY, mixing=mixing, powers=powers, w2=w2)
    assert solve_bins(problem, limit=5).gain == pytest.approx(least_cost(problem, 5), rel=1e-5)


def test_of_three_bins_the_average_cost_is_that_of_value_iteration() -> None:
    problem = BinnedProblem((SHORT, np.array([2.0]), LONG), (0.2, 0.1, 0.1), 2, powers=(2.0, 2.5), w2=200.0)
    assert solve_bins(problem, limit=3).gain == pytest.approx(least_cost(problem, 3), rel=1e-4)


def test_three_bins_take_less_time_than_two() -> None:
    thirds, problem = (UNIFORM[:667], UNIFORM[667:1334], UNIFORM[1334:]), BinnedProblem(HALVES, (0.08, 0.08), 4)
    two = solve_bins(problem, limit=12).mean_response_time
    three = solve_bins(replace(problem, sizes=thirds, arrival_rates=(0.16 / 3,) * 3), limit=12).mean_response_time
    assert three < 0.99 * two


def test_the_coarser_grid_of_three_bins_changes_the_average_cost_by_less_than_a_fifth_of_a_per_cent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = BinnedProblem((UNIFORM[:700], UNIFORM[700:1400], UNIFORM[1400:]), (0.05, 0.05, 0.05), 4)
    coarse = solve_bins(problem, limit=12).gain
    monkeypatch.setitem(several_bins._INSTANTS, 3, 60)
    assert solve_bins(problem, limit=12).gain == pytest.approx(coarse, rel=2e-3)


def test_equal_bins_are_one_bin() -> None:
    profile = Profile("constant", (2.0,) * 4)
    alone = solve(Problem(profile, 1.2)).mean_response_time
    bins = BinnedProblem((np.array([2.0]), np.array([2.0])), (0.4, 0.8), 4)
    assert solve_bins(bins).mean_response_time == pytest.approx(alone, rel=2e-4)


def test_a_lone_bin_with_random_sizes_has_more_than_the_time_of_its_mean() -> None:
    fixed = solve_bins(BinnedProblem((np.array([2.0]),), (0.8,), 4)).mean_response_time
    drawn = solve_bins(BinnedProblem((np.array([1.0, 3.0]),), (0.8,), 4)).mean_response_time
    assert drawn > 1.1 * fixed


def simulated(problem: BinnedProblem, solution: BinnedSolution, requests: int, seed: int) -> float:
    """Mean response time of a simulation with sizes drawn from the problem's, s."""
    rng = np.random.default_rng(seed)
    rates = np.array(problem.arrival_rates)
    at = np.cumsum(rng.exponential(1.0 / rates.sum(), requests))
    of = rng.choice(problem.bins, requests, p=rates / rates.sum())
    sizes = np.choose(of, [rng.choice(drawn, requests) for drawn in problem.sizes])
    queues: list[list[int]] = [[] for _ in problem.sizes]
    responses, clock, following = [], 0.0, 0
    while True:
        while following < requests and at[following] <= clock:
            queues[of[following]].append(following)
            following += 1
        launch = solution.launch([len(queue) for queue in queues])
        if not any(launch):
            if following == requests:
                break  # the last ones would wait for ever
            clock = at[following]
            continue
        batch = [queue.pop(0) for queue, n in zip(queues, launch, strict=True) for _ in range(n)]
        clock += problem.batch_time(len(batch), np.array([max(sizes[batch])]))[0]
        responses += [clock - at[i] for i in batch]
    return float(np.mean(responses))


def test_the_mean_response_time_is_that_of_a_simulation() -> None:
    problem = BinnedProblem(HALVES, (0.15, 0.15), 8)
    solution = solve_bins(problem)
    means = [simulated(problem, solution, 20_000, seed) for seed in range(4)]
    error = float(np.std(means, ddof=1)) / 2.0
    assert abs(np.mean(means) - solution.mean_response_time) < 4.0 * error + 0.003 * solution.mean_response_time


def test_mixing_gains_and_short_requests_fill_batches_of_long_ones() -> None:
    problem = BinnedProblem(HALVES, (0.2, 0.2), 8)
    mixed, apart = solve_bins(problem), solve_bins(replace(problem, mixing=False))
    assert mixed.mean_response_time < 0.97 * apart.mean_response_time
    assert all(not all(launch) for launch in apart.batch.reshape(-1, 2).tolist())
    short, long = mixed.batch[4, 4]
    assert long == 0 or short + long == 8, "what a long batch has room for costs no time"


def test_power_is_saved_by_larger_batches() -> None:
    powers = tuple(1.0 + 0.1 * b for b in range(1, 9))
    fast = solve_bins(BinnedProblem(HALVES, (0.15, 0.15), 8, powers=powers, w2=1e-9))
    frugal = solve_bins(BinnedProblem(HALVES, (0.15, 0.15), 8, powers=powers, w2=3e4))
    assert frugal.mean_power < 0.95 * fast.mean_power
    assert frugal.mean_response_time > fast.mean_response_time


def test_queues_longer_than_the_table_launch_as_its_last_entry() -> None:
    solution = solve_bins(TINY, limit=5)
    assert solution.launch([100, 0]) == solution.launch([5, 0]) == (2, 0)


def test_too_high_a_rate_is_refused_with_the_rate_that_can_be_served() -> None:
    assert capacity(TINY) == pytest.approx(2.0 / (0.625 * 1.0 + 0.375 * 3.0))
    with pytest.raises(SpecError, match=r"full batches of each bin serve 1\.14286/s; give a lower rate"):
        solve_bins(replace(TINY, arrival_rates=(0.75, 0.45)))


def test_more_states_than_fit_are_refused() -> None:
    with pytest.raises(SpecError, match="give fewer bins or a smaller largest batch"):
        solve_bins(BinnedProblem((SHORT, LONG, LONG + 1.0), (0.1,) * 3, 32))
    with pytest.raises(SpecError, match="4 bins cannot be decided together; give at most 3"):
        solve_bins(BinnedProblem((SHORT, LONG, LONG + 1.0, LONG + 2.0), (0.1,) * 4, 2))


def test_a_burst_of_long_requests_is_served_although_its_queue_is_longer_than_the_table() -> None:
    solution = solve_bins(BinnedProblem(HALVES, (0.22, 0.22), 8))
    length = len(solution.batch)
    for short in range(length + 5):
        assert sum(solution.launch([short, 5 * length])) == 8
    queues = [0, 5 * length]
    rng = np.random.default_rng(0)
    for _ in range(60 * length):
        launched = solution.launch(queues)
        queues = [
            n - a + int(rng.poisson(0.22 * (19.0 if launched[1] else 9.5)))
            for n, a in zip(queues, launched, strict=True)
        ]
    assert max(queues) < 2 * length
