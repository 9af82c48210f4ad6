"""Lookahead: the policy's decisions for the following stages, made while the device runs the current one."""

import logging
from collections.abc import Callable
from dataclasses import replace

from policies.queue.batcher import Batcher
from policies.types import Launch
from server.backends.executor import Batch, StandbyLaunches
from server.scheduling.calls import BatchRun, next_batch
from server.scheduling.forecast import Forecast

_log = logging.getLogger("batchwright.dispatcher")
_MAX_LAUNCHES = 8  # more would seldom be used: the next arrival withdraws them


class Lookahead:
    """Offers the device standby launches: further stages of the batch in service.

    A standby launch is the policy's decision for the end of a stage if the queue does not change until then. Offers end
    where the policy would launch other requests or wait. When the queue changes, the offers are withdrawn, and the
    policy decides at the end of the current stage.
    """

    def __init__(self, batcher: Batcher, forecast: Forecast, clock: Callable[[], float]) -> None:
        """`batcher` and `forecast` are the dispatcher's; `clock` returns the current instant, s."""
        self._batcher = batcher
        self._forecast = forecast
        self._clock = clock
        self._standby: StandbyLaunches | None = None

    def offer(self, launch: Launch, batch: Batch, policy: str) -> list[BatchRun]:
        """Offer the standby launches that follow a batch whose service has just begun, and return them in order."""
        standby, end, offered = batch.standby, self._clock(), list[BatchRun]()
        self._standby = standby
        if standby is None or self._batcher.next_expiry() < end + self._forecast.least_time(batch):
            return offered  # at the end of the stage a request may have to be dropped
        following = launch
        try:
            while len(offered) < _MAX_LAUNCHES:
                end += self._forecast.expected_time(batch)
                decided = self._batcher.lookahead(following, end)
                if decided is None:
                    break
                following, batch = decided, next_batch(batch, decided)
                own = replace(following, requests=launch.requests)
                offered.append(BatchRun(policy, own, batch, standby.offer(batch)))
        except Exception:  # noqa: BLE001  (it fails again at the end of the stage, and is then replaced by greedy)
            _log.warning("the policy failed in the lookahead; it decides again at the end of the stage", exc_info=True)
        return offered

    def withdraw(self) -> None:
        """Withdraw the standby launches that the device has not taken, since the queue or the policy has changed."""
        if self._standby is not None:
            self._standby.withdraw()
