"""Bins decided together: an SMDP whose state is the number of waiting requests in each bin.

Multi-bin batching (Guldogan, Kunde, Lee and Pedarsani, section 3) forms the batches of each bin alone. Here one policy
sees all bins, and a batch may mix them: it takes as long as its longest request. The model is that of the journal paper
(arXiv 2501.02181, sections III and IV) with a vector as state; neither paper treats it.

| symbol       | meaning                                                                                    |
|--------------|--------------------------------------------------------------------------------------------|
| n_j          | requests that wait in bin j at a decision epoch; bin 0 has the shortest                      |
| a_j          | requests of bin j in the launched batch; all 0 waits for the next arrival                    |
| G(b, j, c)   | service time of b requests, the longest of which is the longest of c drawn from bin j, s     |
| h, g         | relative values and average cost per second, equation (17)                                  |

Howard's policy iteration, whose linear equations are solved by GMRES. The number of requests in a bin is limited to N,
above which arrivals are lost; N grows until the average cost has settled. The distribution of a
service time is put on a grid of instants, so that the arrivals of all batches are computed together: the products of
the relative values with one Poisson matrix for each bin and instant. For uniform sizes the coarser grid of three bins
changes the average cost by less than 0.2 per cent (tests/policies/solver/test_several_bins.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from policies.solver.distributions import Floats, Ints
from policies.solver.semi_markov import (
    MAX_STATES,
    Chain,
    arrival_matrix,
    inner_part,
    on_grid,
    policy_iteration,
    solve_settled,
    take_better,
)
from policies.types import SpecError

BatchTime = Callable[[int, Floats], Floats]  # of a batch size and the size of its longest request, s; returns s

_SETTLED = 1e-4  # relative change of the average cost from one N to the next
_ATOMS = 48  # of the sizes in a bin
_INSTANTS = {1: 40, 2: 40, 3: 16}  # of the grid of service times, by the number of bins


@dataclass(frozen=True)
class BinnedProblem:
    """The system and the objective.

    Attributes:
        sizes: for each bin, ascending, sizes of its requests, s: a sample of the distribution.
        arrival_rates: of each bin, 1/s.
        max_batch_size: B.
        batch_time: service time by batch size and largest size, s.
        powers: of the device while it serves a batch of 1, 2, ..., W; empty: not known.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
        mixing: whether a batch may have requests of several bins.
    """

    sizes: tuple[Floats, ...]
    arrival_rates: tuple[float, ...]
    max_batch_size: int
    batch_time: BatchTime = lambda _, size: size
    powers: tuple[float, ...] = ()
    w1: float = 1.0
    w2: float = 0.0
    mixing: bool = True

    @property
    def bins(self) -> int:
        """The number of bins."""
        return len(self.sizes)


@dataclass(frozen=True)
class BinnedSolution:
    """A policy and its averages in the model.

    Attributes:
        batch: requests of each bin to launch, by the queues, each up to the same length; longer ones count as that. The
            queues near N, at which lost arrivals matter, are left out.
        gain: average cost, w1 x mean response time in ms + w2 x mean power in W.
        mean_response_time: s.
        mean_power: W; 0 where the powers are not known.
        iterations: policies evaluated, over all N.
    """

    batch: Ints
    gain: float
    mean_response_time: float
    mean_power: float
    iterations: int

    def launch(self, waiting: Sequence[int]) -> tuple[int, ...]:
        """Return the requests of each bin to launch for these queues; all 0 waits."""
        largest = self.batch.shape[0] - 1
        return tuple(int(each) for each in self.batch[tuple(min(n, largest) for n in waiting)])


@dataclass(frozen=True)
class _Batch:
    """A kind of batch: moments and distribution of its service time, and its energy, J."""

    mean: float
    second_moment: float
    weights: Floats  # on the grid of instants
    energy: float


@dataclass(frozen=True)
class _Model:
    """The SMDP for queues of at most N requests in each bin; relative values are arrays of shape (N + 1,) * bins."""

    problem: BinnedProblem
    limit: int
    batches: dict[tuple[int, int, int], _Batch]  # by b, j and c
    arrivals: list[Floats]  # of each bin, (instants, N + 1, N + 1): from the queue before to the queue after

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.limit + 1,) * self.problem.bins

    @cached_property
    def waiting(self) -> Ints:
        """All requests that wait, by state."""
        return np.asarray(np.indices(self.shape).sum(axis=0))

    @cached_property
    def actions(self) -> list[tuple[tuple[int, ...], _Batch]]:
        """Requests of each bin in a batch, and its kind."""
        found = []
        largest, bins = self.problem.max_batch_size, self.problem.bins
        for launched in product(range(largest + 1), repeat=bins):
            used = [j for j, n in enumerate(launched) if n]
            if not used or sum(launched) > largest or (len(used) > 1 and not self.problem.mixing):
                continue
            found.append((launched, self.batches[sum(launched), used[-1], launched[used[-1]]]))
        return found

    def after_service(self, values: Floats) -> Floats:
        """Expected values when a batch ends, by instant of the grid and by the queues at its launch."""
        expected = np.broadcast_to(values, (self.arrivals[0].shape[0], *self.shape))
        for axis, matrices in enumerate(self.arrivals):
            moved = np.moveaxis(expected, axis + 1, -1)
            flat = moved.reshape(moved.shape[0], -1, moved.shape[-1])
            expected = np.moveaxis((flat @ matrices.transpose(0, 2, 1)).reshape(moved.shape), -1, axis + 1)
        return expected

    def after_wait(self, values: Floats) -> Floats:
        """Expected values at the next arrival, by the queues before."""
        rates = np.array(self.problem.arrival_rates)
        total = np.zeros(self.shape)
        for axis, rate in enumerate(rates / rates.sum()):
            following = np.minimum(np.arange(self.limit + 1) + 1, self.limit)
            total += rate * np.take(values, following, axis=axis)
        return total

    def cost(self, waiting: Floats, mean: float, second_moment: float, energy: float) -> Floats:
        """Cost until the next epoch: w1 x requests in the system x time in ms / arrival rate + w2 x J."""
        problem, rate = self.problem, sum(self.problem.arrival_rates)
        time = waiting * mean + rate * second_moment / 2.0
        return np.asarray(1e3 * problem.w1 * time / rate + problem.w2 * energy)


def solve_bins(problem: BinnedProblem, *, settled: float = _SETTLED, limit: int | None = None) -> BinnedSolution:
    """Find the policy of least average cost.

    Args:
        problem: the system.
        settled: relative change of the average cost from one N to the next at which it has settled.
        limit: N, fixed; None: it grows until the average cost has settled, or the states do not fit any more.

    Raises:
        SpecError: there are more than three bins, the load is not below 1, or the bins have more states than fit.
    """
    _check(problem)
    if limit is not None:
        return _policy_iteration(_model(problem, limit), None)

    def solve(limit: int, before: BinnedSolution | None) -> BinnedSolution:
        return _policy_iteration(_model(problem, limit), before)

    found = solve_settled(problem.bins, problem.max_batch_size, settled, solve, lambda solution: solution.gain)
    if found is None:
        raise SpecError(
            f"{problem.bins} bins with batches of {problem.max_batch_size} have more than {MAX_STATES} states; "
            "give fewer bins or a smaller largest batch"
        )
    return replace(found, batch=inner_part(found.batch, problem.bins))


def capacity(problem: BinnedProblem) -> float:
    """Requests per second that batches of B from one bin each can serve, with the bins' shares of the arrivals."""
    rates = np.array(problem.arrival_rates)
    largest = problem.max_batch_size
    times = [_largest_of(sizes, largest, largest, problem.batch_time)[0] for sizes in problem.sizes]
    return largest / float(np.dot(rates / rates.sum(), times))


