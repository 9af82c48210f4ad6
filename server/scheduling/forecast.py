"""What is to be expected of the device, by the profiles of today: the dispatcher's own small arithmetic.

For pictures `least`, `expected` and `most` are one time. How long a text goes on shows only at its end: the least time,
an iteration, is what nobody may be refused or dropped below; the most, to its limit, is when a batch is late.
"""

from collections.abc import Callable, Mapping
from typing import Any

from policies.catalog import Chosen
from policies.queue.batcher import Batcher
from policies.queue.routing import backlog, least_time
from policies.types import Launch
from server.backends.executor import Batch
from server.models.text import TextSample


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

    def expected(self, batch: Batch) -> float:
        """Service time of a batch, of all its stages or of some; of texts as the profile's own."""
        profile, size = self._chosen[batch.model].profile, len(batch.inputs)
        if profile.lengths is None:
            return profile.launch_time(min(size, profile.max_batch_size), batch.first_stage, batch.last_stage)
        once = profile.iteration_time(size, 0 if batch.first_stage else size)
        return profile.service_time(size) if batch.stages is None else batch.stages * once

    def least(self, batch: Batch) -> float:
        """How long the requests of a batch are at least on the device, to the end of their last stage."""
        return self._least(batch.model, len(batch.inputs), batch.first_stage)

    def least_of(self, launch: Launch) -> float:
        """The same of a launch."""
        first = launch.requests[0]
        return self._least(first.kind.model, len(launch.requests), first.stage)

    def most(self, batch: Batch) -> float:
        """How long they can take, however many tokens there will be."""
        profile, size = self._chosen[batch.model].profile, len(batch.inputs)
        if profile.lengths is None:
            return self.least(batch)
        if batch.stages is not None:
            return batch.stages * profile.iteration_time(size, size)
        return profile.service_time(size, max(_longest(sample, profile.lengths[-1]) for sample in batch.inputs))

    def energy(self, batch: Batch) -> float | None:
        """Energy of a batch, of all its stages or of some; None where unknown."""
        profile, size = self._chosen[batch.model].profile, len(batch.inputs)
        if profile.lengths is None:
            return profile.launch_energy(size, batch.first_stage, batch.last_stage)
        energy = profile.energy(size)
        return None if energy is None else energy * self.expected(batch) / profile.service_time(size)

    def to_serve(self, more: Mapping[str, int]) -> float:
        """The least time for the rest of the batch in service, everybody who is here, and `more` by model."""
        profiles = {model: chosen.profile for model, chosen in self._chosen.items()}
        return backlog(self._batcher, profiles, max(0.0, self.free_at - self._clock()), more)

    def backlogged(self, model: str, more: int, needed: float) -> bool:
        """Whether there is work for longer than a policy may wait to gather.

        Of texts, whose work is known to be little only, a full batch of each bin and one more tell it.

        Args:
            model: asked for.
            more: requests of it beside those who wait.
            needed: `to_serve` with them, s.
        """
        chosen = self._chosen[model]
        gathered = chosen.profile.max_batch_size * (1 if chosen.bins is None else chosen.bins.bins)
        return needed > chosen.profile.service_times[-1] or self._batcher.waiting_of(model) + more > gathered

    def horizon(self) -> float:
        """The greatest `least_of` that the next launch can have."""
        sizes = ((model, n) for model, n in self._batcher.waiting_by_model().items() if n)
        return self.to_serve({}) if self._batcher.suspended else max((self._least(*s) for s in sizes), default=0.0)

    def _least(self, model: str, size: int, first: int = 0) -> float:
        return least_time(self._chosen[model].profile, size, first)


def _longest(sample: Any, at_most: int) -> int:
    """The length of a text as profiles count it; of one under way that of any."""
    return sample.max_new_tokens or len(sample.tokens) if isinstance(sample, TextSample) else at_most
