"""What is to be expected of the device, by the profiles of today: the dispatcher's own small arithmetic.

Where the service time depends on lengths, which only show later, the least one stands for what nobody must be refused
or dropped for; what a batch costs goes by the profile's own.
"""

from collections.abc import Callable, Mapping
from itertools import groupby

from policies.catalog import Chosen
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.types import Launch
from server.executor import Batch


class Forecast:
    """Times, s, and energies, J.

    Attributes:
        free_at: the instant at which the batch in service should be done, s.
    """

    def __init__(self, chosen: Mapping[str, Chosen], batcher: Batcher, clock: Callable[[], float]) -> None:
        """`chosen` by model is looked at anew each time; so is the queue."""
        self._chosen = chosen
        self._batcher = batcher
        self._clock = clock
        self.free_at = 0.0

    def batch(self, batch: Batch) -> float:
        """Service time of a batch, of all its stages or of some."""
        profile, size = self._chosen[batch.model].profile, len(batch.inputs)
        if profile.lengths is None:
            return self._time(batch.model, size, batch.first_stage, batch.last_stage)
        once = profile.iteration_time(size, 0 if batch.first_stage else size)
        return profile.service_time(size) if batch.stages is None else batch.stages * once

    def rest(self, batch: Batch) -> float:
        """How long the requests of a batch are on the device from its launch, to the end of their last stage."""
        return self._time(batch.model, len(batch.inputs), batch.first_stage)

    def end(self, launch: Launch) -> float:
        """How long the requests of a launch are on the device, to the end of their last stage."""
        first = launch.requests[0]
        return self._time(first.kind.model, len(launch.requests), first.stage)

    def energy(self, batch: Batch) -> float | None:
        """Energy of a batch, of all its stages or of some; None where unknown."""
        profile, size = self._chosen[batch.model].profile, len(batch.inputs)
        if profile.lengths is None:
            return profile.launch_energy(size, batch.first_stage, batch.last_stage)
        energy = profile.energy(size)
        return None if energy is None else energy * self.batch(batch) / profile.service_time(size)

    def to_serve(self, more: Mapping[str, int]) -> float:
        """The least time for the rest of the batch in service, everybody who is here, and `more` by model."""
        waiting = self._batcher.waiting_by_model()
        left = max(0.0, self.free_at - self._clock())
        for (model, stage), requests in groupby(self._batcher.suspended, lambda r: (r.kind.model, r.stage)):
            left += self._time(model, sum(1 for _ in requests), stage)
        return left + sum(
            _least(self._chosen[model].profile) * self._chosen[model].profile.time_to_serve(waiting.get(model, 0) + n)
            for model, n in {**dict.fromkeys(waiting, 0), **more}.items()
        )

    def longest(self) -> float:
        """The longest that the next batch can take, to its end."""
        sizes = ((model, n) for model, n in self._batcher.waiting_by_model().items() if n)
        return self.to_serve({}) if self._batcher.suspended else max((self._time(*s) for s in sizes), default=0.0)

    def _time(self, model: str, size: int, first: int = 0, last: int | None = None) -> float:
        profile = self._chosen[model].profile
        size = min(size, profile.max_batch_size)
        if profile.lengths is None:
            return profile.launch_time(size, first, last)
        return profile.iteration_time(size, 0 if first else size)


def _least(profile: Profile) -> float:
    """The least service time over the profile's own, of its largest batch."""
    if profile.lengths is None:
        return 1.0
    largest = profile.max_batch_size
    return profile.service_time(largest, profile.lengths[0]) / profile.service_time(largest)