def _check(problem: BinnedProblem) -> None:
    if problem.bins not in _INSTANTS:
        raise SpecError(f"{problem.bins} bins cannot be decided together; give at most {max(_INSTANTS)}")
    rate, most = sum(problem.arrival_rates), capacity(problem)
    if not 0.0 < rate < most:
        raise SpecError(
            f"the arrival rate is {rate:.6g}/s, and full batches of each bin serve {most:.6g}/s; give a lower rate"
        )


def _largest_of(
    sizes: Floats, drawn: int, batch_size: int, batch_time: BatchTime
) -> tuple[float, float, Floats, Floats]:
    """Mean, second moment, instants and probabilities of the service time, of the largest of `drawn` sizes."""
    ordered = np.sort(sizes)
    parts = min(_ATOMS, len(ordered))
    atoms = np.array([part.mean() for part in np.array_split(ordered, parts)])
    share = (np.arange(parts + 1) / parts) ** drawn
    times, weights = np.asarray(batch_time(batch_size, atoms), dtype=float), np.diff(share)
    return float(weights @ times), float(weights @ times**2), times, weights


def _model(problem: BinnedProblem, limit: int) -> _Model:
    laws = {
        (size, j, drawn): _largest_of(problem.sizes[j], drawn, size, problem.batch_time)
        for size in range(1, problem.max_batch_size + 1)
        for j in range(problem.bins)
        for drawn in range(1, size + 1)
        if j or drawn == size  # the longest bin alone may be the lowest
        if problem.mixing or drawn == size
    }
    low = min(law[2].min() for law in laws.values())
    high = max(law[2].max() for law in laws.values())
    grid = np.linspace(low, high, _INSTANTS[problem.bins]) if high > low else np.array([low])
    batches = {}
    for (size, j, drawn), (mean, second, times, weights) in laws.items():
        energy = problem.powers[size - 1] * mean if problem.powers else 0.0
        batches[size, j, drawn] = _Batch(mean, second, weights @ on_grid(grid, times), energy)
    arrivals = [np.stack([arrival_matrix(rate * instant, limit) for instant in grid]) for rate in problem.arrival_rates]
    return _Model(problem, limit, batches, arrivals)


