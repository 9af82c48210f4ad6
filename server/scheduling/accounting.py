"""What follows a batch: the results go to its calls, and then the batch to the metrics, the log and the controller."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from policies.queue.batcher import Batcher
from policies.types import Request
from server.backends.executor import Completion
from server.scheduling.admission import Admission
from server.scheduling.calls import BatchRun, Sample
from server.scheduling.forecast import Forecast
from server.telemetry.batch_record import BatchRecord
from server.telemetry.logs import log_batch
from server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.dispatcher")


class Accounting:
    """Fans out the results of batches, and accounts for them afterwards.

    Attributes:
        tracing: links the spans of calls and batches; None: nothing is traced.
        on_served: called after each whole batch, with model, size, time to the launch of the next batch, s, or service
            time if the device began none, the length of the longest request, 0 where requests do not differ, and the
            CPU time, s, or None.
        on_unprofiled_work: called in its place with a model that ran single stages, a failed attempt, or beside other
            work, whose times or energy the profile does not predict.
        shared: whether a model is being loaded on the device. Its batches disturb service times and energies, so that
            none of these are reported to `on_served`.
    """

    tracing: "Tracing | None" = None
    on_served: Callable[[str, int, float, float, float | None], None] | None = None
    on_unprofiled_work: Callable[[str], None] | None = None
    shared = False

    def __init__(
        self, device: str, batcher: Batcher, forecast: Forecast, admission: Admission, metrics: Metrics
    ) -> None:
        """`device` is its name in the metrics; `admission` learns how late answers are."""
        self._device = device
        self._batcher = batcher
        self._forecast = forecast
        self._admission = admission
        self._metrics = metrics

    def answer(self, run: BatchRun, completion: Completion, finished: Sequence[Request], now: float) -> None:
        """Give the results of a batch to the calls of its `finished` requests at `now`, s, and account for it later."""
        batch = self._record(run, completion, finished)
        if self.tracing is not None:
            self.tracing.batch(batch)
        for request in finished:
            sample: Sample = request.payload
            sample.output, sample.data, sample.input = sample.data, None, None
            sample.batch_size, sample.device, sample.energy_source = batch.size, batch.device, batch.energy_source
            sample.waiting = request.started - request.arrival
            sample.service = batch.service if batch.whole else batch.ended - request.started
            call = sample.call
            call.complete()
            if not call.missing and call.level == 1:  # others are overtaken
                self._admission.observe(call.earliest, now)
        asyncio.get_running_loop().call_soon(self._account, batch, self._batcher.queue_length)

    def unprofiled(self, model: str) -> None:
        """Report work of a model that its profile does not predict."""
        self._report(self.on_unprofiled_work, model)

    def idle_gap(self, seconds: float) -> None:
        """Count the time between two batches while a request waited, s."""
        self._metrics.idle_gap(self._device, seconds)

    def _record(self, run: BatchRun, completion: Completion, finished: Sequence[Request]) -> BatchRecord:
        energy = self._forecast.energy(run.batch)
        run.record_outputs(completion, energy)
        return BatchRecord(
            self._device,
            run.policy,
            run.launch,
            run.batch.first_stage,
            run.whole,
            finished,
            completion.started,
            completion.finished,
            energy,
            self._forecast.energy_source(run.batch),
            completion.next_started,
            completion.cpu_time,
        )

    def _account(self, batch: BatchRecord, waiting: int) -> None:
        """Report a batch, with the queue length at its end, to the metrics, the log and the controller."""
        self._metrics.batch_completed(batch)
        self._metrics.requests_completed(batch.device, batch.finished)
        log_batch(batch, waiting)
        if self.shared or not batch.whole or batch.launch.requests[0].kind.retired:
            self._report(self.on_unprofiled_work, batch.model)
        elif self.on_served is not None:
            longest = max([request.payload.length for request in batch.launch.requests])
            self._report(self.on_served, batch.model, batch.size, batch.cycle, longest, batch.cpu_time)

    def _report(self, observer: Callable[..., None] | None, *work: Any) -> None:
        """Report work of the device to the controller."""
        if observer is None:
            return
        try:
            observer(*work)
        except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
            _log.exception("the controller failed; the policy stays as it is from now on")
            self.on_served = self.on_unprofiled_work = None
