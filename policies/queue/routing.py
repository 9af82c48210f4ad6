"""Which of several devices a request goes to: the one that should answer it first, by its profile.

A server's dispatchers and a simulated fleet ask the same two functions.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from policies.profile import Profile
from policies.queue.batcher import Batcher


def backlog(batcher: Batcher, profiles: Mapping[str, Profile], left: float, more: Mapping[str, int]) -> float:
    """The least time in which a device serves everybody who is here, s.

    With one request `more` it is when that one should be answered: nobody is before those who are here.

    Args:
        batcher: the device's queue.
        profiles: by model.
        left: time until the batch in service should be done, s.
        more: by model, requests beside those who are here.
    """
    waiting = batcher.waiting_by_model()
    for (model, stage), requests in groupby(batcher.suspended, lambda r: (r.kind.model, r.stage)):
        left += profiles[model].min_service_time(sum(1 for _ in requests), stage)
    return left + sum(
        _share(profiles[model]) * profiles[model].time_to_serve(waiting.get(model, 0) + n)
        for model, n in {**dict.fromkeys(waiting, 0), **more}.items()
    )


def soonest(expected: Sequence[float]) -> int:
    """Index of the least expected response time; of equal ones the first."""
    return min(range(len(expected)), key=expected.__getitem__)


def _share(profile: Profile) -> float:
    """The least service time over the profile's own, of its largest batch."""
    if profile.lengths is None:
        return 1.0
    largest = profile.max_batch_size
    return profile.service_time(largest, profile.lengths[0]) / profile.service_time(largest)
