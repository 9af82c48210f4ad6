"""One inference call, whatever its protocol: read, decode, submit, wait for the answers, watch the client."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf, prod
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from starlette.types import Scope, Send

from policies.cpus import available_cpus
from server.errors import BadInputError, NotFoundError, QueueFullError, ServerError, TooLargeError
from server.models.model import AnyModel, ImageCodec, Measure
from server.scheduling.admission import refuse_if_full
from server.scheduling.calls import Answer
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.asgi import Caller, ClientGoneError, disconnected, read_body, respond_error
from server.transport.content_encoding import decompressing
from server.transport.json_limits import MAX_JSON_BYTES, JsonSize, check_json
from server.transport.memory_budget import Intake, Share

_T = TypeVar("_T")
_log = logging.getLogger("batchwright.gateway")
MAX_BODY_BYTES = 64 * 2**20
MAX_CALL_WORK = 250_000_000  # of all pictures of a call, as `Measure` has it: a few seconds of decoding
_HEAVY = 16_000_000  # of a picture that takes long to decode
_SHORT = 2**18  # bytes of a picture whose header is found sooner than a thread
_LANES = 8  # pictures of one call that are decoded at once
_PART = 8  # a call's pictures take one part in so many of the memory budget, or are decoded one by one
_THREADS = min(28, available_cpus())  # that decode, of the pool's 32
_LONG_JSON = 65536  # bytes; parsing more takes milliseconds
_VALUES_OF_JSON = 4  # bytes of tensors from a byte of JSON, at most: `1,` may become an INT64
JSON_REMEDY = "send tensors as binary data, or fewer samples per call"


class Bound(NamedTuple):
    """How large a body may be, in bytes, and what a client should do whose body is larger."""

    max_bytes: int
    remedy: str = "send fewer samples per call"


ANY_BODY = Bound(MAX_BODY_BYTES)
JSON_BODY = Bound(MAX_JSON_BYTES, JSON_REMEDY)


@dataclass(frozen=True)
class Inference:
    """What serves calls.

    Attributes:
        models: by name.
        fleet: the devices, each with its dispatcher.
        metrics: counts what came of each request.
        decoders: threads that decode pictures.
        capacity: samples that can wait; one call cannot bring more.
        intake: the memory budget of all calls.
        decoding: how many pictures are decoded, or bodies decompressed, at once. No more than there are processors, so
            that a picture that waits takes no memory, and the pool has threads left for what is short.
        heavy: how many of them may be such that take long, so that other pictures are decoded meanwhile.
        parsing: how many long JSON documents are parsed at once: the interpreter can do no more.
    """

    models: Mapping[str, AnyModel]
    fleet: Fleet
    metrics: Metrics
    decoders: Pool
    capacity: int
    intake: Intake
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_THREADS))
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(max(1, _THREADS // 2)))
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    @asynccontextmanager
    async def answering(self, name: str | None, scope: Scope, send: Send, caller: Caller) -> AsyncIterator[Share]:
        """Answer one call for the model of that name: an error inside is answered, and counted.

        The call's reservation in the memory budget, which this yields, ends when the answer has been handed to the
        connection.
        """
        with self.intake.share() as share:
            try:
                yield share
                self._answered(self.model(name).name, caller)
            except ServerError as error:
                self._refused(name, error, caller)
                await respond_error(send, error)
            except ClientGoneError:
                self._ended(name, "cancelled", caller)
            except asyncio.CancelledError:
                self._ended(name, "cancelled", caller)
                raise
            except Exception:  # noqa: BLE001  (a bug here must not cost the client an answer)
                _log.exception("request %s met a bug", scope["state"].get("request_id"))
                bug = ServerError("internal error; the server's log has the details")
                self._refused(name, bug, caller)
                await respond_error(send, bug)

    def model(self, name: str | None) -> AnyModel:
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

    async def read(
        self, model: AnyModel, headers: Mapping[bytes, bytes], share: Share, caller: Caller, bound: Bound = ANY_BODY
    ) -> bytes:
        """Read the body of a call, and undo its Content-Encoding.

        A call that would be refused anyway is refused before its body is read, so that an overloaded server does no
        useless work.

        Raises:
            BadInputError: it cannot be decompressed.
            TooLargeError: it is over the bound.
            QueueFullError: there is no room for another request, or for these bytes.
            ExpiredError: the client's time-out has passed.
            ClientGoneError: the client closed the connection, or took too long.
        """
        self.fleet.check_room(model.name, 1, caller.left())
        body = await read_body(headers, caller.receive, bound.max_bytes, share.reach, bound.remedy)
        share.settle(len(body))
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            self._let_in(model.name, 1, share, caller)
            body = await self._decompressed(body, encoding.decode("latin-1"), share, bound)
        return body

    async def _decompressed(self, body: bytes, encoding: str, share: Share, bound: Bound) -> bytes:
        async with self.decoding:
            pieces = decompressing(body, encoding, bound.max_bytes, bound.remedy)
            plain: list[bytes] = []
            size = 0
            while (piece := await self.off_the_loop(next, pieces, None)) is not None:
                plain.append(piece)
                size += len(piece)
                share.reach(len(body) + 2 * size)  # the pieces, and soon the whole
        whole = b"".join(plain)
        plain.clear()
        share.settle(size)
        return whole

    async def parse(self, parse: Callable[[], _T], document: bytes, share: Share) -> _T:
        """Parse a call whose JSON part is `document`, with a reservation for what that takes; raises as `parse`.

        A long one is parsed off the event loop, one at a time.

        Raises:
            TooLargeError: it is over the bounds of JSON documents.
            BadInputError: it is nested too deep.
            QueueFullError: the memory budget has no room for the parsed values.
        """
        if len(document) <= _LONG_JSON:
            check_json(document, JSON_REMEDY)
            parsed = parse()
        else:
            async with self.parsing:
                size: JsonSize = await self.off_the_loop(check_json, document, JSON_REMEDY)
                with share.more(size.memory):
                    parsed = await self.off_the_loop(parse)
        share.grow(_VALUES_OF_JSON * len(document))
        return parsed

    def _let_in(self, model: str, n: int, share: Share, caller: Caller) -> None:
        """Check again before a call whose body has been read is decoded: others may have been admitted meanwhile.

        Samples that are being decoded count as if they were in the queue, so that a burst is rejected before it is
        decoded. The time that it takes does not depend on the number of waiting requests.

        Raises:
            QueueFullError: there is no room for `n` samples, or no time.
            ExpiredError: the client's time-out has passed.
        """
        share.arrive()  # in case it was decompressed, and counted then
        left, intake = caller.left(), self.intake
        refuse_if_full(n, self.fleet.waiting + intake.all_coming, self.capacity, self.fleet.backlog)
        self.fleet.check_room(model, n, left, intake.coming[model])
        share.come(model, n)

    def reserve(self, model: AnyModel, n: int, count: int, share: Share, caller: Caller) -> None:
        """Check that there is room for the samples of a call before they are decoded, and reserve memory for them.

        Args:
            model: that is asked.
            n: number of samples.
            count: bytes that they take.
            share: the call's reservation.
            caller: the call.

        Raises:
            QueueFullError: there is no room in the queue, or for the bytes.
            ExpiredError: the client's time-out has passed.
        """
        caller.samples = n
        self._let_in(model.name, n, share, caller)
        share.grow(count)

    async def decode(self, model: AnyModel, pictures: Sequence[bytes], share: Share, caller: Caller) -> list[Any]:
        """Encoded pictures to samples, off the event loop; a client that leaves, or whose time-out passes, ends it.

        Raises:
            BadInputError: one of them cannot be read.
            TooLargeError: they are too large together.
            QueueFullError: there is no room in the queue, or for their pixels.
            ExpiredError: the client's time-out has passed.
            ClientGoneError: the client closed the connection.
        """
        codec = model.codec
        assert isinstance(codec, ImageCodec)  # others are read without
        self.reserve(model, len(pictures), len(pictures) * prod(codec.shape), share, caller)
        short = len(pictures) == 1 and len(pictures[0]) <= _SHORT
        measures = measured(codec, pictures) if short else await self.off_the_loop(measured, codec, pictures)
        samples: list[Any] = [None] * len(pictures)
        todo = iter(enumerate(pictures))

        async def work() -> None:
            for index, picture in todo:
                samples[index] = await self._decode_one(codec, picture, measures[index])

        left, room = caller.left(), self.intake.limit // _PART // max(measure.held for measure in measures)
        lanes = [asyncio.ensure_future(work()) for _ in range(max(1, min(len(pictures), _LANES, room)))]
        try:
            await _watched(asyncio.gather(*lanes), caller, left)
        finally:
            for lane in lanes:
                lane.cancel()
        return samples

    async def _decode_one(self, codec: ImageCodec, picture: bytes, measure: Measure) -> Any:
        slots = (self.heavy, self.decoding) if measure.work > _HEAVY else (self.decoding,)
        taken: list[asyncio.Semaphore] = []
        share = self.intake.share()

        def ended(_: object) -> None:
            share.settle(0)
            for slot in taken:
                slot.release()

        try:
            for slot in slots:
                await slot.acquire()
                taken.append(slot)
            share.grow(measure.held)
            running = asyncio.get_running_loop().run_in_executor(self.decoders, codec.decode, picture)
        except BaseException:
            ended(None)
            raise
        running.add_done_callback(ended)
        return await asyncio.shield(running)  # the thread goes on, and holds its memory, after the call is cancelled

    async def ask(self, model: AnyModel, inputs: Sequence[Any], caller: Caller) -> list[Answer]:
        """Queue the samples of one call and wait for all answers; a client that leaves takes them with it.

        Raises:
            ServerError: refused, expired or failed.
            ClientGoneError: the client closed the connection.
        """
        caller.asked, caller.samples = monotonic(), len(inputs)
        sizes = () if model.sizes is None else [model.sizes.of(text) for text in inputs]
        submitted = self.fleet.submit(model.name, inputs, caller.left(), sizes)
        answers = await _watched(submitted, caller)
        caller.waiting = max(answer.waiting for answer in answers)
        caller.service = max(answer.service for answer in answers)
        caller.device = answers[-1].device
        if model.sizes is not None:
            for text, answer in zip(inputs, answers, strict=True):
                model.sizes.observe(text, answer.output)
        return answers

    def _refused(self, model: str | None, error: ServerError, caller: Caller) -> None:
        """Count a call that ends with an error."""
        name = self._ended(model, error.outcome, caller)
        if name is None:
            return
        if isinstance(error, QueueFullError):
            self.metrics.rejected(name, error.reason, caller.samples)
        self.metrics.statistics.failed(name, monotonic() - caller.began)

    def _ended(self, model: str | None, outcome: str, caller: Caller) -> str | None:
        """Count what came of a call's samples; None as the name stands for the only model. The name that counts."""
        name = next(iter(self.models)) if model is None and len(self.models) == 1 else model
        if name is None or name not in self.models:
            return None
        self.metrics.outcome(name, outcome, caller.samples)
        return name

    def _answered(self, model: str, caller: Caller) -> None:
        """Count a call whose answer has been handed to the connection."""
        response = monotonic() - caller.began
        self.metrics.outcome(model, "ok", caller.samples)
        self.metrics.responded(model, caller.device, response, caller.samples)
        preparing = caller.asked - caller.began
        self.metrics.statistics.answered(model, preparing, caller.waiting, caller.service, response)

    def describe(self, model: str, answers: Sequence[Answer]) -> dict[str, Any]:
        """What happened to a call: the largest batch, the longest times, the energy of all its samples."""
        energies = [answer.energy for answer in answers if answer.energy is not None]
        profile = self.fleet.on(answers[-1].device).chosen[model].profile
        return {
            "batch_size": max(answer.batch_size for answer in answers),
            "waiting_ms": round(1e3 * max(answer.waiting for answer in answers), 3),
            "service_ms": round(1e3 * max(answer.service for answer in answers), 3),
            "energy_mj": round(1e3 * sum(energies), 3) if energies else None,
            "energy_source": profile.energy_source if energies else "none",
        }


