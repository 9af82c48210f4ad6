"""The way out of the house: what came of a batch goes to its calls, the metrics, the log and the trace."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.types import Launch, Request
from server.calls import Answer, Call
from server.executor import Batch, Completion
from server.logs import log_batch
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Served:
    """A batch that the device has finished, or some stages of one.

    Attributes:
        policy: name of the one that launched it.
        launch: as it decided.
        batch: as the device was given it.
        completion: what the device made of it, and when, s.
        finished: those of the launch who have passed all stages, and who are still here.
        energy: of the batch by the profile, J; None where unknown.
    """

    policy: str
    launch: Launch
    batch: Batch
    completion: Completion
    finished: Sequence[Request]
    energy: float | None

    @property
    def service(self) -> float:
        """Its time on the device, s."""
        return self.completion.finished - self.completion.started

    @property
    def whole(self) -> bool:
        """Whether this was all of the model in one launch."""
        return self.batch.stages is None and not self.batch.first_stage

    def hand_on(self) -> None:
        """What one stage gave is what the next one takes; and each sample bears its share of the energy."""
        share = None if self.energy is None else self.energy / len(self.launch.requests)
        for request, output in zip(self.launch.requests, self.completion.outputs, strict=True):
            request.payload.input = output
            if share is not None:
                request.payload.energy = share + (request.payload.energy or 0.0)


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
        self._metrics.batch(self._device, served.policy, served.launch, service, served.energy)
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
