"""One inference call, from its body to the answers of its samples, whatever the protocol."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from policies.cpus import available_cpus
from server.errors import BadInputError, NotFoundError, QueueFullError, ServerError, TooLargeError
from server.models.model import Codec, Inputs, Measure, ServedModel
from server.scheduling.admission import reject_if_full
from server.scheduling.calls import Answer
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.asgi import BodyLimit, ClientGoneError, disconnected, read_body, respond_error
from server.transport.content_encoding import decompressing
from server.transport.json_limits import MAX_JSON_BYTES, JsonSize, check_json
from server.transport.memory_budget import MemoryBudget
from server.transport.request_context import RequestContext

_T = TypeVar("_T")
_log = logging.getLogger("batchwright.gateway")
MAX_BODY_BYTES = 64 * 2**20
MAX_CALL_WORK = 250_000_000  # of all pictures of a call, as `Measure` has it: a few seconds of decoding
_HEAVY = 16_000_000  # work of a picture that takes long to decode
_SHORT = 2**18  # bytes of a picture whose header is read faster than a thread is started
_LANES = 8  # pictures of one call that are decoded at once
_PART = 8  # the pictures of a call may hold 1/8 of the memory budget; otherwise they are decoded one by one
_THREADS = min(28, available_cpus())  # for decoding, of the pool's 32
_LONG_JSON = 65536  # bytes; parsing more takes milliseconds
_VALUES_OF_JSON = 4  # bytes of tensors from a byte of JSON, at most: `1,` may become an INT64
JSON_REMEDY = "send tensors as binary data, or fewer samples per call"
ANY_BODY = BodyLimit(MAX_BODY_BYTES, "send fewer samples per call")
JSON_BODY = BodyLimit(MAX_JSON_BYTES, JSON_REMEDY)


@dataclass(frozen=True)
class Inference:
    """Serves inference calls.

    Attributes:
        models: by name.
        fleet: the devices with their dispatchers.
        metrics: counts the outcome of each request.
        decoders: threads that decode pictures.
        capacity: number of samples that can wait, and so the most that one call can have.
        budget: the memory budget of all calls.
        decoding: limits how many pictures are decoded, or bodies decompressed, at once. No more than there are
            processors, so that a picture that waits takes no memory, and threads are left for short work.
        heavy: limits how many of them may take long, so that other pictures are decoded meanwhile.
        parsing: limits how many long JSON documents are parsed at once; parsing holds the interpreter.
    """

    models: Mapping[str, ServedModel]
    fleet: Fleet
    metrics: Metrics
    decoders: Pool
    capacity: int
    budget: MemoryBudget
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_THREADS))
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(max(1, _THREADS // 2)))
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    @asynccontextmanager
    async def answering(
        self, name: str | None, scope: Scope, receive: Receive, send: Send
    ) -> AsyncIterator[RequestContext]:
        """Answer one call for the model of that name: an error inside is answered and counted.

        The call's memory reservation ends when its answer has been handed to the connection.
        """
        context = RequestContext(scope, receive, self.budget)
        with context.memory:
            try:
                yield context
                self._count_answered(self.model(name).name, context)
            except ServerError as error:
                self._count_refused(name, error, context)
                await respond_error(send, error)
            except ClientGoneError:
                self._count(name, "cancelled", context)
            except asyncio.CancelledError:
                self._count(name, "cancelled", context)
                raise
            except Exception:  # noqa: BLE001  (a bug here must not cost the client an answer)
                _log.exception("request %s met a bug", context.request_id)
                bug = ServerError("internal error; the server's log has the details")
                self._count_refused(name, bug, context)
                await respond_error(send, bug)

    async def infer(
        self, model: ServedModel, context: RequestContext, read_inputs: Callable[[], Awaitable[Inputs]]
    ) -> list[Answer]:
        """Serve one call.

        Room is checked before the body is read, so that an overloaded server does no useless work, before encoded
        samples are decoded, for the same reason, and when the samples are queued, which decides.

        Args:
            model: the model.
            context: the call.
            read_inputs: reads and parses the body, by `read` and `parse`.

        Raises:
            ServerError: the call is rejected, expired or failed.
            ClientGoneError: the client closed the connection.
        """
        self.fleet.check_room(model.name, 1, context.left())
        inputs = await read_inputs()
        context.samples = inputs.count
        if inputs.encoded:
            samples = await self._decode(model, inputs, context)
        else:
            context.memory.grow(inputs.memory)
            samples = await self.off_the_loop(inputs.read) if inputs.slow else inputs.read()
        del inputs  # its memory must not be held until the answer
        context.memory.end_pending()
        return await self._submit(model, samples, context)

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

    async def read(self, model: ServedModel, context: RequestContext, limit: BodyLimit = ANY_BODY) -> bytes:
        """Read the body of a call, and undo its Content-Encoding.

        Raises:
            BadInputError: it cannot be decompressed.
            TooLargeError: it is over the limit.
            QueueFullError: there is no room for another request, or for these bytes.
            ExpiredError: the client's time-out has passed.
            ClientGoneError: the client closed the connection, or took too long.
        """
        body = await read_body(context.headers, context.receive, limit, context.memory.grow_to)
        context.memory.resize(len(body))
        encoding = context.headers.get(b"content-encoding")
        if encoding is not None:
            self._admit(model.name, 1, context)
            body = await self._decompressed(body, encoding.decode("latin-1"), context, limit)
        return body

    async def _decompressed(self, body: bytes, encoding: str, context: RequestContext, limit: BodyLimit) -> bytes:
        async with self.decoding:
            pieces = decompressing(body, encoding, limit.max_bytes, limit.remedy)
            plain: list[bytes] = []
            size = 0
            while (piece := await self.off_the_loop(next, pieces, None)) is not None:
                plain.append(piece)
                size += len(piece)
                context.memory.grow_to(len(body) + 2 * size)  # the pieces, and soon the whole
        whole = b"".join(plain)
        plain.clear()
        context.memory.resize(size)
        return whole

    async def parse(self, parse: Callable[[], _T], document: bytes, context: RequestContext) -> _T:
        """Parse a call whose JSON part is `document`, with a reservation for what that takes; raises as `parse`.

        Long documents are parsed off the event loop, one at a time.

        Raises:
            TooLargeError: it is over the limits of JSON documents.
            BadInputError: it is nested too deep.
            QueueFullError: the memory budget has no room for the parsed values.
        """
        if len(document) <= _LONG_JSON:
            check_json(document, JSON_REMEDY)
            parsed = parse()
        else:
            async with self.parsing:
                size: JsonSize = await self.off_the_loop(check_json, document, JSON_REMEDY)
                with context.memory.temporarily(size.memory):
                    parsed = await self.off_the_loop(parse)
        context.memory.grow(_VALUES_OF_JSON * len(document))
        return parsed

    def _admit(self, model: str, n: int, context: RequestContext) -> None:
        """Check that there is room for `n` samples before they are decoded.

        Samples that are being decoded count as if they were queued, so that a burst is rejected before it is decoded.
        The check takes the same time however many requests wait.

        Raises:
            QueueFullError: there is no room in the queue, or no time.
            ExpiredError: the client's time-out has passed.
        """
        context.memory.end_pending()  # of decompression
        left, budget = context.left(), self.budget
        reject_if_full(n, self.fleet.waiting + budget.all_pending, self.capacity, self.fleet.backlog)
        self.fleet.check_room(model, n, left, budget.pending[model])
        context.memory.begin_pending(model, n)

    async def _decode(self, model: ServedModel, inputs: Inputs, context: RequestContext) -> list[Any]:
        """Decode encoded samples off the event loop, until the client leaves or its time-out passes.

        Raises:
            BadInputError: one of them cannot be read.
            TooLargeError: they are too large together.
            QueueFullError: there is no room in the queue, or for their pixels.
            ExpiredError: the client's time-out has passed.
            ClientGoneError: the client closed the connection.
        """
        self._admit(model.name, inputs.count, context)
        context.memory.grow(inputs.memory)
        codec, encoded = model.codec, inputs.encoded
        short = len(encoded) == 1 and len(encoded[0]) <= _SHORT
        measures = measured(codec, encoded) if short else await self.off_the_loop(measured, codec, encoded)
        samples: list[Any] = [None] * len(encoded)
        todo = iter(enumerate(zip(encoded, measures, strict=True)))

        async def work() -> None:
            for index, (picture, measure) in todo:
                samples[index] = await self._decode_one(codec, picture, measure)

        left, room = context.left(), self.budget.limit // _PART // max(measure.held for measure in measures)
        lanes = [asyncio.ensure_future(work()) for _ in range(max(1, min(len(encoded), _LANES, room)))]
        try:
            await _watched(asyncio.gather(*lanes), context, left)
        finally:
            for lane in lanes:
                lane.cancel()
        return samples

    async def _decode_one(self, codec: Codec, encoded: bytes, measure: Measure) -> Any:
        slots = (self.heavy, self.decoding) if measure.work > _HEAVY else (self.decoding,)
        taken: list[asyncio.Semaphore] = []
        memory = self.budget.reservation()

        def ended(_: object) -> None:
            memory.resize(0)
            for slot in taken:
                slot.release()

        try:
            for slot in slots:
                await slot.acquire()
                taken.append(slot)
            memory.grow(measure.held)
            running = asyncio.get_running_loop().run_in_executor(self.decoders, codec.decode, encoded, measure)
        except BaseException:
            ended(None)
            raise
        running.add_done_callback(ended)
        return await asyncio.shield(running)  # the thread goes on, and holds its memory, after the call is cancelled

    async def _submit(self, model: ServedModel, samples: Sequence[Any], context: RequestContext) -> list[Answer]:
        """Queue the samples of one call and wait for all answers; a client that leaves cancels them.

        Raises:
            ServerError: rejected, expired or failed.
            ClientGoneError: the client closed the connection.
        """
        context.queued, context.samples = monotonic(), len(samples)
        sizes = () if model.sizes is None else [model.sizes.of(sample) for sample in samples]
        submitted = self.fleet.submit(model.name, samples, context.left(), sizes)
        answers = await _watched(submitted, context)
        context.waiting = max(answer.waiting for answer in answers)
        context.service = max(answer.service for answer in answers)
        context.device = answers[-1].device
        if model.sizes is not None:
            for sample, answer in zip(samples, answers, strict=True):
                model.sizes.observe(sample, answer.output)
        return answers

    def _count_refused(self, model: str | None, error: ServerError, context: RequestContext) -> None:
        name = self._count(model, error.outcome, context)
        if name is None:
            return
        if isinstance(error, QueueFullError):
            self.metrics.rejected(name, error.reason, context.samples)
        self.metrics.statistics.failed(name, monotonic() - context.began)

    def _count(self, model: str | None, outcome: str, context: RequestContext) -> str | None:
        """Count the outcome of a call's samples; None as the name means the only model. Returns the name counted."""
        name = next(iter(self.models)) if model is None and len(self.models) == 1 else model
        if name is None or name not in self.models:
            return None
        self.metrics.outcome(name, outcome, context.samples)
        return name

    def _count_answered(self, model: str, context: RequestContext) -> None:
        response = monotonic() - context.began
        self.metrics.outcome(model, "ok", context.samples)
        self.metrics.responded(model, context.device, response, context.samples)
        preparing = context.queued - context.began
        self.metrics.statistics.answered(model, preparing, context.waiting, context.service, response)

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


