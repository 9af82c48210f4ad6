"""What follows a stage, decided while the device is still at work on it."""

import logging
from collections.abc import Callable
from dataclasses import replace

from policies.queue.batcher import Batcher
from policies.types import Launch
from server.backends.executor import Batch, Onward
from server.scheduling.calls import BatchRun, batch_after
from server.scheduling.forecast import Forecast

_log = logging.getLogger("batchwright.dispatcher")
_FAR = 8  # launches: what is decided is withdrawn with the next arrival


class Ahead:
    """Lets the device go on with the batch that it serves, for as long as the policy wants just that.

    What is decided is what the policy would decide at the end of each stage if nothing happened until then; when
    something does, it is withdrawn, and the policy is asked at the next end as always.
    """

    def __init__(self, batcher: Batcher, forecast: Forecast, clock: Callable[[], float]) -> None:
        """The dispatcher's own; `clock` in s."""
        self._batcher = batcher
        self._forecast = forecast
        self._clock = clock
        self._offered: Onward | None = None

    def look(self, launch: Launch, batch: Batch, policy: str) -> list[BatchRun]:
        """What the device goes on with, one after the other, after a batch that has just begun, unless withdrawn."""
        onward, end, found = batch.onward, self._clock(), list[BatchRun]()
        self._offered = onward
        if onward is None or self._batcher.next_expiry() < end + self._forecast.least(batch):
            return found  # with somebody who would have to be dropped
        then = launch
        try:
            while len(found) < _FAR:
                end += self._forecast.expected(batch)
                following = self._batcher.lookahead(then, end)
                if following is None:
                    break
                then, batch = following, batch_after(batch, following)
                mine = replace(then, requests=launch.requests)
                found.append(BatchRun(policy, mine, batch, onward.offer(batch)))
        except Exception:  # noqa: BLE001  (it will break again at the end, where greedy service takes over)
            _log.warning("the policy failed on what is ahead; it is asked again at the end of the stage", exc_info=True)
        return found

    def withdraw(self) -> None:
        """Something has happened: the policy has to be asked anew."""
        if self._offered is not None:
            self._offered.withdraw()
