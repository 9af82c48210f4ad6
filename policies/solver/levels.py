"""Priority levels that share batches: an SMDP whose state is the number of waiting requests of each level.

The model is that of the journal paper (arXiv 2501.02181, sections III and IV) with a vector as state, and with a weight
for the response time of each level; the paper has one level. Service times depend on the batch size alone. With weights
that do not ascend, a batch of b therefore takes the requests of the first levels first: to exchange two requests of
different levels changes no time of a batch, and the one with the greater weight is answered earlier. The action is b.

| symbol | meaning                                                                        |
|--------|--------------------------------------------------------------------------------|
| n_j    | requests of level j that wait at a decision epoch                              |
| b      | size of the launched batch; 0 waits for the next arrival                       |
| v_j    | weight of level j                                                              |
| h, g   | relative values and average cost per second, equation (17)                     |

The average cost is the sum over levels of v_j x share of the arrivals x mean response time in ms, plus w2 x W. Howard's
policy iteration, whose linear equations are solved by GMRES. The queue of a level is limited to N, above which arrivals
are lost; N grows until the average cost has settled. With b_max or more requests the device does not wait.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from policies.profile import Profile
from policies.solver.distributions import Floats, Ints
from policies.solver.semi_markov import (
    MAX_STATES,
    Chain,
    arrival_matrix,
    average_cost,
    inner_part,
    policy_iteration,
    solve_settled,
    take_better,
)
from policies.types import SpecError

_PRECISION = 1e-12  # of the averages
_SETTLED = 1e-4  # relative change of the average cost from one N to the next


@dataclass(frozen=True)
class LevelProblem:
    """The system and the objective.

    Attributes:
        profile: service times by batch size, and what a batch costs where it is known.
        arrival_rates: of each level, 1/s, the first level first; all above 0.
        weights: of the mean response time of each level, per ms; they do not ascend.
        w2: weight of the mean power, per W, or of another resource of the profile.
    """

    profile: Profile
    arrival_rates: tuple[float, ...]
    weights: tuple[float, ...]
    w2: float = 0.0

    @property
    def arrival_rate(self) -> float:
        """Of all levels, 1/s."""
        return sum(self.arrival_rates)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Of a batch of 1, 2, ..., J; 0 where the weight is 0, so that a profile need not have them."""
        return tuple(self.profile.costs) if self.w2 else (0.0,) * self.profile.max_batch_size


@dataclass(frozen=True)
class LevelSolution:
    """A policy and its averages in the model.

    Attributes:
        batch_size: of the launch by the queues, each up to the same length; longer ones count as that. The queues near
            N, at which lost arrivals matter, are left out.
        average_cost: the sum over levels of weight x share of the arrivals x mean response time, ms, plus w2 x W.
        mean_response_times: of each level, s.
        mean_power: W; 0 where w2 is 0.
        iterations: policies evaluated, over all N.
    """

    batch_size: Ints
    average_cost: float
    mean_response_times: tuple[float, ...]
    mean_power: float
    iterations: int

    def launch(self, waiting: tuple[int, ...]) -> int:
        """The number of requests to launch for these queues, the first level first; 0 waits."""
        largest = self.batch_size.shape[0] - 1
        size = int(self.batch_size[tuple(min(n, largest) for n in waiting)])
        return min(size, sum(waiting))


def solve_levels(problem: LevelProblem, *, settled: float = _SETTLED, limit: int | None = None) -> LevelSolution:
    """Find the policy of least average cost.

    Args:
        problem: the system.
        settled: relative change of the average cost from one N to the next at which it has settled.
        limit: N, fixed; None: it grows until the average cost has settled, or the states do not fit any more.

    Raises:
        SpecError: the weights ascend, the load is not between 0 and 1, or there are more states than fit.
    """
    _check(problem)
    if limit is not None:
        return _solve(_Model(problem, limit), None)
    return _settled(problem, settled, _solve)


def evaluate_levels(
    problem: LevelProblem,
    batch_size: Callable[[Ints], Ints],
    *,
    settled: float = _SETTLED,
    limit: int | None = None,
) -> LevelSolution:
    """Return the averages of a policy.

    Args:
        problem: the system.
        batch_size: returns the launched batch by the queues, (levels, states); 0 waits.
        settled: as in `solve_levels`.
        limit: as in `solve_levels`.

    Raises:
        SpecError: as in `solve_levels`.
    """
    _check(problem)

    def evaluate(model: "_Model", _: LevelSolution | None) -> LevelSolution:
        policy = np.asarray(batch_size(model.queues))
        return _averages(model, policy, 1)

    if limit is not None:
        return evaluate(_Model(problem, limit), None)
    return _settled(problem, settled, evaluate)


