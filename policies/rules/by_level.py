"""Priority levels: how many requests to launch when requests of several levels wait.

A batch takes the requests of the first levels first, whatever the policy (policies/queue/batcher.py). Two policies know
the levels: `SmdpLevels` minimises the weighted sum of the levels' mean response times, and `LimitedBulk` keeps a
percentile of the first level with as large batches of the others as that allows.

With more than two levels those after the first count as one, of their mean weight: a pair has a table of a size that
can be solved. tests/policies/solver/test_levels.py has the distance from the optimum of three levels.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isclose, isfinite

from policies.percentile.bulk import bulk_batches, largest_bulk_batch
from policies.profile import Profile
from policies.queue.lookup import table_of
from policies.solver.levels import LevelProblem, LevelSolution, solve_levels
from policies.types import Action, Launch, SpecError, State, Wait, launch_oldest

LARGEST_BATCH = 64  # of a table for two levels; a larger one takes minutes for each load
_LOADS = (0.1, 0.3, 0.5, 0.65, 0.8, 0.9)
_FIRST_LEVEL_LOADS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_SETTLED = 1e-3  # of the average cost; the policy settles before it
_LEAST_SHARE = 0.01  # of a level, for which a table is solved


@dataclass(frozen=True)
class SmdpLevels:
    """Launches by the table of the arrival rate nearest to the measured one; greedy below half the lowest.

    Attributes:
        rates: of the tables, 1/s, ascending.
        tables: a solution for each rate.
        max_batch_size: B.
    """

    rates: Sequence[float]
    tables: Sequence[LevelSolution]
    max_batch_size: int

    def decide(self, state: State, /) -> Action:
        """Return as many requests as the table says; decide again once the rate has decayed."""
        table = table_of(state, self.rates, self.tables)
        if table is None:
            return launch_oldest(state, self.max_batch_size, self.max_batch_size)
        size = table.launch(waiting_by_level(state))
        return launch_oldest(state, size, self.max_batch_size) if size else Wait(state.reevaluate_at)


@dataclass(frozen=True)
class LimitedBulk:
    """Launches all waiting requests of the first level, and others up to a limit of the batch.

    Attributes:
        rates: arrival rates of the first level, 1/s, ascending.
        limits: for each rate, the largest batch that has requests of other levels.
        max_batch_size: B.
        kept_up_to: the highest of the rates at which the percentile is kept beside bulk; 0 if it is at none.
    """

    rates: Sequence[float]
    limits: Sequence[int]
    max_batch_size: int
    kept_up_to: float = inf

    def decide(self, state: State, /) -> Action:
        """Never wait; use the limit of the next higher rate of the first level."""
        first, others = waiting_by_level(state)
        shares = state.level_shares.get(state.waiting[0].kind.model, (0.0,))
        size = max(min(first, self.max_batch_size), min(first + others, self.limit(shares[0] * state.arrival_rate)))
        return Launch(state.waiting[:size], reason="full" if size == self.max_batch_size else "policy")

    def limit(self, first_rate: float) -> int:
        """The largest batch with other levels at this arrival rate of the first level, 1/s."""
        return self.limits[min(bisect_left(self.rates, first_rate), len(self.rates) - 1)]


def waiting_by_level(state: State) -> tuple[int, int]:
    """The numbers of waiting requests of the first level and of all others."""
    first = sum(request.level == 1 for request in state.waiting)
    return first, len(state.waiting) - first


def parse_weights(text: str, separator: str = ",") -> tuple[float, ...]:
    """Parse the weights of two or more levels, the first level first.

    Raises:
        SpecError: one is not a number of at least 0, they ascend, or there are fewer than two or more than eight.
    """
    try:
        weights = tuple(float(word) for word in text.split(separator))
    except ValueError:
        weights = ()
    descend = all(first >= second for first, second in pairwise((*weights, 0.0)))
    if not 2 <= len(weights) <= 8 or not descend or not isfinite(weights[0]):
        raise SpecError(
            f"priority weights {text!r}: give 2 to 8 numbers of at least 0, the greatest first, such as 8{separator}1"
        )
    return weights


def parse_shares(flag: str, text: str, fewest: int, most: int) -> tuple[float, ...]:
    """Parse the shares of levels in the arrivals, the first level first.

    Args:
        flag: that they are given by.
        text: S1,S2,...
        fewest: least number of levels.
        most: greatest number of levels.

    Raises:
        SpecError: there are fewer or more, or they are not above 0, or do not sum to 1.
    """
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    valid = fewest <= len(shares) <= most and all(share > 0.0 for share in shares)
    if not valid or not isclose(sum(shares), 1.0, rel_tol=1e-6):
        count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        raise SpecError(f"{flag} {text}: give {count} numbers above 0 that sum to 1, one for each level")
    return shares


def limited_bulk(profile: Profile, response_time: float, share: float) -> LimitedBulk:
    """Return the policy that keeps a percentile of the first level with the highest throughput of the others.

    Args:
        profile: of the device; its largest size is B.
        response_time: the bound, s.
        share: of the first level's requests to be within it.
    """
    rates = [load * profile.capacity for load in _FIRST_LEVEL_LOADS]
    found = [largest_bulk_batch(bulk_batches(profile, rate, response_time), share) for rate in rates]
    kept = [rate for rate, each in zip(rates, found, strict=True) if each.share >= share]
    return LimitedBulk(rates, [each.size for each in found], profile.max_batch_size, max(kept, default=0.0))


def solve_for_shares(shares: Sequence[float], profile: Profile, weights: Sequence[float], w2: float) -> SmdpLevels:
    """Solve the tables for shares of the levels in the arrivals.

    Args:
        shares: of the levels, the first level first.
        profile: of the device; batches go up to its largest size, at most 64.
        weights: of the levels' mean response times, per ms.
        w2: weight of the mean power, per W.

    Raises:
        SpecError: there are more states than fit.
    """
    known = profile.truncated(min(profile.max_batch_size, LARGEST_BATCH))
    first, others = max(shares[0], _LEAST_SHARE), max(sum(shares[1:]), _LEAST_SHARE)
    merged = sum(weight * max(share, 0.0) for weight, share in zip(weights[1:], shares[1:], strict=True))
    pair = weights[0], merged / sum(shares[1:]) if sum(shares[1:]) > 0.0 else weights[1]
    total = first + others
    rates = [load * known.capacity for load in _LOADS]
    tables = [
        solve_levels(
            LevelProblem(known, (rate * first / total, rate * others / total), pair, w2),
            settled=_SETTLED,
        )
        for rate in rates
    ]
    return SmdpLevels(rates, tables, known.max_batch_size)
