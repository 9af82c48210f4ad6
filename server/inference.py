"""The way of one call through the house, whatever its protocol: decode, queue, wait for answers, watch the client."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

from starlette.types import Receive, Scope, Send

from server.calls import Answer
from server.dispatcher import Dispatcher
from server.encoding import decompress
from server.errors import BadInputError, NotFoundError, QueueFullError, ServerError
from server.http import ClientGoneError, client_timeout, disconnected, read_body, respond_error
from server.intake import Intake, Share
from server.metrics import Metrics
from server.models import ServedModel

_log = logging.getLogger("batchwright.gateway")
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
        intake: bounds the bytes of all calls.
    """

    models: Mapping[str, ServedModel]
    dispatcher: Dispatcher
    metrics: Metrics
    decoders: Pool
    capacity: int
    intake: Intake

    @asynccontextmanager
    async def answering(self, name: str | None, scope: Scope, send: Send, began: float) -> AsyncIterator[None]:
        """Answer one call for the model of that name: an error inside is answered, and counted."""
        try:
            yield
        except ServerError as error:
            self.refused(name, error, began)
            await respond_error(send, error)
        except ClientGoneError:
            return
        except Exception:  # noqa: BLE001  (a bug here must not cost the client an answer)
            _log.exception("a bug answered request %s", scope["state"].get("request_id"))
            await respond_error(send, ServerError("internal error; the server's log has the details"))

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

    async def decode(self, read: Callable[[bytes], Any], pictures: Iterable[bytes], share: Share) -> list[Any]:
        """Encoded pictures to samples by a codec's method, off the event loop.

        Raises:
            BadInputError: one of them cannot be read.
            IntakeFullError: there is no room for their pixels.
        """
        samples = await asyncio.gather(*(self.off_the_loop(read, picture) for picture in pictures))
        share.grow(sum(sample.nbytes for sample in samples))
        return samples

    async def read(self, model: ServedModel, headers: Mapping[bytes, bytes], receive: Receive, share: Share) -> bytes:
        """The body of a call, without its Content-Encoding.

        A call that would be refused anyway is refused before its body is read: work for nobody costs others theirs. A
        client that leaves in the middle is counted here, one that leaves later in `ask`.

        Raises:
            BadInputError: it cannot be decompressed.
            TooLargeError: it is over MAX_BODY_BYTES.
            QueueFullError: there is no room for another request, or for these bytes.
            ClientGoneError: the client closed the connection, or took too long.
        """
        self.dispatcher.check_room(model.name, 1 + self.intake.coming[model.name], client_timeout(headers) or inf)
        share.come(model.name)
        try:
            body = await read_body(headers, receive, MAX_BODY_BYTES, share.grow)
        except ClientGoneError:
            self.metrics.outcome(model.name, "cancelled", 1)
            raise
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            body = await self.off_the_loop(decompress, body, encoding.decode("latin-1"), MAX_BODY_BYTES)
            share.reach(len(body))
        return body

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
            self.refused(model.name, error, began, n)
            raise
        watch = _Watch(receive, future)
        try:
            answers = await future
        except ServerError as error:
            self.refused(model.name, error, began, n)
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

    def refused(self, model: str | None, error: ServerError, began: float, n: int = 1) -> None:
        """Count a call that ends with an error, once; None as the name stands for the only model."""
        name = next(iter(self.models)) if model is None and len(self.models) == 1 else model
        if error.counted or name is None or name not in self.models:
            return
        error.counted = True
        self.metrics.outcome(name, error.outcome, n)
        if isinstance(error, QueueFullError):
            self.metrics.rejected(name, error.reason, n)
        self.metrics.statistics.failed(name, monotonic() - began)

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
