"""Lookahead: while a batch runs, the policy's decision for its end is kept ready, so that the device need not wait.

That launch is offered to the device in a `Standby`, from which it is taken at the end, or withdrawn before.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from policies.catalog import ModelPolicy
from policies.queue.batcher import Batcher
from server.backends.executor import Standby
from server.scheduling.calls import BatchRun, make_batch
from server.scheduling.forecast import Forecast

_PATIENCE = 0.1  # of the expected service time: a batch that takes longer than predicted is overdue after it
_LEAST_PATIENCE = 1e-3  # s
_log = logging.getLogger("batchwright.dispatcher")


class Lookahead:
    """Offers the device one standby launch: the decision for the predicted end of the batch in service.

    The decision is made again at most once in each turn of the event loop, after the queue or the policy has changed,
    and while the batch takes longer than predicted.
    Where the policy would wait, or a request might expire before, nothing is offered: the dispatcher then decides after
    the end of the batch.

    Attributes:
        standby: the place where it is offered, for the batches of the executor.
    """

    def __init__(
        self, batcher: Batcher, forecast: Forecast, chosen: Mapping[str, ModelPolicy], clock: Callable[[], float]
    ) -> None:
        """Decide by the policy of `batcher`; `chosen` names it by model, and `clock` is the executor's, s."""
        self.standby = Standby()
        self._batcher = batcher
        self._forecast = forecast
        self._chosen = chosen
        self._clock = clock
        self._running: BatchRun | None = None
        self._end = 0.0  # predicted end of the batch in service, s
        self._offered: BatchRun | None = None
        self._taken: BatchRun | None = None  # known to be in service, although the batch before is not complete
        self._overdue: asyncio.TimerHandle | None = None
        self._patience = 0.0  # s
        self._due = False  # whether the decision is to be made again in this turn of the loop

    def begin(self, run: BatchRun, at: float) -> None:
        """Offer the launch that follows a batch whose service began `at`, s."""
        expected = self._forecast.expected_time(run.batch)
        self._running, self._end, self._patience = run, at + expected, max(_LEAST_PATIENCE, _PATIENCE * expected)
        self._set_timer(self._end - self._clock())
        self._decide()

    def _set_timer(self, remaining: float) -> None:
        """Decide again when the batch is overdue, and at intervals from then on."""
        loop = asyncio.get_running_loop()
        self._overdue = loop.call_later(max(0.0, remaining) + self._patience, self._on_overdue)

    def _on_overdue(self) -> None:
        self._set_timer(0.0)
        self._decide()

    def change(self) -> None:
        """Decide again soon, since the queue or the policy has changed."""
        if self._running is not None and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._decide)

    def withdraw(self) -> None:
        """Withdraw the offer, since requests are to be removed; if the device has taken it, they are in service."""
        self._settle(self._clock())

    def end(self, at: float) -> BatchRun | None:
        """The batch in service ended `at`, s: return the standby launch that the device has taken after it, if any."""
        self._settle(at)
        self._running = None
        if self._overdue is not None:
            self._overdue.cancel()
        taken, self._taken = self._taken, None
        return taken

    def _settle(self, at: float) -> None:
        """Withdraw the offer; if the device has taken it, it is in service from `at` on, s."""
        offered, self._offered = self._offered, None
        if offered is not None and not self.standby.withdraw():
            self._batcher.take_ahead(offered.launch, at)
            self._taken = offered

    def _decide(self) -> None:
        self._due = False
        if self._running is None or self._taken is not None:
            return
        following = self._following(self._running)
        before = self._offered
        if before is not None and following is not None and before.launch == following.launch:
            return
        self._settle(self._clock())
        if following is not None and self._taken is None:
            self._offered = following
            self.standby.offer(following.batch, following.running)

    def _following(self, run: BatchRun) -> BatchRun | None:
        """The launch that follows a batch, if nothing changes before its end."""
        at = max(self._end, self._clock())
        expiry = self._batcher.next_expiry()
        if expiry < inf and expiry < at + self._forecast.next_launch_bound():
            return None  # at the end a request may have to be dropped
        try:
            launch = self._batcher.lookahead(run.launch, at)
        except Exception:  # noqa: BLE001  (it fails again at the end of the batch, and is then replaced by greedy)
            _log.warning("the policy failed in the lookahead; it decides again at the end of the batch", exc_info=True)
            return None
        if launch is None:
            return None
        continues = run.launch.stages is not None and launch.requests[0].id in {r.id for r in run.launch.requests}
        batch = make_batch(launch, self.standby, continues)
        own = replace(launch, requests=run.launch.requests) if continues else launch
        done = asyncio.get_running_loop().create_future()
        return BatchRun(self._chosen[batch.model].name, own, batch, done)
