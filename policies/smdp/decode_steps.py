"""Continuous batching as an SMDP: how many waiting requests join the batch before each decode step.

Neither the multi-bin paper nor the SMDP papers treat it; the model is that of the journal paper (arXiv 2501.02181,
sections III and IV) with two numbers as state. A decision epoch is the end of a decode step, or an arrival at an idle
device.

| symbol | meaning                                                                                      |
|--------|----------------------------------------------------------------------------------------------|
| a, n   | requests in the batch, and waiting ones, at a decision epoch                                  |
| j      | requests that join; with a = j = 0 the device stays idle until the next arrival               |
| t      | time of the step: one decode step of a + j requests, and the prefill of j, s                  |
| q      | probability that a request has ended after a step: 1 / mean number of steps (geometric)       |

Howard's policy iteration (equation (17)) with at most N waiting requests, above which arrivals are lost; N grows until
the average cost has settled. The probabilities of arrivals are computed on a grid of times; each step time is divided
between its two neighbours so that its mean is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import numpy as np
import scipy

from policies.smdp.distributions import Floats, Ints
from policies.smdp.semi_markov import Chain, arrival_matrix, on_grid, policy_iteration, take_better
from policies.types import SpecError

StepTime = Callable[[int, int], float]  # of the requests in a step, and those of them that joined before it; s

_INSTANTS = 24  # of the grid
_SETTLED = 1e-4  # relative change of the average cost from one N to the next
_MAX_WAITING = 1000
_GROWTH = 1.5  # of N


@dataclass(frozen=True)
class DecodeProblem:
    """The system and the objective.

    Attributes:
        step_time: time of a decode step, s.
        mean_steps: mean number of decode steps of a request, at least 1.
        arrival_rate: 1/s.
        max_batch_size: B.
        powers: of the device in a step of 1, 2, ... requests, W; empty: not known.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
    """

    step_time: StepTime
    mean_steps: float
    arrival_rate: float
    max_batch_size: int
    powers: tuple[float, ...] = ()
    w1: float = 1.0
    w2: float = 0.0

    @property
    def capacity(self) -> float:
        """Requests per second with a full batch, in which each request that ends is replaced by one that joins."""
        largest = self.max_batch_size
        ending = largest / self.mean_steps
        low, share = int(ending), ending % 1.0
        time = (1.0 - share) * self.step_time(largest, low) + share * self.step_time(largest, min(low + 1, largest))
        return ending / time


@dataclass(frozen=True)
class DecodeSolution:
    """A policy and its averages in the model.

    Attributes:
        joins: requests that join, by requests in the batch, up to B, and waiting ones; longer queues count as the last.
            The queues near N, at which lost arrivals matter, are left out.
        gain: average cost, w1 x mean response time in ms + w2 x mean power in W.
        mean_response_time: s.
        mean_power: W; 0 where the powers are not known.
    """

    joins: Ints
    gain: float
    mean_response_time: float
    mean_power: float

    def joining(self, active: int, waiting: int) -> int:
        """Return how many requests join."""
        return int(self.joins[active, min(waiting, self.joins.shape[1] - 1)])


@dataclass(frozen=True)
class _Model:
    """The SMDP for at most N waiting requests; relative values are arrays of shape (B + 1, N + 1)."""

    problem: DecodeProblem
    limit: int

    @cached_property
    def times(self) -> Floats:
        """Step times by requests in the step, and those of them that joined; 0 where there are none."""
        largest = self.problem.max_batch_size
        times = np.zeros((largest + 1, largest + 1))
        for size in range(1, largest + 1):
            times[size, : size + 1] = [self.problem.step_time(size, joined) for joined in range(size + 1)]
        return times

    @cached_property
    def grid(self) -> Floats:
        used = self.times[self.times > 0.0]
        return np.linspace(used.min(), used.max(), _INSTANTS) if np.ptp(used) else used[:1]

    @cached_property
    def arrivals(self) -> Floats:
        """By instant: from the waiting requests before to those after, (instants, N + 1, N + 1)."""
        return np.stack([arrival_matrix(self.problem.arrival_rate * t, self.limit) for t in self.grid])

    @cached_property
    def staying(self) -> Floats:
        """Probabilities that so many requests of a step go on: (B + 1 in the step, B + 1 after it)."""
        sizes = np.arange(self.problem.max_batch_size + 1)
        return np.asarray(scipy.stats.binom.pmf(sizes[None, :], sizes[:, None], 1.0 - 1.0 / self.problem.mean_steps))

    @cached_property
    def powers(self) -> Floats:
        """W, by requests in the step; 0 where not known."""
        largest = self.problem.max_batch_size
        return np.array([0.0, *(self.problem.powers or (0.0,) * largest)[:largest]])

    def after_step(self, values: Floats) -> Floats:
        """Expected values after a step: (instants, B + 1 in the step, N + 1 waiting during it)."""
        return np.asarray(self.staying @ (values @ self.arrivals.transpose(0, 2, 1)))

    def cost(self, present: Floats, time: Floats | float, power: Floats | float, arriving: float) -> Floats:
        """Cost until the next epoch; `arriving` is 0 for a wait, which ends with the arrival."""
        problem, rate = self.problem, self.problem.arrival_rate
        held = present * time + arriving * rate * np.square(time) / 2.0
        return np.asarray(1e3 * problem.w1 * held / rate + problem.w2 * power * time)


def solve_decode_steps(
    problem: DecodeProblem, *, settled: float = _SETTLED, limit: int | None = None
) -> DecodeSolution:
    """Find the policy of least average cost.

    Args:
        problem: the system.
        settled: relative change of the average cost from one N to the next at which it has settled.
        limit: N, fixed; None: it grows until the average cost has settled, or to `_MAX_WAITING`.

    Raises:
        SpecError: the arrival rate is not below the capacity, or a decode step takes no time.
    """
    if min(problem.step_time(size, 0) for size in range(1, problem.max_batch_size + 1)) <= 0.0:
        raise SpecError("a decode step of the profile takes no time: its service times do not grow with the length")
    if not 0.0 < problem.arrival_rate < problem.capacity:
        raise SpecError(
            f"the arrival rate is {problem.arrival_rate:.6g}/s, and full batches serve {problem.capacity:.6g}/s; "
            "give a lower rate"
        )
    if limit is not None:
        return _policy_iteration(_Model(problem, limit), None)
    size = max(2 * problem.max_batch_size, 16)
    found = _policy_iteration(_Model(problem, size), None)
    while (size := ceil(_GROWTH * size)) <= _MAX_WAITING:
        before, found = found, _policy_iteration(_Model(problem, size), found)
        if abs(found.gain - before.gain) <= settled * abs(found.gain):
            break
    return replace(found, joins=found.joins[:, : ceil(found.joins.shape[1] / _GROWTH)])


def _policy_iteration(model: _Model, before: DecodeSolution | None) -> DecodeSolution:
    largest = model.problem.max_batch_size
    active, waiting = np.indices((largest + 1, model.limit + 1))
    joins = np.minimum(waiting, largest - active)
    if before is not None:
        joins = before.joins[active, np.minimum(waiting, before.joins.shape[1] - 1)]
    optimum = policy_iteration(joins, partial(_chain, model), partial(_improve, model))
    problem, power = model.problem, optimum.mean_power
    response = (optimum.gain - problem.w2 * power) / (1e3 * problem.w1) if problem.w1 else 0.0
    return DecodeSolution(optimum.policy, optimum.gain, response, power)


def _chain(model: _Model, joins: Ints) -> Chain:
    rate = model.problem.arrival_rate
    active, waiting = np.indices(joins.shape)
    size, left = (active + joins).ravel(), (waiting - joins).ravel()
    present, idle = (active + waiting).ravel().astype(float), size == 0
    time = model.times[size, joins.ravel()]
    power = model.powers[size]
    cost = np.where(idle, model.cost(present, 1.0 / rate, 0.0, 0.0), model.cost(present, time, power, 1.0))
    weights = on_grid(model.grid, np.where(idle, model.grid[0], time))
    following = np.minimum(left + 1, model.limit)

    def expected(values: Floats) -> Floats:
        ends = model.after_step(values.reshape(joins.shape))[:, size, left]
        after = np.einsum("si,is->s", weights, ends)
        return np.asarray(np.where(idle, values.reshape(joins.shape)[0, following], after))

    return Chain(expected, np.where(idle, 1.0 / rate, time), cost, power * time)


def _improve(model: _Model, joins: Ints, values: Floats, gain: float) -> Ints:
    """The best action in each state; the present one is kept unless another is better."""
    largest, rate = model.problem.max_batch_size, model.problem.arrival_rate
    ends = model.after_step(values)
    indices = np.indices(joins.shape)
    active, waiting = indices[0], indices[1]
    present = (active + waiting).astype(float)
    best, found = np.full(joins.shape, np.inf), np.zeros_like(joins)
    for joined in range(largest + 1):
        a, n = active[: largest + 1 - joined, joined:], waiting[: largest + 1 - joined, joined:]
        size, left = a + joined, n - joined
        time = model.times[size, joined]
        weights = on_grid(model.grid, np.maximum(time, model.grid[0]).ravel()).reshape(*time.shape, -1)
        after = np.einsum("ani,ian->an", weights, ends[:, size, left])
        total = model.cost(present[a, n], time, model.powers[size], 1.0) - gain * time + after
        if joined == 0:  # an idle device waits for an arrival, but not beyond a full batch
            alone = n[0]
            idle = model.cost(alone.astype(float), 1.0 / rate, 0.0, 0.0) - gain / rate
            idle = idle + values[0, np.minimum(alone + 1, model.limit)]
            total[0] = np.where(alone >= largest, np.inf, idle)
        region = slice(0, largest + 1 - joined), slice(joined, None)
        take_better(best, found, region, joined, total, joins)
    return found
