"""Lookahead: the policy's decisions for the following stages, made while the device runs the current one."""

import logging
from dataclasses import replace

from policies.queue.batcher import Batcher
from server.backends.executor import StandbyLaunches
from server.scheduling.calls import BatchRun, next_batch
from server.scheduling.forecast import Forecast

_log = logging.getLogger("batchwright.dispatcher")
_MAX_LAUNCHES = 8  # more would seldom be used: the next arrival withdraws them


def offer_standby_launches(
    batcher: Batcher, forecast: Forecast, run: BatchRun, standby: StandbyLaunches, now: float
) -> list[BatchRun]:
    """Offer the device further stages of the batch whose service begins `now`, s, and return them in order.

    A standby launch is the policy's decision for the end of a stage if the queue does not change until then. Offers end
    where the policy would launch other requests or wait. When the queue changes, the dispatcher withdraws the offers,
    and the policy decides at the end of the current stage.
    """
    batch, end, offered = run.batch, now, list[BatchRun]()
    if batcher.next_expiry() < end + forecast.least_time(batch):
        return offered  # at the end of the stage a request may have to be dropped
    following = run.launch
    try:
        while len(offered) < _MAX_LAUNCHES:
            end += forecast.expected_time(batch)
            decided = batcher.lookahead(following, end)
            if decided is None:
                break
            following, batch = decided, next_batch(batch, decided)
            own = replace(following, requests=run.launch.requests)
            offered.append(BatchRun(run.policy, own, batch, standby.offer(batch)))
    except Exception:  # noqa: BLE001  (it fails again at the end of the stage, and is then replaced by greedy)
        _log.warning("the policy failed in the lookahead; it decides again at the end of the stage", exc_info=True)
    return offered
