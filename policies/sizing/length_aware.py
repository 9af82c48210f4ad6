"""Length-aware batching: of the waiting requests those share a batch whose padding costs less than sharing saves.

A batch of padded inputs takes as long as its longest request. Let a(r) be the service time of request r alone, and
l(b, r) that of a batch of b whose longest request is r, by the profile. The requests are ordered by size. A batch is a
run of neighbours in that order, since any other batch with the same longest request has more padding. The candidates
are the runs that contain the oldest request, at most the largest batch long.

A run is compared with its requests one by one, the shortest first. Each of n requests is later by the time of what is
served before it. One by one, the i-th of a run of b keeps itself and the n - i requests behind it waiting for a(i), so
that the sum of all response times grows by sum over i of (n - i + 1) a(i). As a batch the run adds n l(b, longest). The
run that saves most in its time is launched, that with the greatest

    (sum over i of (n - i + 1) a(i) - n l(b, longest of the run)) / l(b, longest of the run)

which is 0 for the oldest request alone. The n requests are those that wait, and those that arrive until the device is
idle: lambda W / (1 - rho) by the measured arrival rate lambda, with W the waiting requests' time one by one, and rho
lambda times their mean time, at most 0.98. So two equal requests share a batch if it takes less than 1.5 times as long
as one, when arrivals are rare; a long queue takes any saving. The oldest request never waits for another batch than the
one in service. No table is solved, and no distribution of lengths is needed.

A solved table weighs response times and costs. Where it has decided to launch, the run with the greatest ratio of
sum over i of a(i) to l(b, longest of the run) is launched: that which does most work in its time. Requests of one
length then share a batch wherever larger batches take less time a request.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from policies.types import Action, Launch, State

_MOST = 256  # oldest requests that are looked at: a decision takes a few tens of microseconds
_HIGHEST_LOAD = 0.98
_NEGLIGIBLE = 0.01  # of the time of a batch, by which a smaller one may be worse: profiles are not more exact


@dataclass(frozen=True, slots=True, eq=False)
class LengthAware:
    """Launches the run of similar sizes around the oldest request that shortens responses most; never waits.

    Attributes:
        alone: service times of one request at the profile's lengths, s, ascending.
        times: service time of a batch by its size and the length of its longest request, s; index [b - 1][length].
        max_batch_tokens: the largest product of batch size and longest length.
    """

    alone: NDArray[np.float64]
    times: NDArray[np.float64]
    max_batch_tokens: float = np.inf

    def decide(self, state: State, /) -> Action:
        """Launch the run that shortens responses most; of those that do nearly as much the shortest."""
        return self._launch(state, len(self.times), len(self.times), cheapest=False)

    def launch(self, state: State, size: int, largest: int) -> Launch:
        """Launch the cheapest run for a policy that has decided to launch; of those nearly as cheap the shortest.

        Args:
            state: of the queue.
            size: at most so many requests.
            largest: no batch takes longer than one of this size of the longest requests.
        """
        return self._launch(state, size, largest, cheapest=True)

    def _launch(self, state: State, most: int, largest: int, cheapest: bool) -> Launch:
        waiting = state.waiting[: max(_MOST, most)]
        count = len(waiting)
        if count == 1:
            return Launch(waiting, reason="full" if largest == 1 else "policy")
        sizes = np.maximum([request.size for request in waiting], self.alone[0])
        order = np.argsort(sizes, kind="stable")
        ordered = sizes[order]
        oldest = int(np.flatnonzero(order == 0)[0])
        last = np.arange(oldest, min(count, oldest + most))  # of the runs
        first = last[np.newaxis, :] - np.arange(most)[:, np.newaxis]  # by size and last
        begin = np.clip(first, 0, None)
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        work, times = sums[last + 1] - sums[begin], self._times(ordered[last])[:most]
        if cheapest:
            gain = work / times
            unit = float(gain.max())
            gain[1:][times[1:] > self.times[largest - 1, -1]] = -np.inf
        else:
            moments = np.concatenate(([0.0], np.cumsum(np.arange(count) * ordered)))
            load = min(state.arrival_rate * sums[-1] / count, _HIGHEST_LOAD)
            delayed = float(count * (1.0 + load / (1.0 - load)))  # W = count times the mean
            one_by_one = (delayed + begin) * work - (moments[last + 1] - moments[begin])
            gain, unit = one_by_one / times - delayed, delayed
        gain[(first < 0) | (first > oldest)] = -np.inf
        if self.max_batch_tokens < np.inf:
            longest = np.maximum.accumulate([waiting[index].length for index in order])[last]
            gain[1:][np.arange(2, most + 1)[:, np.newaxis] * longest > self.max_batch_tokens] = -np.inf
        nearly = gain >= gain.max() - _NEGLIGIBLE * unit
        size, end = np.argwhere(nearly)[0]  # the first has the smallest size
        run = sorted(order[first[size, end] : last[end] + 1].tolist())
        return Launch([waiting[index] for index in run], reason="full" if len(run) >= largest else "policy")

    def _times(self, longest: NDArray[np.float64]) -> NDArray[np.float64]:
        """Service times of batches of all sizes with these longest requests, by their times alone, s: [b - 1, n]."""
        if len(self.alone) == 1:
            return np.broadcast_to(self.times, (len(self.times), len(longest)))
        upper = np.clip(np.searchsorted(self.alone, longest), 1, len(self.alone) - 1)
        share = (longest - self.alone[upper - 1]) / (self.alone[upper] - self.alone[upper - 1])
        lower: NDArray[np.float64] = self.times[:, upper - 1]
        return lower + share * (self.times[:, upper] - lower)


def length_aware(profile: Profile) -> LengthAware:
    """Return the policy for a profile; one without lengths has batches of one length only."""
    rows = profile.length_service_times or [(time,) for time in profile.service_times]
    times = np.maximum.accumulate(np.array(rows, dtype=float), axis=1)
    alone, first = np.unique(times[0], return_index=True)
    return LengthAware(alone, times[:, first], profile.max_batch_tokens or np.inf)
