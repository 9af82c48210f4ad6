"""What is to be expected of the device, by the profiles of today: the dispatcher's own small arithmetic."""

from collections.abc import Callable, Mapping
from itertools import groupby

from policies.catalog import Chosen
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
        return self._time(batch.model, len(batch.inputs), batch.first_stage, batch.last_stage)

    def rest(self, batch: Batch) -> float:
        """How long the requests of a batch are on the device from its launch, to the end of their last stage."""
        return self._time(batch.model, len(batch.inputs), batch.first_stage)

    def end(self, launch: Launch) -> float:
        """How long the requests of a launch are on the device, to the end of their last stage."""
        first = launch.requests[0]
        return self._time(first.kind.model, len(launch.requests), first.stage)

    def energy(self, batch: Batch) -> float | None:
        """Energy of a batch, of all its stages or of some; None where unknown."""
        profile = self._chosen[batch.model].profile
        return profile.launch_energy(len(batch.inputs), batch.first_stage, batch.last_stage)

    def to_serve(self, more: Mapping[str, int]) -> float:
        """The least time for the rest of the batch in service, everybody who is here, and `more` by model."""
        waiting = self._batcher.waiting_by_model()
        left = max(0.0, self.free_at - self._clock())
        for (model, stage), requests in groupby(self._batcher.suspended, lambda r: (r.kind.model, r.stage)):
            left += self._time(model, sum(1 for _ in requests), stage)
        return left + sum(
            self._chosen[model].profile.time_to_serve(waiting.get(model, 0) + more.get(model, 0))
            for model in waiting.keys() | more.keys()
        )

    def longest(self) -> float:
        """The longest that the next batch can take, to its end."""
        sizes = ((model, n) for model, n in self._batcher.waiting_by_model().items() if n)
        return self.to_serve({}) if self._batcher.suspended else max((self._time(*s) for s in sizes), default=0.0)

    def _time(self, model: str, size: int, first: int = 0, last: int | None = None) -> float:
        profile = self._chosen[model].profile
        return profile.launch_time(min(size, profile.max_batch_size), first, last)