def greedy_by_level(max_batch_size: int) -> Callable[[Ints], Ints]:
    """Launch all waiting requests, at most `max_batch_size`, for `evaluate_levels`."""
    return lambda queues: np.minimum(queues.sum(axis=0), max_batch_size)


def _check(problem: LevelProblem) -> None:
    weights, rate, most = problem.weights, problem.arrival_rate, problem.profile.capacity
    if len(weights) != len(problem.arrival_rates) or list(weights) != sorted(weights, reverse=True) or weights[-1] < 0:
        text = ", ".join(f"{weight:g}" for weight in weights)
        raise SpecError(f"priority weights {text}: give one of at least 0 for each level, the greatest first")
    if min(problem.arrival_rates) <= 0.0:
        raise SpecError(f"a level has the arrival rate {min(problem.arrival_rates):g}/s; give each one above 0")
    if rate >= most:
        raise SpecError(f"the arrival rate is {rate:.6g}/s, and the device serves {most:.6g}/s; give a lower rate")


def _settled(
    problem: LevelProblem, settled: float, solve: Callable[["_Model", LevelSolution | None], LevelSolution]
) -> LevelSolution:
    """The solution with the N at which the average cost has settled, without the queues near it."""
    levels, largest = len(problem.weights), problem.profile.max_batch_size
    found = solve_settled(
        levels,
        largest,
        settled,
        lambda limit, before: solve(_Model(problem, limit), before),
        lambda solution: solution.average_cost,
    )
    if found is None:
        raise SpecError(
            f"{levels} levels with batches of {largest} have more than {MAX_STATES} states; give fewer levels or a "
            "smaller largest batch"
        )
    return replace(found, batch_size=inner_part(found.batch_size, levels))


@dataclass(frozen=True)
class _Model:
    """The SMDP for queues of at most N requests of each level; values are flat, by state."""

    problem: LevelProblem
    limit: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.limit + 1,) * len(self.problem.weights)

    @cached_property
    def queues(self) -> Ints:
        """(levels, states)."""
        return np.indices(self.shape).reshape(len(self.shape), -1)

    @cached_property
    def arrivals(self) -> list[list[Floats]]:
        """By level and batch size, from the queue before to the queue after a service, (N + 1, N + 1)."""
        times = self.problem.profile.service_times
        return [[arrival_matrix(rate * t, self.limit) for t in times] for rate in self.problem.arrival_rates]

    @cached_property
    def left(self) -> list[tuple[Ints, Ints]]:
        """By batch size: the states in which it is possible, and the queues that it leaves, (levels, those states)."""
        found, total = [], self.queues.sum(axis=0)
        for size in range(1, self.problem.profile.max_batch_size + 1):
            states = np.flatnonzero(total >= size)
            after, remaining = self.queues[:, states].copy(), np.full(len(states), size)
            for level in range(len(after)):
                taken = np.minimum(after[level], remaining)
                after[level] -= taken
                remaining -= taken
            found.append((states, after))
        return found

    def after_service(self, values: Floats, size: int, left: Ints) -> Floats:
        """Expected values when a batch of this size ends, for the queues that it left, (levels, any)."""
        expected = values.reshape(self.shape)
        places = []
        for level, queue in enumerate(left):
            used, place = np.unique(queue, return_inverse=True)
            matrix = self.arrivals[level][size - 1][used]
            expected = np.moveaxis(np.tensordot(matrix, expected, axes=(1, level)), 0, level)
            places.append(place)
        return np.asarray(expected[tuple(places)])

    def after_wait(self, values: Floats) -> Floats:
        """Expected values at the next arrival, by the queues before."""
        grid, total = values.reshape(self.shape), np.zeros(self.shape)
        following = np.minimum(np.arange(self.limit + 1) + 1, self.limit)
        for level, rate in enumerate(self.problem.arrival_rates):
            total += rate / self.problem.arrival_rate * np.take(grid, following, axis=level)
        return total.ravel()

    def cost(self, weights: tuple[float, ...], time: float, size: int = 0) -> Floats:
        """Cost until the next epoch, by state: of a batch of this size, which takes `time`, s; of a wait, of its mean.

        Requests in the system x time in ms / arrival rate, weighted by level, and w2 x J. After its arrival a request
        waits for half of a batch on average; a wait ends with the next arrival.
        """
        waiting = np.array(weights) @ self.queues
        arriving = float(np.dot(weights, self.problem.arrival_rates)) * time * time / 2.0 if size else 0.0
        cost = 1e3 * (waiting * time + arriving) / self.problem.arrival_rate
        return np.asarray(cost + (self.problem.w2 * self.problem.costs[size - 1] if size else 0.0))


