"""The samples of one HTTP call inside the house: separate requests, answered together."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from policies.catalog import Chosen
from policies.types import Launch, Request
from server.backends.executor import Batch, Completion, Onward
from server.errors import ServerError
from server.models.text import Generated, Text


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        output: float32 [classes], or `Generated`.
        batch_size: size of the batch it was served in.
        waiting: arrival to launch, s.
        service: time of its batch on the device, s; by stages, from its launch to the end of its last stage.
        energy: its share of the batch's energy by the profile, J; None where unknown.
        device: name of the one that served it.
    """

    output: Any
    batch_size: int
    waiting: float
    service: float
    energy: float | None
    device: str


class Asked(NamedTuple):
    """What a call wants.

    Attributes:
        model: that is asked.
        inputs: decoded samples, uint8 [H, W, 3] or `Text` each.
        sizes: predicted service time of each when served alone, s; none where requests do not differ.
        arrival: instant of its arrival, s.
        expires: the instant after which the client no longer wants the answer, s.
    """

    model: str
    inputs: Sequence[Any]
    sizes: Sequence[float]
    arrival: float
    expires: float


class Call:
    """One call: its requests, and the future of their answers.

    Attributes:
        asked: what it wants.
        earliest: the least instant at which it could be answered when it came, s; 0 where nobody asked.
        losses: how many devices were lost while they served it.
        span: its span, where it is traced.
    """

    __slots__ = ("answers", "asked", "earliest", "future", "losses", "missing", "requests", "span")

    def __init__(self, future: "asyncio.Future[list[Answer]]", asked: Asked, earliest: float, span: Any = None) -> None:
        """Nothing is answered yet."""
        self.future = future
        self.asked = asked
        self.requests: list[Request] = []
        self.missing = len(asked.inputs)
        self.answers: list[Any] = [None] * self.missing
        self.earliest = earliest
        self.losses = 0
        self.span = span

    def ask(self, chosen: Chosen, ids: Iterator[int]) -> list[Request]:
        """A request for each sample that has no answer yet, as `chosen` has them, with the next of the `ids`."""
        model, inputs, sizes, arrival, expires = self.asked
        for index, sample in enumerate(inputs):
            if self.answers[index] is None:
                size = sizes[index] if sizes else 0.0
                kind = chosen.arriving(model, size)
                request = Request(next(ids), arrival, kind, arrival + chosen.slo, expires, size)
                request.stages = sample.iterations if isinstance(sample, Text) else chosen.profile.stages
                request.payload = Sample(sample, self, index)
                self.requests.append(request)
        return self.requests

    def lose(self) -> None:
        """Its device is lost; it counts where it was being served, and may have been the cause."""
        self.losses += any(r.started < inf and self.answers[r.payload.index] is None for r in self.requests)
        self.earliest = 0.0  # what comes of it now tells nothing about how late answers are

    def answer(self, index: int, answer: Answer) -> None:
        """The sample of this index is served; the last one's answer ends the call."""
        self.answers[index] = answer
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(self.answers)

    def fail(self, error: ServerError) -> None:
        """The whole call ends with this error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


def fail_all(calls: Iterable[Call], error: ServerError) -> None:
    """All of them end with this error."""
    for call in calls:
        call.fail(error)


@dataclass(slots=True)
class Sample:
    """What `Request.payload` holds here.

    Attributes:
        input: of its next stage; its output, when it has passed the last.
        call: whose sample it is.
        index: which one.
        energy: its share of what the stages so far took, J; None where unknown.
    """

    input: Any
    call: Call
    index: int
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class InService:
    """What the device works on.

    Attributes:
        policy: name of the one that launched it.
        launch: as it decided.
        batch: as the device was given it.
        running: its completion, once it is there.
    """

    policy: str
    launch: Launch
    batch: Batch
    running: "asyncio.Future[Completion]"


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
        energy_source: how the profile knows it.
    """

    policy: str
    launch: Launch
    batch: Batch
    completion: Completion
    finished: Sequence[Request]
    energy: float | None
    energy_source: str

    @property
    def service(self) -> float:
        """Its time on the device, s."""
        return self.completion.finished - self.completion.started

    @property
    def whole(self) -> bool:
        """Whether this was all of the model in one launch, for everybody in it."""
        end = self.batch.last_stage
        return not self.batch.first_stage and (end is None or all(end >= r.stages for r in self.launch.requests))

    def hand_on(self) -> None:
        """What one stage gave is what the next one takes; and each sample bears its share of the energy."""
        share = None if self.energy is None else self.energy / len(self.launch.requests)
        for request, output in zip(self.launch.requests, self.completion.outputs, strict=True):
            request.payload.input = output
            if share is not None:
                request.payload.energy = share + (request.payload.energy or 0.0)


def end_early(launch: Launch, requests: Sequence[Request], completion: Completion) -> None:
    """How many iterations a text takes shows when its end comes: these were its last stages."""
    if launch.stages is None:
        return
    for request, output in zip(requests, completion.outputs, strict=True):
        if isinstance(output, Generated):
            request.stages = min(request.stages, request.stage + launch.stages)


def batch_of(launch: Launch) -> Batch:
    """What the device is given for a launch."""
    first = launch.requests[0]
    onward = None if launch.stages is None else Onward()
    return Batch(first.kind.model, [r.payload.input for r in launch.requests], first.stage, launch.stages, onward)


def batch_after(batch: Batch, then: Launch) -> Batch:
    """What it is given for the next launch of the same requests; the inputs come from the batch before."""
    return Batch(batch.model, batch.inputs, batch.last_stage or 0, then.stages, batch.onward)
