"""Calls, whose samples are queued as separate requests and answered together, and the batches that serve them."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from policies.catalog import ModelPolicy
from policies.types import Launch, Request
from server.backends.executor import Batch, Completion, Standby
from server.errors import ServerError


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of a call, from its input to its result; the payload of its request.

    Attributes:
        input: as the model's codec made it; None once it was served.
        length: by which the service time differs; 0 where requests do not differ.
        shape: only samples of equal shapes share a batch; empty where the shapes do not differ.
        call: the call that it belongs to, from when that is queued until it is answered.
        data: input of its next stage.
        output: as the model's codec renders it; None until it was served.
        batch_size: size of the batch that completed it.
        waiting: waiting time from arrival to launch, s.
        service: service time of its batch, s; with stages, from its launch to the end of its last stage.
        energy: its share of the energy of its batches so far by the profile, J; None where unknown.
        cpu_time: its share of the CPU time of its batches so far, s; None where that is not counted.
        energy_source: source of the profile's energies; empty until it was served.
        device: name of the device that served it.
    """

    input: Any
    length: float = 0.0
    shape: str = ""
    call: "InferenceCall" = field(init=False)
    data: Any = None
    output: Any = None
    batch_size: int = 0
    waiting: float = 0.0
    service: float = 0.0
    energy: float | None = None
    cpu_time: float | None = None
    energy_source: str = ""
    device: str = ""


class InferenceCall:
    """One call: its samples, and the future of their results.

    Attributes:
        future: the samples when all are served.
        model: name of the model.
        samples: at least one; empty once the future is done.
        arrival: instant of arrival, s.
        expires: instant at which the client's timeout passes, s.
        earliest: the earliest possible instant of its answers, estimated at arrival, s; 0 where unknown.
        span: its tracing span; None where it is not traced.
        requests: its requests that are queued or in service.
        missing: number of samples without an output.
        losses: number of devices that were lost while they served it.
        id: of the model whose codec made its inputs.
        level: priority level; 1 is the first.
        urgent_from: instant from which its requests precede all levels, s.
    """

    __slots__ = (
        *("arrival", "earliest", "expires", "future", "losses", "missing", "model", "requests", "id"),
        *("level", "samples", "span", "urgent_from"),
    )

    def __init__(
        self,
        future: "asyncio.Future[list[Sample]]",
        model: str,
        samples: Sequence[Sample],
        *,
        arrival: float,
        expires: float,
        earliest: float,
        span: Any = None,
        id: str = "",
        level: int = 1,
        urgent_from: float = inf,
    ) -> None:
        self.future = future
        self.model = model
        self.samples = list(samples)
        for sample in samples:
            sample.call = self
        self.arrival = arrival
        self.expires = expires
        self.earliest = earliest
        self.span = span
        self.requests: list[Request] = []
        self.missing = len(samples)
        self.losses = 0
        self.id = id or model
        self.level = level
        self.urgent_from = urgent_from

    def make_requests(self, chosen: ModelPolicy, ids: Iterator[int]) -> list[Request]:
        """Make a request for each sample without an output.

        Args:
            chosen: the model's policy and profile.
            ids: supplies the ids of the requests.
        """
        deadline, stages = self.arrival + chosen.slo, chosen.profile.stages
        for sample in self.samples:
            if sample.output is None:
                size = chosen.profile.time_alone(sample.length)
                kind = chosen.arriving(self.model, size, sample.shape)
                sample.data, sample.energy, sample.cpu_time = sample.input, None, None
                self.requests.append(
                    Request(
                        *(next(ids), self.arrival, kind, deadline, self.expires, size, stages, sample),
                        length=sample.length,
                        level=self.level,
                        urgent_from=self.urgent_from,
                    )
                )
        return self.requests

    def lose_device(self) -> None:
        """Count the loss of its device if that was serving it, since the call may have caused the loss."""
        self.losses += any(r.started < inf and r.payload.output is None for r in self.requests)
        self.earliest = 0.0  # its response time is no measure of the lateness of another device

    def complete(self) -> None:
        """Count one more sample with an output; the last one completes the call."""
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            for sample in self.samples:
                del sample.call  # it has the future, whose result they are: a cycle that only the collector would free
            self.future.set_result(self.samples)

    def fail(self, error: ServerError) -> None:
        """End the whole call with this error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


def fail_all(calls: Iterable[InferenceCall], error: ServerError) -> None:
    """End all calls with this error."""
    for call in calls:
        call.fail(error)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch from launch to completion, or some stages of one.

    Attributes:
        policy: name of the policy that launched it.
        launch: the policy's decision.
        batch: the batch given to the device.
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

    def record_outputs(self, completion: Completion, energy: float | None) -> None:
        """Make the outputs the inputs of the next stage, and add each request's share of energy, J, and CPU time."""
        share = None if energy is None else energy / len(self.launch.requests)
        cpu_time = None if completion.cpu_time is None else completion.cpu_time / len(self.launch.requests)
        for request, output in zip(self.launch.requests, completion.outputs, strict=True):
            request.payload.data = output
            if share is not None:
                request.payload.energy = share + (request.payload.energy or 0.0)
            if cpu_time is not None:
                request.payload.cpu_time = cpu_time + (request.payload.cpu_time or 0.0)


def make_batch(launch: Launch, standby: Standby, continues: bool = False) -> Batch:
    """Make the batch of a launch; without inputs if it `continues` the batch in service, whose outputs they will be."""
    first = launch.requests[0]
    inputs = [] if continues else [r.payload.data for r in launch.requests]
    return Batch(first.kind.model, inputs, first.stage, launch.stages, standby, first.payload.call.id)
