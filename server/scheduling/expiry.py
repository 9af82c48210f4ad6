"""Time-outs of clients: who leaves unserved."""

from policies.queue.batcher import Batcher
from policies.types import Launch, Request
from server.errors import ExpiredError
from server.scheduling.admission import Admission
from server.scheduling.forecast import Forecast


class Expiry:
    """Lets those go whose answer nobody wants any more, or would not when it is there."""

    def __init__(self, batcher: Batcher, forecast: Forecast, admission: Admission) -> None:
        """The dispatcher's own."""
        self._batcher = batcher
        self._forecast = forecast
        self._admission = admission

    def leave(self, now: float) -> None:
        """Whose time-out has passed by `now`, s, leaves."""
        for request in self._batcher.expire(now):
            self._fail(request, now, now)

    def drop_doomed(self, now: float) -> None:
        """Whom the next launch would answer too late leaves before it: nobody is served for nobody."""
        while self._batcher.next_expiry() < now + self._forecast.horizon():
            action = self._batcher.policy.decide(self._batcher.state(now))
            batch = action.requests if isinstance(action, Launch) else ()
            by = now + self._forecast.least_of(action) if isinstance(action, Launch) else now
            doomed = [request for request in batch if request.expires < by]
            if not doomed:
                return
            for request in doomed:
                self._batcher.cancel(request)
                self._fail(request, now, by)

    def _fail(self, request: Request, now: float, by: float) -> None:
        call, waited = request.payload.call, 1e3 * (now - request.arrival)
        self._admission.seen(call.earliest, by)
        passes = "passed" if request.expires <= now else "would pass"
        call.fail(ExpiredError(f"after {waited:.0f} ms the time-out {passes} before an answer"))
