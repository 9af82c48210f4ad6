"""Routing of requests to the device of shortest expected delay, used by the server and by the simulated fleet."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from policies.profile import Profile
from policies.queue.batcher import Batcher


def backlog(
    batcher: Batcher,
    profiles: Mapping[str, Profile],
    remaining: float,
    added: Mapping[str, int],
    waiting: Mapping[str, int] | None = None,
) -> float:
    """Return the least time in which a device serves its queue, s.

    With one additional request it is the expected delay of that request, which is served last.

    Args:
        batcher: the queue of the device.
        profiles: profiles by model.
        remaining: expected remaining time of the batch in service, s.
        added: number of additional requests by model; the device serves each of these models.
        waiting: number of those of the waiting requests that count, by model; None: of all.
    """
    for (model, stage), requests in groupby(batcher.suspended, lambda r: (r.kind.model, r.stage)):
        remaining += profiles[model].min_service_time(sum(1 for _ in requests), stage)
    return remaining + sum(
        profiles[model].min_time_to_serve(count + added.get(model, 0))
        for model, count in (batcher.waiting_by_model() if waiting is None else waiting).items()
    )


def least_delay(expected: Sequence[float]) -> int:
    """Return the index of the least expected delay; the first of equal ones."""
    return min(range(len(expected)), key=expected.__getitem__)
