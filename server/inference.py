"""The way of one call through the house, whatever its protocol: decode, queue, wait for answers, watch the client."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from starlette.types import Receive

from server.dispatcher import Answer, Dispatcher
from server.errors import BadInputError, NotFoundError, ServerError
from server.http import ClientGoneError, disconnected
from server.metrics import Metrics
from server.models import ServedModel

MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Inference:
    """What serves calls.

    Attributes:
        models: by name.
        dispatcher: in front of the device.
        metrics: counts what came of each request.
        decoders: threads that decode pictures.
        capacity: samples that can wait; one call cannot bring more.
    """

    models: Mapping[str, ServedModel]
    dispatcher: Dispatcher
    metrics: Metrics
    decoders: Pool
    capacity: int

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; None stands for the only one.

        Raises:
            NotFoundError: there is none of that name.
            BadInputError: no name was given and there are several.
        """
        if name is None:
            if len(self.models) > 1:
                raise BadInputError(f"several models are loaded; name one in the path: {', '.join(self.models)}")
            return next(iter(self.models.values()))
        if name not in self.models:
            raise NotFoundError(f"no model {name[:80]!r} here; there is {', '.join(self.models)}")
        return self.models[name]

    async def off_the_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a pure function in the decoders' threads."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)

    async def decode(self, read: Callable[[bytes], Any], pictures: Iterable[bytes]) -> list[Any]:
        """Encoded pictures to samples by a codec's method, off the event loop.

        Raises:
            BadInputError: one of them cannot be read.
        """
        return await asyncio.gather(*(self.off_the_loop(read, picture) for picture in pictures))

    async def ask(
        self, model: ServedModel, inputs: Sequence[Any], expires_in: float | None, receive: Receive, began: float
    ) -> list[Answer]:
        """Queue the samples of one call and wait for all answers; a client that leaves takes them with it.

        Args:
            model: which one.
            inputs: decoded samples.
            expires_in: the client's time-out, s from the beginning of the call; None: it has none.
            receive: of the connection, its body read.
            began: when the call began, s of time.monotonic.

        Raises:
            ServerError: refused, expired or failed.
            ClientGoneError: the client closed the connection.
        """
        asked = monotonic()
        n = len(inputs)
        try:
            left = inf if expires_in is None else began + expires_in - monotonic()
            future = self.dispatcher.submit(model.name, inputs, left)
        except ServerError as error:
            self._refused(model.name, error, n, began)
            raise
        watch = _Watch(receive, future)
        try:
            answers = await future
        except ServerError as error:
            self._refused(model.name, error, n, began)
            raise
        except asyncio.CancelledError:
            self.metrics.outcome(model.name, "cancelled", n)
            if watch.client_gone:
                raise ClientGoneError from None
            raise
        finally:
            watch.end()
        self._count(model.name, answers, asked - began, monotonic() - began)
        return answers

    def bad_input(self, model: str | None, error: ServerError, began: float) -> None:
        """Count a call whose bytes could not be used; what the dispatcher refuses is counted where it does."""
        if isinstance(error, BadInputError) and model is not None and model in self.models:
            self._refused(model, error, 1, began)

    def _refused(self, model: str, error: ServerError, n: int, began: float) -> None:
        self.metrics.outcome(model, error.outcome, n)
        self.metrics.statistics.failed(model, monotonic() - began)

    def _count(self, model: str, answers: Sequence[Answer], decode: float, total: float) -> None:
        waiting = max(answer.waiting for answer in answers)
        service = max(answer.service for answer in answers)
        self.metrics.outcome(model, "ok", len(answers))
        self.metrics.statistics.answered(model, decode, waiting, service, total)

    def describe(self, model: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """What happened to a call: the largest batch, the longest times, the energy of all its samples."""
        energies = [answer.energy for answer in answers if answer.energy is not None]
        return {
            "batch_size": max(answer.batch_size for answer in answers),
            "waiting_ms": round(1e3 * max(answer.waiting for answer in answers), 3),
            "service_ms": round(1e3 * max(answer.service for answer in answers), 3),
            "energy_mj": round(1e3 * sum(energies), 3) if energies else None,
            "energy_source": self.dispatcher.chosen[model].profile.energy_source if energies else "none",
        }


class _Watch:
    """Cancels a call when its client closes the connection.

    It begins to listen only after a while: most calls are answered before, and a task for each of them would cost
    more than everything else that a call needs.
    """

    _AFTER = 0.02  # s

    def __init__(self, receive: Receive, future: "asyncio.Future[Any]") -> None:
        self._receive = receive
        self._future = future
        self._listener: asyncio.Task[None] | None = None
        self._start = asyncio.get_running_loop().call_later(self._AFTER, self._listen)
        self.client_gone = False

    def end(self) -> None:
        self._start.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def _listen(self) -> None:
        self._listener = asyncio.ensure_future(self._until_gone())

    async def _until_gone(self) -> None:
        await disconnected(self._receive)
        self.client_gone = True
        self._future.cancel()
