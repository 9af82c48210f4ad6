"""What inference calls need of the fleet: the fleet itself has it, and so has a gateway's client of the fleet."""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol


class Result(Protocol):
    """The result of one sample; see `server.scheduling.calls.Sample`."""

    @property
    def output(self) -> Any:
        """As the model's codec renders it."""

    @property
    def batch_size(self) -> int:
        """Size of the batch that completed it."""

    @property
    def waiting(self) -> float:
        """Waiting time from arrival to launch, s."""

    @property
    def service(self) -> float:
        """Service time of its batch, s."""

    @property
    def energy(self) -> float | None:
        """Its share of the energy of its batches by the profile, J; None where unknown."""

    @property
    def energy_source(self) -> str:
        """Source of the profile's energies."""

    @property
    def device(self) -> str:
        """Name of the device that served it."""


class FleetInterface(Protocol):
    """Admits and serves calls; see `server.scheduling.fleet.Fleet`."""

    @property
    def shutting_down(self) -> bool:
        """Whether the shutdown has begun."""

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent to this server."""

    @property
    def alive(self) -> bool:
        """Whether the devices serve."""

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""

    def is_ready(self, model: str) -> bool:
        """Whether new calls of the model should be sent to this server."""

    def backlog(self) -> float:
        """The least time in which a device serves all its requests, s."""

    def check_loaded(self, model: str) -> None:
        """Check that a model is not unloaded.

        Raises:
            UnloadedError: it is.
        """

    def check_room(self, model: str, n: int, timeout: float = inf, pending: int = 0) -> None:
        """Check that `n` more samples would be admitted, while `pending` others are being decoded.

        Raises:
            RejectedError: they would not.
            UnavailableError: no device of the model works.
        """

    def submit(
        self,
        model: str,
        inputs: Sequence[Any],
        timeout: float = inf,
        sizes: Sequence[float] = (),
        shapes: Sequence[str] = (),
        revision: int = 0,
    ) -> "asyncio.Future[Any]":
        """Queue the samples of a call; the future has a `Result` for each, and cancelling it cancels the call.

        Raises:
            ServerError: the call is not admitted; the future may have the error as well.
        """
