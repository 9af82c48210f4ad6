"""Expected service times and energies of the device, from the current profiles.

Where the profile has no lengths, the service time depends only on the batch size and the stages, so that the least,
expected and greatest times are the same. With lengths, the least service time, that of the least length, decides what
is rejected or dropped, and the greatest, that of the greatest length, bounds the batch timeout.
"""

from collections.abc import Callable, Mapping

from policies.catalog import ModelPolicy
from policies.queue.batcher import Batcher
from policies.queue.routing import backlog
from policies.types import Launch
from server.backends.executor import Batch


class Forecast:
    """Forecasts times, s, and energies, J.

    Attributes:
        free_at: expected instant of completion of the batch in service, s.
    """

    def __init__(self, chosen: Mapping[str, ModelPolicy], batcher: Batcher, clock: Callable[[], float]) -> None:
        """Forecast by `chosen`, by model, and the queue of `batcher`, both as they are at the time of each call."""
        self._chosen = chosen
        self._batcher = batcher
        self._clock = clock
        self.free_at = 0.0

    def expected_time(self, batch: Batch) -> float:
        """Return the expected service time of the stages of a batch."""
        profile = self._chosen[batch.model].profile
        size = min(len(batch.inputs), profile.max_batch_size)
        return profile.launch_time(size, batch.first_stage, batch.last_stage)

    def least_time(self, batch: Batch) -> float:
        """Return the least service time of a batch from its first stage to the end of its requests' last stage."""
        return self._chosen[batch.model].profile.min_service_time(len(batch.inputs), batch.first_stage)

    def least_time_of(self, launch: Launch) -> float:
        """Return the least service time of a launch from its first stage to the end of its requests' last stage."""
        first = launch.requests[0]
        return self._chosen[first.kind.model].profile.min_service_time(len(launch.requests), first.stage)

    def greatest_time(self, batch: Batch) -> float:
        """Return the greatest service time of a batch from its first stage to the end of its requests' last stage."""
        return self._chosen[batch.model].profile.max_service_time(len(batch.inputs), batch.first_stage)

    def energy(self, batch: Batch) -> float | None:
        """Return the expected energy of the stages of a batch; None where unknown."""
        profile = self._chosen[batch.model].profile
        return profile.launch_energy(len(batch.inputs), batch.first_stage, batch.last_stage)

    def energy_source(self, batch: Batch) -> str:
        """Return the source of that energy."""
        return self._chosen[batch.model].profile.energy_source

    def backlog(self, more: Mapping[str, int], waiting: Mapping[str, int] | None = None) -> float:
        """Return the least time in which the device serves the batch in service, the queue, and `more` by model.

        `waiting` are the numbers of the requests in the queue that count, by model; None: all.
        """
        profiles = {model: chosen.profile for model, chosen in self._chosen.items()}
        return backlog(self._batcher, profiles, max(0.0, self.free_at - self._clock()), more, waiting)

    def is_backlogged(self, model: str, waiting: int, backlog: float) -> bool:
        """Whether there is more work than a policy waits for to fill a batch.

        Since the least service time of a model with lengths understates its work, more requests than a full batch for
        each bin count as a backlog, too.

        Args:
            model: the model of additional requests.
            waiting: number of its requests that would wait, with the additional ones.
            backlog: `backlog` with them, s.
        """
        chosen = self._chosen[model]
        full = chosen.profile.max_batch_size * (1 if chosen.bins is None else chosen.bins.bins)
        return backlog > chosen.profile.service_times[-1] or waiting > full

    def next_launch_bound(self) -> float:
        """Return an upper bound of `least_time_of` the next launch."""
        if self._batcher.suspended:
            return self.backlog({})
        waiting = self._batcher.waiting_by_model().items()
        return max((self._chosen[model].profile.min_service_time(n) for model, n in waiting if n), default=0.0)