def _solve(model: _Model, before: LevelSolution | None) -> LevelSolution:
    if before is None:
        policy = greedy_by_level(model.problem.profile.max_batch_size)(model.queues)
    else:
        largest = before.batch_size.shape[0] - 1
        policy = before.batch_size[tuple(np.minimum(model.queues, largest))]
    found = policy_iteration(policy, partial(_chain, model), partial(_improve, model))
    return _averages(model, found.policy, found.iterations + (0 if before is None else before.iterations))


def _averages(model: _Model, policy: Ints, iterations: int) -> LevelSolution:
    problem, chain, times = model.problem, _chain(model, policy), []
    for level, rate in enumerate(problem.arrival_rates):
        alone = tuple(float(each == level) for each in range(len(problem.weights)))
        _, found = average_cost(chain, _cost_of(model, policy, alone), precision=_PRECISION)
        times.append(found * problem.arrival_rate / rate / 1e3)
    power = average_cost(chain, chain.energy, precision=_PRECISION)[1] if chain.energy.any() else 0.0
    shares = [rate / problem.arrival_rate for rate in problem.arrival_rates]
    weighted = sum(v * share * 1e3 * t for v, share, t in zip(problem.weights, shares, times, strict=True))
    return LevelSolution(
        policy.reshape(model.shape), weighted + problem.w2 * power, tuple(times), float(power), iterations
    )


def _cost_of(model: _Model, policy: Ints, weights: tuple[float, ...]) -> Floats:
    """Cost until the next epoch without that of the power, by state."""
    profile, cost = model.problem.profile, model.cost(weights, 1.0 / model.problem.arrival_rate)
    for size in np.unique(policy[policy > 0]).tolist():
        states = policy == size
        time = profile.service_time(size)
        cost[states] = model.cost(weights, time, size)[states] - model.problem.w2 * model.problem.costs[size - 1]
    return cost


def _chain(model: _Model, policy: Ints) -> Chain:
    problem = model.problem
    sojourn, energy = np.full(len(policy), 1.0 / problem.arrival_rate), np.zeros(len(policy))
    cost = _cost_of(model, policy, problem.weights)
    groups = []
    for size in np.unique(policy[policy > 0]).tolist():
        possible, left = model.left[size - 1]
        chosen = policy[possible] == size
        states = possible[chosen]
        groups.append((size, states, left[:, chosen]))
        sojourn[states], energy[states] = problem.profile.service_time(size), problem.costs[size - 1]
    waits = np.flatnonzero(policy == 0)

    def expected(values: Floats) -> Floats:
        found = np.empty(len(values))
        for size, states, left in groups:
            found[states] = model.after_service(values, size, left)
        found[waits] = model.after_wait(values)[waits]
        return found

    return Chain(expected, sojourn, cost + problem.w2 * energy, energy)


def _improve(model: _Model, policy: Ints, values: Floats, gain: float) -> Ints:
    """The best action in each state; the present one is kept unless another is better."""
    problem, rate = model.problem, model.problem.arrival_rate
    largest = problem.profile.max_batch_size
    wait = model.cost(problem.weights, 1.0 / rate) - gain / rate + model.after_wait(values)
    best = np.where(model.queues.sum(axis=0) >= largest, np.inf, wait)
    action = np.zeros(len(policy), dtype=policy.dtype)
    everywhere = (slice(None),)
    for size in range(1, largest + 1):
        states, left = model.left[size - 1]
        time = problem.profile.service_time(size)
        total = np.full(len(policy), np.inf)
        ends = model.after_service(values, size, left)
        total[states] = model.cost(problem.weights, time, size)[states] - gain * time + ends
        take_better(best, action, everywhere, size, total, policy)
    action[0] = 0
    return action
