"""One inference call, from its body to the answers of its samples, independent of the protocol."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from policies.cpus import available_cpus
from server.errors import (
    INTERNAL_ERROR,
    BadInputError,
    DrainingError,
    NotFoundError,
    RejectedError,
    ServerError,
    TooLargeError,
)
from server.models.model import Codec, DecodeCost, Inputs, ServedModel
from server.scheduling.admission import reject_if_full
from server.scheduling.calls import Sample
from server.scheduling.fleet import Fleet
from server.scheduling.levels import Levels, levels_of
from server.scheduling.predictor import Predictor
from server.transport.content_encoding import decompress_in_pieces
from server.transport.json_limits import MAX_JSON_BYTES, JsonSize, check_json
from server.transport.memory_budget import MemoryBudget
from server.transport.request import (
    Body,
    BodyLimit,
    ClientDisconnectedError,
    Headers,
    RequestContext,
    client_timeout,
)

if TYPE_CHECKING:
    from server.telemetry.metrics import Metrics

_T = TypeVar("_T")
Answer = Callable[[ServedModel, RequestContext], Awaitable[tuple[bytes, Headers]]]
_log = logging.getLogger("batchwright.inference")
MAX_BODY_BYTES = 64 * 2**20
MAX_CALL_WORK = 250_000_000  # sum of `DecodeCost.work` of a call: a few seconds of decoding
_HEAVY = 16_000_000  # `DecodeCost.work` of an image that takes long to decode
_SHORT = 2**18  # bytes; reading the header of a shorter image takes less time than starting a thread
_MAX_CONCURRENT = 8  # images of one call that are decoded concurrently
_CALL_SHARE = 8  # concurrent decoding of a call takes at most 1/8 of the memory budget
# For decoding and decompression. Two more than processors, for the time that they wait for the interpreter; at most 28,
# so that decompression leaves threads of `pool` for other work
_THREADS = min(28, 2 + available_cpus())
_WAITING = 8  # small images that wait for these threads, so that no thread waits for the event loop
_USER_THREADS = 16
_LARGE_OUTPUTS = 2**20  # bytes of the outputs of a call, from which on memory is reserved for them
_LONG_JSON = 65536  # bytes; parsing more takes milliseconds
_MEMORY_PER_JSON = 4  # bytes of tensors per byte of JSON, at most: `1,` may become an INT64
JSON_REMEDY = "send tensors as binary data, or fewer samples per call"
ANY_BODY = BodyLimit(MAX_BODY_BYTES, "send fewer samples per call")


def decoding_limits(threads: int) -> dict[str, Any]:
    """Fields of `Inference` that decode in this many threads, and call users' code as often at once."""
    return {
        "decoders": ThreadPoolExecutor(threads, "decoding"),
        "decoding": asyncio.Semaphore(threads),
        "small_images": asyncio.Semaphore(threads + _WAITING),
        "heavy": asyncio.Semaphore(max(1, threads // 2)),
        "user_pool": ThreadPoolExecutor(threads, "user-code"),
        "user_code": asyncio.Semaphore(threads),
    }


class Pipeline(Protocol):
    """Serves the calls of a pipeline; see `PipelineRunner`."""

    served: ServedModel
    models: Sequence[str]
    steps: Mapping[str, float]
    open_calls: int

    @property
    def ready(self) -> bool:
        """Whether new calls should be sent."""
        ...

    def check_room(self, n: int, timeout: float) -> None:
        """Check whether `n` more samples can be served within a timeout, s; raises RejectedError."""
        ...

    def least_time(self) -> float:
        """The time of the mean number of steps on idle devices, s."""
        ...

    def processes(self) -> list[dict[str, Any]]:
        """The facts of each process."""
        ...

    def run(self, samples: Sequence[Any], context: RequestContext) -> Coroutine[Any, Any, list[Sample]]:
        """Serve the samples of a call; raises ServerError."""
        ...


@dataclass(frozen=True)
class Inference:
    """Serves inference calls.

    Attributes:
        models: by name, all that the configuration lists.
        fleet: the devices with their dispatchers.
        metrics: counts the outcome of each request.
        pool: threads for short work that would block the event loop.
        capacity: maximum number of waiting samples, and so of the samples of one call.
        budget: the memory budget of all calls.
        decoders: threads for decoding of images.
        small_images: limits the small images that these threads decode or that wait for them, so that others take no
            memory.
        decoding: limits concurrent decoding of all others and decompression of bodies to `_THREADS`; what waits for it
            takes no memory.
        heavy: limits concurrent decoding of images that take long, so that others are decoded meanwhile.
        user_pool: threads for `decode` and `render` of users' models.
        user_code: limits their concurrent calls to the threads of that pool, so that waiting calls can be cancelled.
        parsing: limits concurrent parsing of long JSON documents to one, since parsing blocks the interpreter.
        calls: number of open calls by id of the model.
        predictors: by device, what compares predicted with measured response times.
        max_json_bytes: of the JSON part of a call.
        pipelines: by name, what serves the calls of pipelines, by requests of the models.
        levels: by model, its priority levels, where it has several.
    """

    models: dict[str, ServedModel]
    fleet: Fleet
    metrics: "Metrics"
    pool: Pool
    capacity: int
    budget: MemoryBudget
    decoders: Pool = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "decoding"))
    small_images: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_THREADS + _WAITING))
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_THREADS))
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(max(1, _THREADS // 2)))
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    user_pool: Pool = field(default_factory=lambda: ThreadPoolExecutor(_USER_THREADS, "user-code"))
    user_code: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_USER_THREADS))
    calls: Counter[str] = field(default_factory=Counter)
    predictors: dict[str, Predictor] = field(default_factory=dict)
    max_json_bytes: int = MAX_JSON_BYTES
    pipelines: dict[str, Pipeline] = field(default_factory=dict)
    levels: Mapping[str, Levels] = field(default_factory=dict)
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)  # set after the last of these calls

    async def serve(
        self,
        named: str | Callable[[], Awaitable[str | None]] | None,
        answer: Answer,
        context: RequestContext,
        render_error: Callable[[ServerError], bytes] | None = None,
    ) -> None:
        """Serve one call for the model of that name, and count its outcome.

        Admission control checks for room before the body is read, then before samples are decoded, so that an
        overloaded server does no useless work, and finally when the samples are queued.

        Args:
            named: the model's name; None for the only model; a function where the body has it.
            answer: reads and serves the call, and returns body and headers of its response. An error that it raises is
                sent as the response.
            context: the call; its memory reservation ends with the call.
            render_error: the body of an error's response; None for {"error": ...}.
        """
        name = None if callable(named) else named
        with self.budget.reservation() as context.memory:
            try:
                context.timeout = client_timeout(context.headers)
                if callable(named):
                    name = await named()
                model = self.model(name)
                if self.fleet.draining:
                    raise DrainingError("the server is stopping; send the request to another one", 1)
                context.level = context.least_level  # the body may name another one: `infer` sets it
                self.check_begin(model.name, context.remaining_timeout(), context.level)
                self.calls[model.id] += 1
                try:
                    body, headers = await answer(model, context)
                finally:
                    self.end_call(model.id)
                context.memory.resize(len(body))  # the inputs have been dropped
                await context.respond(200, body, headers)
                self.count_answered(model.name, context)
            except ServerError as error:
                self.count_failed(name, error, context)
                await context.respond_error(error, render=render_error)
            except ClientDisconnectedError:
                self.count(name, "cancelled", context)
            except asyncio.CancelledError:
                self.count(name, "cancelled", context)
                raise
            except Exception:  # noqa: BLE001  (the client gets a response after a bug, too)
                _log.exception("request %s failed with an exception", context.request_id)
                bug = ServerError(INTERNAL_ERROR)
                self.count_failed(name, bug, context)
                await context.respond_error(bug, render=render_error)

    def end_call(self, model: str) -> None:
        """Count a call of the model of this id, which was added to `calls`, as ended."""
        self.calls[model] -= 1
        if self._ended and not self.calls[model] and (ended := self._ended.pop(model, None)):
            ended.set()

    async def calls_ended(self, model: str) -> None:
        """Wait until no call of the model of this id is open; new ones must not begin any more."""
        if self.calls[model]:
            await self._ended.setdefault(model, asyncio.Event()).wait()
        del self.calls[model]

    async def infer(self, model: ServedModel, context: RequestContext, inputs: Inputs) -> Sequence[Sample]:
        """Serve the samples of one call; pass `inputs` as a temporary, so that their memory is freed while they wait.

        Raises:
            BadInputError: a sample is malformed, or decoding all samples takes too long.
            ServerError: the call is rejected, expired or failed.
            ClientDisconnectedError: the client closed the connection.
        """
        context.samples = inputs.count
        self.set_level(model.name, context)
        samples: Sequence[Any]
        if inputs.encoded:
            samples = await self._decode(model, inputs, context)
        else:
            outputs = model.output_bytes * inputs.count
            more = inputs.memory + (outputs if outputs > _LARGE_OUTPUTS else 0)
            if more:
                context.memory.grow(more)
            if inputs.runs_user_code and inputs.count > 1:
                self._begin_pending(model.name, inputs.count, context)
            samples = await self._read(inputs, context) if inputs.runs_user_code else inputs.read()
            if len(samples) > self.capacity:
                raise BadInputError(
                    f"the call has {len(samples)} samples, over the maximum {self.capacity} that may wait; send "
                    "several calls, or raise --queue-capacity"
                )
            if len(samples) > inputs.count:
                context.memory.grow((len(samples) - inputs.count) * model.output_bytes)
        del inputs
        context.memory.end_pending()
        context.queued = monotonic()
        if not samples:  # decoding has found that there are none
            return ()
        context.samples = len(samples)
        # no variable has the future or its samples: its exception refers to this frame, which would keep the inputs
        answers = await context.wait_for(self._submit(model, samples, context))
        context.waiting = max([answer.waiting for answer in answers])
        context.service = max([answer.service for answer in answers])
        context.device = answers[-1].device
        return answers

    def _submit(
        self, model: ServedModel, samples: Sequence[Any], context: RequestContext
    ) -> "asyncio.Future[list[Sample]]":
        pipeline = self.pipelines.get(model.name)
        if pipeline is not None:
            return asyncio.ensure_future(pipeline.run(samples, context))
        timeout, codec = context.remaining_timeout(), model.codec
        return self.fleet.submit(model.name, [_sample(codec, one) for one in samples], timeout, model.id, context.level)

    async def _read(self, inputs: Inputs, context: RequestContext) -> list[Any]:
        timeout = context.remaining_timeout()
        return await context.wait_for(asyncio.ensure_future(self.run_user_code(inputs.memory, inputs.read)), timeout)

    async def run_user_code(self, memory: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function of a user's model in a thread of its own pool, since it may take any time.

        Args:
            memory: bytes that the call has reserved for the arguments; they stay reserved until the function returns.
            function: the function.
            arguments: its arguments.
        """
        held = self.budget.reservation()
        await self.user_code.acquire()

        def release(done: "asyncio.Future[Any] | None") -> None:
            held.resize(0)
            self.user_code.release()
            _retrieve(done)

        try:
            held.grow(memory)
            running = asyncio.get_running_loop().run_in_executor(self.user_pool, function, *arguments)
        except BaseException:
            release(None)
            raise
        running.add_done_callback(release)
        return await asyncio.shield(running)

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; without a name the only model.

        Raises:
            NotFoundError: there is none of that name.
            BadInputError: no name was given and there are several.
        """
        if name is None:
            if len(self.names) > 1:
                raise BadInputError(f"several models are loaded; name one in the path: {', '.join(self.names)}")
            return next(iter(self.models.values()))
        if name in self.pipelines:
            return self.pipelines[name].served
        if name not in self.models:
            raise NotFoundError(f"no model {name[:80]!r}; the server has {', '.join(self.names)}")
        return self.models[name]

    def name_with_policy(self, name: str | None) -> str:
        """The name of a model, which is served by a policy; raises as `model`, and BadInputError for a pipeline."""
        found = self.model(name).name
        if found in self.pipelines:
            models = ", ".join(self.pipelines[found].models)
            raise BadInputError(f"{found} is a pipeline, which has no policy of its own; name one of {models}")
        return found

    @property
    def names(self) -> list[str]:
        """The names of all models and pipelines."""
        return [*self.models, *self.pipelines]

    def is_ready(self, name: str) -> bool:
        """Whether new calls of the model, or of a pipeline and so of its models, should be sent to this server."""
        pipeline = self.pipelines.get(name)
        return self.fleet.is_ready(name) if pipeline is None else pipeline.ready

    def set_level(self, name: str, context: RequestContext) -> None:
        """Set the priority level of a call, by its priority, its header and its key.

        Raises:
            BadInputError: the model has fewer levels.
        """
        if name not in self.pipelines:  # its steps have levels, each of its model's
            asked = context.headers.get(b"priority")
            context.level = levels_of(self.levels, name).level(context.priority, asked, context.least_level)

    def check_begin(self, name: str, timeout: float, level: int = 1) -> None:
        """Check whether a call of a model or pipeline may begin that has to be answered within a timeout, s.

        Raises:
            RejectedError: it may not.
            UnavailableError: no device can serve it now.
        """
        if name not in self.pipelines:
            self.fleet.check_loaded(name)
        self.check_room(name, 1, timeout, level=level)

    def check_room(self, name: str, n: int, timeout: float, pending: int = 0, level: int = 1) -> None:
        """Check whether `n` more samples of a model or pipeline can be served within a timeout, s.

        `pending` are those that are being decoded; `level` is the priority level.

        Raises:
            RejectedError: they cannot.
            UnavailableError: no device can serve them now.
        """
        pipeline = self.pipelines.get(name)
        if pipeline is not None:
            pipeline.check_room(n + pending, timeout)
        else:
            self.fleet.check_room(name, n, timeout, pending, level)

    async def run_in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a pure function in a thread of the pool."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    async def read(self, model: ServedModel | None, context: RequestContext, limit: BodyLimit = ANY_BODY) -> Body:
        """Read the body of a call, and decompress it by its Content-Encoding; without a model where the body names it.

        Raises:
            BadInputError: it cannot be decompressed.
            TooLargeError: it is over the limit.
            RejectedError: there is no room in the memory budget for the body, or for a compressed one in the queue.
            ExpiredError: the client's timeout has passed.
            ClientDisconnectedError: the client closed the connection, or took too long.
        """
        body = await context.read_body(limit, context.memory.grow_to)
        context.received = monotonic()
        context.memory.resize(len(body))
        encoding = context.headers.get(b"content-encoding")
        if encoding is not None:
            if model is not None:
                self._begin_pending(model.name, 1, context)
            body = await self._decompress(bytes(body), encoding.decode("latin-1"), context, limit)
        return body

    async def _decompress(self, body: bytes, encoding: str, context: RequestContext, limit: BodyLimit) -> bytes:
        async with self.decoding:
            pieces = decompress_in_pieces(body, encoding, limit.max_bytes, limit.remedy)
            plain: list[bytes] = []
            size = 0
            while (piece := await self.run_in_thread(next, pieces, None)) is not None:
                plain.append(piece)
                size += len(piece)
                context.memory.grow_to(len(body) + 2 * size)  # the pieces, and then the whole
        whole = b"".join(plain)
        plain.clear()
        context.memory.resize(size)
        return whole

    async def parse(self, parse: Callable[[], _T], document: bytes, context: RequestContext) -> _T:
        """Parse a call whose JSON part is `document`; raises as the function `parse`.

        Long documents are parsed off the event loop, one at a time, with a memory reservation during parsing.

        Raises:
            TooLargeError: it is over the limits of JSON documents.
            BadInputError: it is nested too deep.
            RejectedError: the memory budget has no room for the parsed values.
        """
        if len(document) <= _LONG_JSON:
            check_json(document, JSON_REMEDY, self.max_json_bytes)
            parsed = parse()
        else:
            async with self.parsing:
                size: JsonSize = await self.run_in_thread(check_json, document, JSON_REMEDY, self.max_json_bytes)
                with context.memory.temporarily(size.memory):
                    parsed = await self.run_in_thread(parse)
        context.memory.grow(_MEMORY_PER_JSON * len(document))
        return parsed

    def check_queue(self, n: int, model: str = "", level: int | None = None) -> None:
        """Check that the queue of all models has room for `n` more samples beside those that are queued or pending.

        `model` and `level` are those of the samples, where they are known.

        Raises:
            RejectedError: it has not.
        """
        taken, of_level = self.fleet.waiting + self.budget.pending.total(), level if model in self.models else None
        places = levels_of(self.levels, model).places(self.capacity, level or 1)
        backlog = self.fleet.backlog if of_level is None else partial(self.fleet.backlog, model, of_level)
        reject_if_full(n, taken, places, backlog)

    def _begin_pending(self, model: str, n: int, context: RequestContext) -> None:
        """Check that there is room for `n` samples, and count them as pending until they are queued.

        Pending samples count as queued, so that a burst is rejected before it is decoded. The time of the check does
        not depend on the queue length.
        """
        context.memory.end_pending()  # the sample that was pending during decompression
        timeout = context.remaining_timeout()
        self.check_queue(n, model, context.level)
        self.check_room(model, n, timeout, self.budget.pending[model], context.level)
        context.memory.begin_pending(model, n)

    async def _decode(self, model: ServedModel, inputs: Inputs, context: RequestContext) -> list[Any]:
        """Decode encoded samples off the event loop, until the client disconnects or its timeout passes."""
        self._begin_pending(model.name, inputs.count, context)
        context.memory.grow(inputs.memory)
        codec, encoded = model.codec, inputs.encoded
        short = len(encoded) == 1 and len(encoded[0]) <= _SHORT
        costs = decode_costs(codec, encoded) if short else await self.run_in_thread(decode_costs, codec, encoded)
        samples: list[Any] = [None] * len(encoded)
        remaining = iter(enumerate(zip(encoded, costs, strict=True)))

        async def decode_remaining() -> None:
            for index, (data, cost) in remaining:
                samples[index] = await self._decode_one(codec, data, cost)

        timeout = context.remaining_timeout()
        room = self.budget.limit // _CALL_SHARE // max(cost.memory for cost in costs)
        concurrency = max(1, min(len(encoded), _MAX_CONCURRENT, room))
        tasks = [asyncio.ensure_future(decode_remaining()) for _ in range(concurrency)]
        try:
            await context.wait_for(asyncio.gather(*tasks), timeout)
        finally:
            while tasks:  # the exception of a task refers to this frame
                tasks.pop().cancel()
        return samples

    async def _decode_one(self, codec: Codec, encoded: bytes, cost: DecodeCost) -> Any:
        slots = [self.decoding if self.budget.is_large(cost.memory) else self.small_images]
        if cost.work > _HEAVY:
            slots = [self.heavy, self.decoding]
        acquired: list[asyncio.Semaphore] = []
        memory = self.budget.reservation()

        def release(done: "asyncio.Future[Any] | None") -> None:
            memory.resize(0)
            for slot in acquired:
                slot.release()
            _retrieve(done)

        try:
            for slot in slots:
                await slot.acquire()
                acquired.append(slot)
            memory.grow(cost.memory)
            job = self.decoders.submit(codec.decode, encoded, cost)
            running = asyncio.wrap_future(job)
        except BaseException:
            release(None)
            raise
        running.add_done_callback(release)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            job.cancel()  # if it waits; a thread that has begun goes on, and keeps its memory
            raise

    def count_failed(self, model: str | None, error: ServerError, context: RequestContext) -> None:
        """Count the samples of a call that failed; without a name for the only model, and for none of several."""
        name = self.count(model, error.outcome, context)
        if name is None:
            return
        if isinstance(error, RejectedError):
            self.metrics.rejected(name, error.reason, context.samples)
        self.metrics.statistics.call_failed(name, context.ended() - context.began)

    def count(self, model: str | None, outcome: str, context: RequestContext) -> str | None:
        """Count the outcome of a call's samples, and return the name of its model; None for an unknown model."""
        name = next(iter(self.models)) if model is None and len(self.names) == 1 else model
        if name is None or (name not in self.models and name not in self.pipelines):
            return None
        self.metrics.outcome(name, outcome, context.samples, context.ended() - context.received, context.level)
        return name

    def count_answered(self, model: str, context: RequestContext) -> None:
        """Count the samples of a call that is answered, and its times."""
        now = context.ended()
        response = now - context.began
        since_body = now - context.received
        self.metrics.outcome(model, "ok", context.samples, since_body, context.level)
        if not context.device:  # decoding has answered it
            return
        level = self._shown_level(model, context)
        self.metrics.call_completed(model, context.device, response, context.samples, since_body, level)
        preparing = context.queued - context.began
        self.metrics.statistics.call_completed(model, preparing, context.waiting, context.service, response)

    def _shown_level(self, model: str, context: RequestContext) -> int | None:
        """The level of a call in the metrics; None where the model has one level."""
        return context.level if model in self.levels else None

    def describe(self, answers: Sequence[Sample], context: RequestContext) -> dict[str, Any]:
        """Parameters of the response to a call: largest batch size, longest times, and what all its samples took."""
        energies = [answer.energy for answer in answers if answer.energy is not None]
        cpu_times = [answer.cpu_time for answer in answers if answer.cpu_time is not None]
        return {
            "batch_size": max([answer.batch_size for answer in answers], default=0),
            "waiting_ms": round(1e3 * context.waiting, 3),
            "service_ms": round(1e3 * context.service, 3),
            "energy_mj": round(1e3 * sum(energies), 3) if energies else None,
            "energy_source": answers[-1].energy_source if energies else "none",
            **({"cpu_ms": round(1e3 * sum(cpu_times), 3)} if cpu_times else {}),
            **({"steps": context.steps} if context.steps else {}),
        }


def _retrieve(done: "asyncio.Future[Any] | None") -> None:
    """Retrieve the exception of a future that is not awaited any more, so that asyncio does not log it."""
    if done is not None and not done.cancelled():
        done.exception()


def _sample(codec: Codec, decoded: Any) -> Sample:
    return Sample(decoded, codec.length_of(decoded), codec.shape_of(decoded))


def decode_costs(codec: Codec, encoded: Sequence[bytes]) -> list[DecodeCost]:
    """Read the costs of decoding the samples of a call from their headers.

    Raises:
        BadInputError: a header is malformed.
        TooLargeError: the sum of work is over `MAX_CALL_WORK`.
    """
    costs = [codec.decode_cost(each) for each in encoded]
    work = sum(cost.work for cost in costs)
    if work > MAX_CALL_WORK:
        size, bound = f"{work / 1e6:.0f} megapixels", MAX_CALL_WORK // 1_000_000
        raise TooLargeError(
            f"decoding the call's images takes as long as {size}, over the maximum of {bound}; send them in several "
            "calls, and not progressive"
        )
    return costs
