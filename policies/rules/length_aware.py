"""Length-aware batching: of the waiting requests those share a batch whose padding costs less than sharing saves.

A batch of padded inputs takes as long as its longest request. Let a(r) be the service time of request r alone, and
l(b, r) that of a batch of b whose longest request is r, by the profile. The requests are ordered by size. A batch is a
run of neighbours in that order, since any other batch with the same longest request has more padding. Among the runs
that contain the oldest request, at most the largest batch long, the one is launched with the greatest saving

    sum of a(r) over the run / l(b, longest of the run)

which is the time that its requests would take one by one over the time that they take together. So a batch of one is
launched where sharing saves nothing, and the oldest request never waits for another batch than the one in service. No
table is solved, and no distribution of lengths is needed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from policies.rules.rule import Rule
from policies.spec import Spec
from policies.types import Action, Launch, State

_MOST = 256  # oldest requests that are looked at: a decision takes a few tens of microseconds
_NEGLIGIBLE = 0.01  # of the saving, which a smaller batch may lack: profiles are not more exact


@dataclass(frozen=True, slots=True, eq=False)
class LengthAware:
    """Launches the run of similar sizes around the oldest request that saves most; never waits.

    Attributes:
        alone: service times of one request at the profile's lengths, s, ascending.
        times: service time of a batch by its size and the length of its longest request, s; index [b - 1][length].
    """

    alone: NDArray[np.float64]
    times: NDArray[np.float64]

    def decide(self, state: State, /) -> Action:
        """Launch the run that saves most; of those that save nearly as much the shortest."""
        waiting = state.waiting[:_MOST]
        largest = len(self.times)
        if len(waiting) == 1:
            return Launch(waiting, reason="full" if largest == 1 else "policy")
        sizes = np.maximum([request.size for request in waiting], self.alone[0])
        order = np.argsort(sizes, kind="stable")
        ordered = sizes[order]
        oldest = int(np.flatnonzero(order == 0)[0])
        last = np.arange(oldest, min(len(waiting), oldest + largest))  # of the runs
        first = last[np.newaxis, :] - np.arange(largest)[:, np.newaxis]  # by size and last
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        saving = (sums[last + 1] - sums[np.clip(first, 0, None)]) / self._times(ordered[last])
        saving[(first < 0) | (first > oldest)] = 0.0
        size, end = np.argwhere(saving >= (1.0 - _NEGLIGIBLE) * saving.max())[0]  # the first has the smallest size
        run = sorted(order[first[size, end] : last[end] + 1].tolist())
        return Launch([waiting[index] for index in run], reason="full" if len(run) == largest else "policy")

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
    return LengthAware(alone, times[:, first])


def _build(_: Spec, profile: Profile) -> LengthAware:
    return length_aware(profile)


LENGTH_AWARE = Rule(
    name="length-aware",
    build=_build,
    per_bin=False,
    description="Launches the oldest request with those of similar size, as many as save time by sharing a batch, and "
    "never waits.",
    example="length-aware",
)
