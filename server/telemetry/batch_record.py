"""The record of a completed batch, for metrics, history and tracing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.types import Launch, Request


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A completed batch, or some completed stages of one.

    Attributes:
        device: the device's name.
        policy: name of the policy that launched the batch.
        launch: the policy's decision.
        first_stage: the first stage that was run.
        whole: whether all stages of all requests were run in this launch.
        finished: the requests that the batch completed.
        started: start of service on the device, s of time.monotonic.
        ended: completion, s of time.monotonic.
        energy: energy by the profile, J; None if unknown.
        energy_source: how the profile's energies were obtained.
        next_started: start of the batch that the device began by itself after it, s; None if it began none.
        cpu_time: user and system time of the device's process, s; None where it is not counted.
    """

    device: str
    policy: str
    launch: Launch
    first_stage: int
    whole: bool
    finished: Sequence[Request]
    started: float
    ended: float
    energy: float | None
    energy_source: str
    next_started: float | None = None
    cpu_time: float | None = None

    def facts(self) -> dict[str, Any]:
        """What the log, the traces and the dashboard's table say of it; times in ms, energy in mJ."""
        return {
            "model": self.model,
            "device": self.device,
            "policy": self.policy,
            "reason": self.launch.reason,
            "batch_size": self.size,
            "waited_ms": round(1e3 * self.waited, 3),
            "service_ms": round(1e3 * self.service, 3),
            "energy_mj": None if self.energy is None else round(1e3 * self.energy, 3),
            "cpu_ms": None if self.cpu_time is None else round(1e3 * self.cpu_time, 3),
        }

    @property
    def model(self) -> str:
        """The model's name; all requests of a batch have the same model."""
        return self.launch.requests[0].kind.model

    @property
    def size(self) -> int:
        """Number of requests in the batch."""
        return len(self.launch.requests)

    @property
    def service(self) -> float:
        """Service time, s."""
        return self.ended - self.started

    @property
    def cycle(self) -> float:
        """Time to the launch of the next batch, which is what profiles measure, s; service time if none followed."""
        return (self.ended if self.next_started is None else self.next_started) - self.started

    @property
    def waited(self) -> float:
        """Waiting time of its first request, s."""
        first = self.launch.requests[0]
        return first.started - first.arrival
