"""The way out of the house: what came of a batch goes to its calls, the metrics, the log and the trace."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.types import Launch, Request
from server.calls import Answer, Call
from server.executor import Completion
from server.logs import log_batch
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Served:
    """A batch that the device has finished.

    Attributes:
        policy: name of the one that launched it.
        launch: as it decided.
        finished: those of the launch whose answers this is, and who are still here.
        completion: what the device made of it, and when, s.
        energy: of the whole batch by the profile, J; None where unknown.
    """

    policy: str
    launch: Launch
    finished: Sequence[Request]
    completion: Completion
    energy: float | None

    @property
    def service(self) -> float:
        """Its time on the device, s."""
        return self.completion.finished - self.completion.started


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
        share = None if served.energy is None else served.energy / size
        outputs = dict(zip((r.id for r in batch), served.completion.outputs, strict=True))
        complete = []
        for request in served.finished:
            answer = Answer(outputs[request.id], size, request.started - request.arrival, service, share)
            call = request.payload.call
            call.answer(request.payload.index, answer)
            if not call.missing:
                complete.append(call)
        return complete
