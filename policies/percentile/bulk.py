"""A percentile of the first priority level beside bulk, and the largest batches of bulk that keep it.

A batch takes all waiting requests of the first level, and is filled with others up to c. Bulk always waits, so that the
device is always busy: that is the worst case for the first level, and the case in which bulk's throughput counts. Then
the number k of first-level requests at the launches is a Markov chain: a batch has max(min(k, B_max), c) requests,
takes S, and leaves k' = max(k - B_max, 0) + Poisson(lambda S). A first-level request arrives in a batch at a uniform
instant (Poisson arrivals), waits for its end, and is served by the next one:

    P(R <= t) = sum_k pi_k E[S P(U S + S' <= t)] / sum_k pi_k E[S],

with S' the time of the next batch, whose size depends on the other arrivals during S. Both S and S' vary as gamma
distributed times do, each taken at some quantiles.

Limits: first-level requests beyond B_max at one launch count as if they were served by it; an idle device never waits
for the first level, since less bulk in a batch costs less throughput for the same bound unless a batch of one is too
long already. All levels after the first are bulk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from policies.profile import Profile
from policies.solver.distributions import Floats

_QUANTILES = 8  # of service times
_CHAIN = 3  # largest k, in batches
_TINY = 1e-300  # a probability that is not divided by


@dataclass(frozen=True)
class BulkBatches:
    """What batches of at most c with bulk mean, beside a rate of the first level.

    Attributes:
        size: c.
        share: of the first level's requests within the bound.
        throughput: of bulk, 1/s.
    """

    size: int
    share: float
    throughput: float


def bulk_batches(
    profile: Profile, arrival_rate: float, response_time: float, sizes: Sequence[int] = ()
) -> list[BulkBatches]:
    """Evaluate largest batches with bulk.

    Args:
        profile: service times by batch size, and how they vary, 0 where it is not known.
        arrival_rate: of the first level, 1/s.
        response_time: the bound, s.
        sizes: of these largest batches; empty: all up to 16, and then some up to B_max, each at most an eighth larger.
    """
    sizes = sizes or _sizes(profile.max_batch_size)
    factors = _factors(sum(profile.cvs) / len(profile.cvs) if profile.cvs else 0.0)
    return [_evaluate(profile, arrival_rate, response_time, size, factors) for size in sizes]


def _sizes(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, sizes[-1] * 9 // 8), largest))
    return sizes


def largest_bulk_batch(found: Sequence[BulkBatches], share: float) -> BulkBatches:
    """The one of the highest throughput that keeps the share; the one of the highest share if none does."""
    kept = [each for each in found if each.share >= share]
    if not kept:
        return max(found, key=lambda each: (each.share, -each.size))
    return max(kept, key=lambda each: (each.throughput, -each.size))


def _factors(cv: float) -> Floats:
    """Service times over their mean, equally likely; of mean 1."""
    if cv <= 0.0:
        return np.ones(1)
    shape = 1.0 / cv**2
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    found = scipy.special.gammaincinv(shape, middles) / shape
    return np.asarray(found / found.mean())


def _evaluate(profile: Profile, rate: float, response_time: float, bulk: int, factors: Floats) -> BulkBatches:
    largest, times = profile.max_batch_size, np.array(profile.service_times)
    waiting = np.arange(_CHAIN * largest + 1)  # k, and numbers of arrivals
    sizes = np.maximum(np.minimum(waiting, largest), bulk)
    served = times[sizes - 1][:, np.newaxis] * factors  # S, by k and factor
    arrivals = _poisson(rate * served, len(waiting))  # (k, factor, count)
    rest = np.maximum(waiting - largest, 0)
    transition = np.zeros((len(waiting), len(waiting)))
    within = np.empty_like(served)
    for k in range(len(waiting)):
        moved = arrivals[k].mean(axis=0)[: len(waiting) - rest[k]]
        transition[k, rest[k] :] = moved
        transition[k, -1] += 1.0 - moved.sum()
        following = np.minimum(rest[k] + 1 + waiting, len(waiting) - 1)  # k' with the request itself
        left = response_time - served[following]  # of U S, by number of arrivals and factor of S'
        in_time = np.clip(left[np.newaxis] / served[k][:, np.newaxis, np.newaxis], 0.0, 1.0).mean(axis=2)
        within[k] = (arrivals[k] * in_time).sum(axis=1) / np.maximum(arrivals[k].sum(axis=1), _TINY)
    stationary = _stationary(transition)[:, np.newaxis]
    weights = stationary * served
    of_bulk = float((stationary[:, 0] * (sizes - np.minimum(waiting, largest))).sum())
    time = float(weights.sum()) / len(factors)
    return BulkBatches(bulk, float((weights * within).sum() / weights.sum()), of_bulk / time)


def _poisson(means: Floats, limit: int) -> Floats:
    counts = np.arange(limit)
    logarithm = scipy.special.xlogy(counts, means[..., np.newaxis]) - scipy.special.gammaln(counts + 1.0)
    return np.asarray(np.exp(logarithm - means[..., np.newaxis]))


def _stationary(transition: Floats) -> Floats:
    count = len(transition)
    equations = transition.T - np.eye(count)
    equations[-1] = 1.0
    right = np.zeros(count)
    right[-1] = 1.0
    return np.clip(np.linalg.solve(equations, right), 0.0, None)