def _first_policy(model: _Model, before: BinnedSolution | None) -> Ints:
    """The policy of a smaller N, or greedy: as many as fit, the longest first.

    A policy is an array by state of indices in `_Model.actions`, or -1 to wait.
    """
    numbers = {launched: i for i, (launched, _) in enumerate(model.actions)}
    action = np.full(model.shape, -1)
    for state in np.ndindex(*model.shape):
        if not any(state):
            continue
        if before is not None:
            launched = before.launch(state)
            action[state] = numbers[launched] if any(launched) else -1
            continue
        left, taken = model.problem.max_batch_size, [0] * len(state)
        for j in reversed(range(len(state))):
            taken[j] = min(left, state[j])
            left -= taken[j]
            if taken[j] and not model.problem.mixing:
                break
        action[state] = numbers[tuple(taken)]
    return action


def _policy_iteration(model: _Model, before: BinnedSolution | None) -> BinnedSolution:
    found = policy_iteration(_first_policy(model, before), partial(_chain, model), partial(_improve, model))
    problem, iterations = model.problem, found.iterations + (0 if before is None else before.iterations)
    response = (found.gain - problem.w2 * found.mean_power) / (1e3 * problem.w1) if problem.w1 else 0.0
    launched = np.array([each for each, _ in model.actions] + [(0,) * problem.bins])
    return BinnedSolution(launched[found.policy], found.gain, response, found.mean_power, iterations)


def _groups(model: _Model, policy: Ints) -> Iterator[tuple[int, Ints, Ints, _Batch]]:
    """For each action in use: its number, flat indices of the states, those of the queues it leaves, and its batch."""
    flat = policy.ravel()
    strides = np.array([(model.limit + 1) ** k for k in reversed(range(model.problem.bins))])
    for number in np.unique(flat[flat >= 0]):
        launched, batch = model.actions[number]
        states = np.flatnonzero(flat == number)
        yield int(number), states, states - int(np.dot(strides, launched)), batch


def _chain(model: _Model, policy: Ints) -> Chain:
    groups = [(*group, np.flatnonzero(group[-1].weights)) for group in _groups(model, policy)]
    flat, count = policy.ravel(), policy.size
    waits = np.flatnonzero(flat < 0)
    rate = sum(model.problem.arrival_rates)
    waiting = model.waiting.ravel().astype(float)
    sojourn, energy = np.full(count, 1.0 / rate), np.zeros(count)
    cost = model.cost(waiting, 1.0 / rate, 0.0, 0.0)
    for _, states, _, batch, _ in groups:
        sojourn[states], energy[states] = batch.mean, batch.energy
        cost[states] = model.cost(waiting[states], batch.mean, batch.second_moment, batch.energy)

    def expected(values: Floats) -> Floats:
        grid = values.reshape(model.shape)
        ends = model.after_service(grid).reshape(len(model.arrivals[0]), -1)
        found = np.empty(count)
        for _, states, left, batch, used in groups:
            found[states] = batch.weights[used] @ ends[np.ix_(used, left)]
        found[waits] = model.after_wait(grid).ravel()[waits]
        return found

    return Chain(expected, sojourn, cost, energy)


def _improve(model: _Model, policy: Ints, values: Floats, gain: float) -> Ints:
    """The best action in each state; the present one is kept unless another is better."""
    ends = model.after_service(values)
    rate = sum(model.problem.arrival_rates)
    waiting = model.waiting.astype(float)
    wait = model.cost(waiting, 1.0 / rate, 0.0, 0.0) - gain / rate + model.after_wait(values)
    largest = model.problem.max_batch_size
    full = np.any(np.indices(model.shape) >= largest, axis=0)  # a full batch of one bin is not kept waiting
    best = np.where(full, np.inf, wait)
    action = np.full(model.shape, -1)
    for number, (launched, batch) in enumerate(model.actions):
        after = np.tensordot(batch.weights, ends, axes=1)
        states = tuple(slice(n, None) for n in launched)
        left = tuple(slice(None, model.limit + 1 - n) for n in launched)
        total = model.cost(waiting[states], batch.mean, batch.second_moment, batch.energy)
        take_better(best, action, states, number, total - gain * batch.mean + after[left], policy)
    action[(0,) * model.problem.bins] = -1
    return action