def measured(codec: ImageCodec, pictures: Sequence[bytes]) -> list[Measure]:
    """What it takes to decode the pictures of a call, by their headers.

    Raises:
        BadInputError: one of them cannot be read.
        TooLargeError: they take more work together than a call may ask for.
    """
    measures = [codec.measure(picture) for picture in pictures]
    work = sum(measure.work for measure in measures)
    if work > MAX_CALL_WORK:
        size, bound = f"{work / 1e6:.0f} megapixels", MAX_CALL_WORK // 1_000_000
        raise TooLargeError(
            f"decoding the call's pictures takes as long as {size}, over the bound of {bound}; send them in several "
            "calls, and not progressive"
        )
    return measures


async def _watched(future: "asyncio.Future[_T]", caller: Caller, left: float = inf) -> _T:
    """Wait for a call's future, which is cancelled when the client leaves, or after the time that is left, s.

    Raises:
        ClientGoneError: the client closed the connection.
        ExpiredError: the time is over.
    """
    watch = _Watch(caller, future, left)
    try:
        return await future
    except asyncio.CancelledError:
        if watch.reason is not None:
            raise watch.reason from None
        raise
    finally:
        watch.end()


class _Watch:
    """Cancels a call when its client closes the connection, or its time is over.

    It begins to listen only after a while: most calls are answered before, and a task for each of them would cost
    more than everything else that a call needs.

    Attributes:
        reason: why it cancelled the call.
    """

    _AFTER = 0.02  # s

    def __init__(self, caller: Caller, future: "asyncio.Future[Any]", left: float) -> None:
        self._caller = caller
        self._future = future
        self._listener: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._start = loop.call_later(self._AFTER, self._listen)
        self._end = None if left == inf else loop.call_later(left, self._expire)
        self.reason: Exception | None = None

    def end(self) -> None:
        self._start.cancel()
        if self._end is not None:
            self._end.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def _listen(self) -> None:
        self._listener = asyncio.ensure_future(self._until_gone())

    async def _until_gone(self) -> None:
        await disconnected(self._caller.receive)
        self._cancel(ClientGoneError())

    def _expire(self) -> None:
        self._cancel(self._caller.expired())

    def _cancel(self, reason: Exception) -> None:
        if self._future.cancel():
            self.reason = reason
