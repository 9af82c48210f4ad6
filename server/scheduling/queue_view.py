"""What is known of a device's queue: its length, the age of its requests, and the measured arrival rates.

For metrics, pages and the controller; a policy gets the rates in its `State`.
"""

from collections.abc import Callable, Mapping

from policies.catalog import ModelPolicy
from policies.queue.batcher import Batcher
from policies.queue.monitor import LevelShares
from policies.rules.per_kind import slowdowns

_NEGLIGIBLE = 1e-3  # 1/s; a lower rate is reported as 0, since the estimate decays for ever


class QueueView:
    """Reads the queue of a device."""

    def __init__(self, batcher: Batcher, chosen: Mapping[str, ModelPolicy], clock: Callable[[], float]) -> None:
        """`chosen` are the present policies by model; `clock` is the batcher's, s."""
        self._batcher = batcher
        self._chosen = chosen
        self._clock = clock

    @property
    def waiting(self) -> int:
        """The number of waiting requests, of all models."""
        return self._batcher.queue_length

    def length(self, model: str) -> int:
        """Return the number of waiting requests of `model`."""
        return self._batcher.waiting_of(model)

    def length_of_level(self, model: str, level: int) -> int:
        """Return the number of waiting requests of `model` of this priority level."""
        return self._batcher.waiting_through(model, level) - self._batcher.waiting_through(model, level - 1)

    def oldest_age(self, model: str) -> float:
        """Return the age of the oldest waiting request of `model`, s; 0 without one."""
        return max(self._clock() - self._batcher.oldest_of(model), 0.0)

    def arrival_rate(self, model: str) -> float:
        """Return the measured arrival rate of `model`, 1/s; 0 if it is negligible."""
        rates = self._batcher.monitor.rates(self._clock())
        rate = sum(rate for key, rate in rates.items() if key.model == model)
        return rate if rate >= _NEGLIGIBLE else 0.0

    def level_shares(self, model: str) -> LevelShares | None:
        """Return the shares of the priority levels of `model` in its arrivals; None if it has one."""
        return self._batcher.level_shares(model)

    def slowdown(self, model: str) -> float:
        """Return the factor by which other models slow the device down in the table of `model`; 1 if it has none."""
        if not self._chosen[model].uses_slowdown:
            return 1.0
        profiles = {name: each.profile for name, each in self._chosen.items()}
        return slowdowns(self._batcher.monitor.rates(self._clock()), profiles).get(model, 1.0)
