"""The way out of the house: what came of a batch goes to its calls, the metrics, the log and the trace."""

import asyncio
from typing import TYPE_CHECKING

from server.calls import Answer, Call, Served
from server.logs import log_batch
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.tracing import Tracing


class Delivery:
    """Gives answers out.

    Attributes:
        tracing: ties calls to their batches; None: nothing is traced.
    """

    tracing: "Tracing | None" = None

    def __init__(self, device: str, metrics: Metrics) -> None:
        """`device` is its name in metrics and logs."""
        self._device = device
        self._metrics = metrics

    def call(self, n: int, earliest: float) -> Call:
        """A call of `n` samples that has just come, and that could be answered at `earliest`, s, at the least."""
        span = None if self.tracing is None else self.tracing.current()
        return Call(asyncio.get_running_loop().create_future(), n, earliest, span)

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
            answer = Answer(sample.input, size, request.started - request.arrival, on_device, sample.energy)
            sample.call.answer(sample.index, answer)
            if not sample.call.missing:
                complete.append(sample.call)
        return complete
