"""The samples of one HTTP call inside the house: separate requests, answered together."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from policies.catalog import Chosen
from policies.types import Launch, Request
from server.backends.executor import Batch, Completion, Onward
from server.errors import ServerError
from server.models.text import GeneratedTokens, TextSample


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        output: float32 [classes], or `GeneratedTokens`.
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


class Call:
    """One call: its requests, and the future of their answers.

    Attributes:
        future: of the answers, in the order of the inputs.
        model: name of the model.
        inputs: decoded samples, as the model's `samples` made them.
        sizes: predicted service time of each sample when served alone, s; empty where requests do not differ.
        arrival: instant of arrival, s.
        expires: instant after which the client does not want the answer any more, s.
        earliest: the earliest possible instant of its answers at arrival, s; 0 where unknown.
        span: its span, if it is traced.
        requests: those in the queue or in service.
        answers: by sample; None where there is none yet.
        missing: number of samples without an answer.
        losses: number of devices that were lost while they served it.
    """

    __slots__ = (
        *("answers", "arrival", "earliest", "expires", "future", "inputs", "losses", "missing", "model", "requests"),
        *("sizes", "span"),
    )

    def __init__(
        self,
        future: "asyncio.Future[list[Answer]]",
        model: str,
        inputs: Sequence[Any],
        sizes: Sequence[float],
        *,
        arrival: float,
        expires: float,
        earliest: float,
        span: Any = None,
    ) -> None:
        self.future = future
        self.model = model
        self.inputs = inputs
        self.sizes = sizes
        self.arrival = arrival
        self.expires = expires
        self.earliest = earliest
        self.span = span
        self.requests: list[Request] = []
        self.missing = len(inputs)
        self.answers: list[Any] = [None] * self.missing
        self.losses = 0

    def make_requests(self, chosen: Chosen, ids: Iterator[int]) -> list[Request]:
        """Make a request for each sample without an answer.

        Args:
            chosen: the model's policy and profile.
            ids: the requests take the next of them.
        """
        for index, sample in enumerate(self.inputs):
            if self.answers[index] is None:
                size = self.sizes[index] if self.sizes else 0.0
                kind = chosen.arriving(self.model, size)
                request = Request(next(ids), self.arrival, kind, self.arrival + chosen.slo, self.expires, size)
                request.stages = sample.decode_steps if isinstance(sample, TextSample) else chosen.profile.stages
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
class BatchRun:
    """One batch from launch to completion, or some stages of one.

    Attributes:
        policy: name of the policy that launched it.
        launch: the policy's decision.
        batch: as the device gets it.
        running: its completion.
    """

    policy: str
    launch: Launch
    batch: Batch
    running: "asyncio.Future[Completion]"

    @property
    def whole(self) -> bool:
        """Whether it runs all stages of all its requests."""
        end = self.batch.last_stage
        return not self.batch.first_stage and (end is None or all(end >= r.stages for r in self.launch.requests))

    def hand_on(self, completion: Completion, energy: float | None) -> None:
        """Make the outputs the inputs of the next stage, and add each request's share of the energy, J."""
        share = None if energy is None else energy / len(self.launch.requests)
        for request, output in zip(self.launch.requests, completion.outputs, strict=True):
            request.payload.input = output
            if share is not None:
                request.payload.energy = share + (request.payload.energy or 0.0)


def end_early(launch: Launch, requests: Sequence[Request], completion: Completion) -> None:
    """How many iterations a text takes shows when its end comes: these were its last stages."""
    if launch.stages is None:
        return
    for request, output in zip(requests, completion.outputs, strict=True):
        if isinstance(output, GeneratedTokens):
            request.stages = min(request.stages, request.stage + launch.stages)


def batch_of(launch: Launch) -> Batch:
    """What the device is given for a launch."""
    first = launch.requests[0]
    onward = None if launch.stages is None else Onward()
    return Batch(first.kind.model, [r.payload.input for r in launch.requests], first.stage, launch.stages, onward)


def batch_after(batch: Batch, then: Launch) -> Batch:
    """What it is given for the next launch of the same requests; the inputs come from the batch before."""
    return Batch(batch.model, batch.inputs, batch.last_stage or 0, then.stages, batch.onward)