def measured(codec: Codec, encoded: Sequence[bytes]) -> list[Measure]:
    """The costs of decoding the pictures of a call, from their headers.

    Raises:
        BadInputError: one of them cannot be read.
        TooLargeError: they take more work together than a call may ask for.
    """
    measures = [codec.measure(each) for each in encoded]
    work = sum(measure.work for measure in measures)
    if work > MAX_CALL_WORK:
        size, bound = f"{work / 1e6:.0f} megapixels", MAX_CALL_WORK // 1_000_000
        raise TooLargeError(
            f"decoding the call's pictures takes as long as {size}, over the bound of {bound}; send them in several "
            "calls, and not progressive"
        )
    return measures


async def _watched(future: "asyncio.Future[_T]", context: RequestContext, left: float = inf) -> _T:
    """Wait for a call's future, which is cancelled when the client leaves, or after the time that is left, s.

    Raises:
        ClientGoneError: the client closed the connection.
        ExpiredError: the time is over.
    """
    watch = _Watch(context, future, left)
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

    def __init__(self, context: RequestContext, future: "asyncio.Future[Any]", left: float) -> None:
        self._context = context
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
        await disconnected(self._context.receive)
        self._cancel(ClientGoneError())

    def _expire(self) -> None:
        self._cancel(self._context.expired())

    def _cancel(self, reason: Exception) -> None:
        if self._future.cancel():
            self.reason = reason
