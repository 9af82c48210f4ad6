"""What telemetry records of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.types import Launch, Request


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch that the device has completed, or some stages of one.

    Attributes:
        device: the device's name.
        policy: name of the policy that launched it.
        launch: the policy's decision.
        first_stage: the first stage that was run.
        whole: whether all stages of all its requests were run in this launch.
        finished: the requests that it completed.
        started: instant at which the device took it, s on time.monotonic's clock.
        ended: instant at which its outputs were ready, s.
        energy: by the profile, J; None where unknown.
        energy_source: how the profile's energies were obtained.
        tokens: number of tokens that the requests needed, and that the device computed.
        generated: number of tokens of each generated answer.
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
    tokens: tuple[int, int] = (0, 0)
    generated: Sequence[int] = ()

    @property
    def model(self) -> str:
        """The model's name; a batch is of one model."""
        return self.launch.requests[0].kind.model

    @property
    def size(self) -> int:
        """Number of requests in the batch."""
        return len(self.launch.requests)

    @property
    def service(self) -> float:
        """Time on the device, s."""
        return self.ended - self.started

    @property
    def waited(self) -> float:
        """Waiting time of its first request, s."""
        first = self.launch.requests[0]
        return first.started - first.arrival
