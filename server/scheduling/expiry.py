"""Expiry: requests whose timeout passes before they can be answered leave the queue."""

import asyncio
from collections.abc import Callable
from math import inf

from policies.queue.batcher import Batcher
from policies.types import Launch, Request
from server.errors import ExpiredError
from server.scheduling.admission import Admission
from server.scheduling.forecast import Forecast


class Expiry:
    """Drops expired requests, by a timer also while the device is busy, and those that the next launch would fail."""

    def __init__(
        self,
        batcher: Batcher,
        forecast: Forecast,
        admission: Admission,
        clock: Callable[[], float],
        withdraw: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """`withdraw` takes back the standby launch; `on_change` is called after the timer has dropped requests."""
        self._batcher = batcher
        self._forecast = forecast
        self._admission = admission
        self._clock = clock
        self._withdraw = withdraw
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def set_timer(self) -> None:
        """Set the timer to the next expiry, unless it is set to an earlier one."""
        at = self._batcher.next_expiry()
        if at == inf:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._on_timer)

    def drop_expired(self, now: float) -> None:
        """Drop the requests whose timeout has passed at `now`, s."""
        if self._batcher.next_expiry() <= now:
            self._withdraw()
        for request in self._batcher.expire(now):
            self._fail(request, now, now)

    def drop_late(self, now: float) -> None:
        """Drop the requests of a launch at `now`, s, whose timeout passes before it can complete."""
        while (expiry := self._batcher.next_expiry()) < inf and expiry < now + self._forecast.next_launch_bound():
            action = self._batcher.next_action(now)
            if not isinstance(action, Launch):
                return
            end = now + self._forecast.least_time_of(action)
            late = [request for request in action.requests if request.expires < end]
            if not late:
                return
            for request in late:
                self._batcher.cancel(request)
                self._fail(request, now, end)

    def _on_timer(self) -> None:
        self._timer = None
        self.drop_expired(self._clock())
        self._on_change()
        self.set_timer()

    def _fail(self, request: Request, now: float, answered: float) -> None:
        call, waited = request.payload.call, 1e3 * (now - request.arrival)
        self._admission.observe(call.earliest, answered)
        passes = "passed" if request.expires <= now else "would pass"
        call.fail(ExpiredError(f"after {waited:.0f} ms the timeout {passes} before an answer"))
