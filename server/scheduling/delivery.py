"""The way out of the house: what came of a batch goes to its calls, the metrics, the log and the trace."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from server.scheduling.calls import Answer, Asked, Call, Served
from server.telemetry.logs import log_batch
from server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.dispatcher")


class Delivery:
    """Gives answers out.

    Attributes:
        tracing: ties calls to their batches; None: nothing is traced.
        on_served: told of each whole batch that is answered: model, size, service time and response times, s.
        on_disturbed: told of a model that kept the device busy with something else than whole batches: single stages,
            or attempts that failed.
    """

    tracing: "Tracing | None" = None
    on_served: Callable[[str, int, float, Sequence[float]], None] | None = None
    on_disturbed: Callable[[str], None] | None = None

    def __init__(self, device: str, metrics: Metrics) -> None:
        """`device` is its name in metrics and logs."""
        self._device = device
        self._metrics = metrics

    def call(self, asked: Asked, earliest: float) -> Call:
        """A call that has just come, and that could be answered at `earliest`, s, at the least."""
        span = None if self.tracing is None else self.tracing.current()
        return Call(asyncio.get_running_loop().create_future(), asked, earliest, span)

    def answer(self, served: Served, now: float, queue_length: int) -> list[Call]:
        """Answer who waits for this batch; `now` in s, `queue_length` are those who still wait.

        Returns:
            The calls that this completes.
        """
        batch, service = served.launch.requests, served.service
        model, size = batch[0].kind.model, len(batch)
        self._metrics.batch(self._device, served)
        self._metrics.answered(self._device, served.finished, now)
        log_batch(
            model=model,
            device=self._device,
            policy=served.policy,
            reason=served.launch.reason,
            batch_size=size,
            service=service,
            waited=batch[0].started - batch[0].arrival,
            queue_length=queue_length,
            energy=served.energy,
        )
        if self.tracing is not None:
            self.tracing.batch(self._device, served)
        complete = []
        for request in served.finished:
            sample, ended = request.payload, served.completion.finished
            on_device = service if served.whole else ended - request.started
            waiting = request.started - request.arrival
            answer = Answer(sample.input, size, waiting, on_device, sample.energy, self._device)
            sample.call.answer(sample.index, answer)
            if not sample.call.missing:
                complete.append(sample.call)
        return complete

    def tell(self, served: Served, now: float) -> None:
        """Report an answered batch, at `now`, s, to the controller."""
        if not served.whole:
            self.disturb(served.batch.model)
        elif (on_served := self.on_served) is not None:
            responses = [now - request.arrival for request in served.finished]
            self._report(lambda: on_served(served.batch.model, len(served.batch.inputs), served.service, responses))

    def disturb(self, model: str) -> None:
        """Report that the device was busy with something else than a whole batch of `model`."""
        if (on_disturbed := self.on_disturbed) is not None:
            self._report(lambda: on_disturbed(model))

    def _report(self, report: Callable[[], None]) -> None:
        try:
            report()
        except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
            _log.exception("the controller failed; the policy stays as it is from now on")
            self.on_served = self.on_disturbed = None
