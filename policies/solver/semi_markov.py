"""Howard's policy iteration for semi-Markov decision processes with states of several dimensions.

The equations of a fixed policy are those of the journal paper (arXiv 2501.02181, equation (17)): h + g y = c + P h,
with h = 0 in one state. GMRES solves them, because P is only known by its products. The solver of a single queue has
its own closure (tail.py). Service times lie on a grid of instants, so that arrivals are computed once for each instant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import numpy as np
import scipy

from policies.solver.distributions import Floats, Ints
from policies.types import SpecError

_PRECISION = 1e-8  # of the residual, relative to the costs
_RESTART, _RESTARTS = 300, 10
_STEPS = 60  # of policy iteration; less than ten are usual
MAX_STATES = 150_000
_GROWTH = 1.4  # of N, the limit of a queue
_TIE = 1e-9  # relative difference of two costs below which the present action is kept

_Solution = TypeVar("_Solution")


@dataclass(frozen=True)
class Chain:
    """The semi-Markov chain of a policy; arrays are by state.

    Attributes:
        expected: returns the expected values at the next epoch for values by state: P h.
        sojourn: y, mean time to the next epoch, s.
        cost: c, until the next epoch.
        energy: until the next epoch, J.
    """

    expected: Callable[[Floats], Floats]
    sojourn: Floats
    cost: Floats
    energy: Floats


@dataclass(frozen=True)
class Optimum:
    """A policy and its averages.

    Attributes:
        policy: action by state.
        gain: average cost per second.
        mean_power: W.
        iterations: policies evaluated.
    """

    policy: Ints
    gain: float
    mean_power: float
    iterations: int


def policy_iteration(
    policy: Ints, chain_of: Callable[[Ints], Chain], improve: Callable[[Ints, Floats, float], Ints]
) -> Optimum:
    """Find the policy of least average cost.

    Args:
        policy: the first one, action by state.
        chain_of: returns the chain of a policy.
        improve: returns the best actions for relative values by state and the average cost per second; the policy given
            where it is as good as any.

    Raises:
        SpecError: the equations of a policy do not converge.
    """
    chain = chain_of(policy)
    values, gain = average_cost(chain, chain.cost)
    iterations = 1
    while iterations < _STEPS:
        better = improve(policy, values.reshape(policy.shape), gain)
        if np.array_equal(better, policy):
            break
        policy, chain, iterations = better, chain_of(better), iterations + 1
        values, gain = average_cost(chain, chain.cost, values)
    _, power = average_cost(chain, chain.energy) if chain.energy.any() else (values, 0.0)
    return Optimum(policy, gain, power, iterations)


def solve_settled(
    dimensions: int,
    max_batch_size: int,
    settled: float,
    solve: Callable[[int, _Solution | None], _Solution],
    cost_of: Callable[[_Solution], float],
) -> _Solution | None:
    """The solution for queues of at most N, where N grows until the average cost has settled.

    If the states do not fit any more before that, it is the one with the largest N; None if the first does not fit.

    Args:
        dimensions: number of queues.
        max_batch_size: from which N begins.
        settled: relative change of the average cost from one N to the next at which it has settled.
        solve: solves for N, from the solution for a smaller one.
        cost_of: the average cost of a solution.
    """
    size, before = max(3 * max_batch_size, 24), None
    while (size + 1) ** dimensions <= MAX_STATES:
        found = solve(size, before)
        if before is not None and abs(cost_of(found) - cost_of(before)) <= settled * abs(cost_of(found)):
            return found
        before, size = found, ceil(_GROWTH * size)
    return before


def inner_part(policy: Ints, dimensions: int) -> Ints:
    """Leave out the queues near N, at which lost arrivals matter, of a policy whose first axes are the queues."""
    return policy[(slice(0, ceil(policy.shape[0] / _GROWTH)),) * dimensions]


def take_better(
    best: Floats, action: Ints, states: tuple[slice, ...], number: int, cost: Floats, present: Ints
) -> None:
    """Set an action where it costs less, or as much and the present policy takes it.

    Args:
        best: least cost by state so far; changed.
        action: the action of it; changed.
        states: in which the action is possible.
        number: the action.
        cost: of it in these states.
        present: the present policy.
    """
    margin = _TIE * (1.0 + np.abs(np.where(np.isfinite(cost), cost, 0.0)))
    keeps = present[states] == number
    better = np.where(keeps, cost <= best[states] + margin, cost < best[states] - margin)
    best[states] = np.where(better, cost, best[states])
    action[states] = np.where(better, number, action[states])


def average_cost(
    chain: Chain, cost: Floats, start: Floats | None = None, precision: float = _PRECISION
) -> tuple[Floats, float]:
    """Return relative values by state, 0 in the first one, and the average cost per second.

    Args:
        chain: of the policy.
        cost: until the next epoch, by state: its cost, or its energy for the mean power.
        start: relative values of a similar policy; None: 0.
        precision: of the residual, relative to the costs.

    Raises:
        SpecError: the equations do not converge.
    """
    scaled = chain.sojourn / chain.sojourn.mean()  # so that all columns are of one magnitude

    def apply(unknown: Floats) -> Floats:  # the first unknown is the average cost of a mean sojourn
        values = unknown.copy()
        values[0] = 0.0
        return np.asarray(values - chain.expected(values) + unknown[0] * scaled)

    operator = scipy.sparse.linalg.LinearOperator((len(cost), len(cost)), matvec=apply, dtype=float)
    first = None if start is None else start.ravel().copy()
    found, failed = scipy.sparse.linalg.gmres(
        operator, cost, x0=first, rtol=precision, restart=_RESTART, maxiter=_RESTARTS
    )
    if failed:
        raise SpecError("the average cost of a policy does not converge; give a lower arrival rate")
    gain = float(found[0]) / float(chain.sojourn.mean())
    found[0] = 0.0
    return found, gain


def on_grid(grid: Floats, times: Floats) -> Floats:
    """Divide each time between the two neighbouring instants so that the mean is kept.

    Args:
        grid: equally spaced instants, s, ascending; at least one.
        times: within the grid, s, (times,).

    Returns:
        Weights, (times, instants), which sum to 1.
    """
    weights = np.zeros((len(times), len(grid)))
    if len(grid) == 1:
        return weights + 1.0
    place = np.clip((times - grid[0]) / (grid[1] - grid[0]), 0.0, len(grid) - 1.0)
    below = np.minimum(place.astype(int), len(grid) - 2)
    rows = np.arange(len(times))
    weights[rows, below] = below + 1 - place
    weights[rows, below + 1] = place - below
    return weights


def arrival_matrix(mean: float, limit: int) -> Floats:
    """Probabilities from the queue before to the queue after Poisson arrivals, (limit + 1, limit + 1).

    Args:
        mean: mean number of arrivals.
        limit: longest queue; arrivals beyond it are lost.
    """
    counts = np.arange(limit + 1)
    # as scipy.stats.poisson.pmf, which takes longer
    masses = np.exp(scipy.special.xlogy(counts, mean) - scipy.special.gammaln(counts + 1) - mean)
    matrix: Floats = np.triu(scipy.linalg.toeplitz(masses))
    matrix[:, limit] += np.maximum(0.0, 1.0 - matrix.sum(axis=1))
    return matrix
