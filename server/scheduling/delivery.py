"""Fan-out of results: from a completed batch to its calls, the metrics, the log and the trace."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from server.scheduling.calls import Answer, Call
from server.telemetry.batch_record import BatchRecord
from server.telemetry.logs import log_batch
from server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.dispatcher")


class Delivery:
    """Delivers the results of completed batches.

    Attributes:
        tracing: links the spans of calls and batches; None: nothing is traced.
        on_served: called after each whole batch, with model, size, service time and response times, s.
        on_unprofiled_work: called with a model that ran single stages or a failed attempt, whose energy the profile
            does not predict.
    """

    tracing: "Tracing | None" = None
    on_served: Callable[[str, int, float, Sequence[float]], None] | None = None
    on_unprofiled_work: Callable[[str], None] | None = None

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def current_span(self) -> Any:
        """The span of the request that is being handled, or None."""
        return None if self.tracing is None else self.tracing.current()

    def answer(self, batch: BatchRecord, now: float, queue_length: int) -> list[Call]:
        """Record a completed batch and answer the requests that it finished.

        Args:
            batch: the batch.
            now: the current instant, s.
            queue_length: number of requests that wait now.

        Returns:
            The calls that this completes.
        """
        self._metrics.batch_completed(batch)
        self._metrics.requests_completed(batch.device, batch.finished, now)
        log_batch(batch, queue_length)
        if self.tracing is not None:
            self.tracing.batch(batch)
        complete = []
        for request in batch.finished:
            sample = request.payload
            service = batch.service if batch.whole else batch.ended - request.started
            waiting = request.started - request.arrival
            answer = Answer(sample.input, batch.size, waiting, service, sample.energy, batch.device)
            sample.call.answer(sample.index, answer)
            if not sample.call.missing:
                complete.append(sample.call)
        return complete

    def report(self, batch: BatchRecord, now: float) -> None:
        """Report an answered batch to the controller at `now`, s."""
        if not batch.whole:
            self.report_unprofiled_work(batch.model)
        elif (on_served := self.on_served) is not None:
            responses = [now - request.arrival for request in batch.finished]
            self._report(lambda: on_served(batch.model, batch.size, batch.service, responses))

    def report_unprofiled_work(self, model: str) -> None:
        """Report to the controller that the device ran single stages or a failed attempt of `model`."""
        if (on_unprofiled_work := self.on_unprofiled_work) is not None:
            self._report(lambda: on_unprofiled_work(model))

    def _report(self, report: Callable[[], None]) -> None:
        try:
            report()
        except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
            _log.exception("the controller failed; the policy stays as it is from now on")
            self.on_served = self.on_unprofiled_work = None
