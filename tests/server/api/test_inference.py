"""One inference call: memory reservations, admission control, and cancellation."""

import asyncio
import gc
import gzip
import io
import json
import struct
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from PIL import Image
from starlette.types import Message

from policies.cpus import available_cpus
from policies.rules.control_limit import greedy, static
from policies.types import BatchKey, Policy
from server.api.inference import Answer, Inference
from server.api.open_inference.infer import Infer
from server.api.predict import Predict
from server.errors import BadInputError, ExpiredError, QueueFullError, TooLargeError
from server.models.images.codec import ImageCodec, emulated_model
from server.models.model import DecodeCost, Inputs, ServedModel
from server.models.signature import Tensor
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.asgi_context import AsgiContext
from server.transport.memory_budget import MemoryBudget, MemoryBudgetError
from server.transport.request import Body, ClientDisconnectedError, Headers, RequestContext
from tests.support.asgi import call_scope, serve_asgi
from tests.support.fakes import chosen, run_scenario, submit

MODEL = emulated_model("m", 8)
SAMPLE = 224 * 224 * 3
HEAD = {b"content-length": b"500000"}


class HeldPool(Executor):
    """A pool that runs its jobs only when the test calls `run`.

    Attributes:
        jobs: jobs that have not started.
        started: number of jobs that have.
    """

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.started = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: function(*arguments, **named)))
        return future

    def begin(self) -> None:
        """Let all jobs be running, so that they cannot be cancelled."""
        for future, _ in self.jobs:
            future.set_running_or_notify_cancel()

    async def run(self, most: int = 1) -> None:
        """Run at most this many jobs, and then the event loop."""
        for _ in range(min(most, len(self.jobs))):
            future, job = self.jobs.popleft()
            if not (future.running() or future.set_running_or_notify_cancel()):
                continue
            self.started += 1
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  (as a pool does)
                future.set_exception(error)
        await settle()


async def settle() -> None:
    """Run the event loop until its tasks wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def stay_connected() -> Message:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def disconnect() -> Message:
    return {"type": "http.disconnect"}


async def disconnect_later() -> Message:
    await asyncio.sleep(0.1)
    return {"type": "http.disconnect"}


def sends(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    """A client that sends its whole body, and then stays connected."""
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return messages.pop() if messages else await stay_connected()

    return receive


class Client(NamedTuple):
    """A client: its connection, its timeout, and the age of its call, s."""

    receive: Callable[[], Coroutine[Any, Any, Message]] = stay_connected
    timeout: float = float("inf")
    age: float = 0.0


def context_of(inference: Inference, client: Client, headers: Mapping[bytes, bytes] | None = None) -> RequestContext:
    context = AsgiContext(call_scope(headers, client.age), client.receive, discard)
    context.memory = inference.budget.reservation()
    context.timeout = client.timeout
    return context


def with_inference(
    scenario: Callable[[Inference, HeldPool], Coroutine[Any, Any, None]],
    limit: int = 2**30,
    capacity: int = 1000,
    policy: Policy | None = None,
) -> None:
    async def build(dispatcher: Dispatcher, _: Any) -> None:
        pool = HeldPool()
        models: dict[str, Any] = {"m": MODEL}
        parts_ = (models, Fleet([dispatcher]), Metrics(), pool, capacity, MemoryBudget(limit, lambda: 1))
        await scenario(Inference(*parts_, decoders=pool, small_images=asyncio.Semaphore(4)), pool)

    run_scenario(build, chosen(policy or greedy(8)), limits=Limits(capacity))


async def decode(inference: Inference, images: list[bytes], client: Client) -> list[Any]:
    context = context_of(inference, client)
    tensor = Tensor("image", "BYTES", (len(images),), images)
    with context.memory:
        return await inference._decode(MODEL, MODEL.codec.from_tensors({"image": tensor}), context)


async def read(inference: Inference, headers: Mapping[bytes, bytes], client: Client) -> Body:
    context = context_of(inference, client, headers)
    with context.memory:
        return await inference.read(MODEL, context)


async def infer(inference: Inference, samples: list[Any], context: RequestContext) -> Sequence[Sample]:
    return await inference.infer(MODEL, context, Inputs(len(samples), lambda: samples))


def png(side: int = 300) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def huge(side: int = 7000) -> bytes:
    """A PNG with a large size in its header and hardly any data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


GOOD = png()
BAD = GOOD[:-20] + bytes(8) + GOOD[-12:]  # with a valid header
COST = MODEL.codec.decode_cost(GOOD).memory


def test_memory_is_reserved_for_images_that_are_decoded_and_not_for_waiting_ones() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [GOOD] * 20, Client()))
        await settle()
        await pool.run()  # the headers
        assert len(pool.jobs) == 4
        assert inference.budget.reserved == 20 * SAMPLE + 4 * COST
        while pool.jobs:
            await pool.run()
        assert len(await call) == 20
        assert inference.budget.reserved == 0
        assert inference.small_images._value == 4

    with_inference(scenario)


def test_more_small_images_wait_for_the_threads_than_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has decoded one takes the next, although the event loop does nothing meanwhile."""
    decoded, blocked, last = [], threading.Event(), threading.Event()

    def count(*_: object) -> int:
        blocked.wait(30)
        decoded.append(threading.current_thread())
        if len(decoded) == workers + 8:
            last.set()
        return 0

    monkeypatch.setattr(ImageCodec, "decode", count)
    workers = min(28, 2 + available_cpus())

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        inference = Inference(inference.models, inference.fleet, inference.metrics, pool, 1000, inference.budget)
        calls = [asyncio.ensure_future(decode(inference, [GOOD], Client())) for _ in range(64)]
        await settle()
        blocked.set()
        assert last.wait(30)
        assert len(decoded) == workers + 8
        assert [await call for call in calls] == [[0]] * 64

    with_inference(scenario)


def test_large_images_that_wait_for_a_thread_take_no_memory() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        inference.budget.limit = 100 * COST
        large = replace(inference, decoding=asyncio.Semaphore(2))
        calls = [asyncio.ensure_future(decode(large, [GOOD], Client())) for _ in range(6)]
        await settle()
        assert len(pool.jobs) == 2
        assert inference.budget.reserved == 6 * SAMPLE + 2 * COST
        while pool.jobs:
            await pool.run()
        assert all([await call for call in calls])

    with_inference(scenario)


def test_an_image_whose_client_leaves_before_its_decoding_is_not_decoded() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        calls = [asyncio.ensure_future(decode(inference, [GOOD], Client())) for _ in range(3)]
        await settle()
        calls[1].cancel()
        await settle()
        await pool.run(3)
        assert pool.started == 2
        assert (inference.small_images._value, inference.budget.reserved) == (4, 0)
        with pytest.raises(asyncio.CancelledError):
            await calls[1]

    with_inference(scenario)


def test_the_header_of_an_image_is_measured_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[bytes] = []

    def decode_cost(codec: ImageCodec, data: bytes) -> DecodeCost:
        measured.append(data)
        return original(codec, data)

    original = ImageCodec.decode_cost
    monkeypatch.setattr(ImageCodec, "decode_cost", decode_cost)

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [GOOD, GOOD], Client()))
        await settle()
        while pool.jobs:
            await pool.run()
        assert len(await call) == 2
        assert measured == [GOOD, GOOD]

    with_inference(scenario)


def test_a_damaged_image_fails_its_call_and_images_still_decoded_keep_their_memory() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [BAD, *[GOOD] * 19], Client()))
        await settle()
        await pool.run()  # the headers
        pool.begin()
        await pool.run()  # the damaged one
        with pytest.raises(BadInputError, match="damaged"):
            await call
        await settle()
        assert inference.budget.reserved == 3 * COST, "three that had begun, and not the next one"
        await pool.run(4)
        assert not pool.jobs
        assert inference.budget.reserved == 0

    with_inference(scenario)


@pytest.mark.parametrize(
    ("client", "reason"), [(Client(timeout=0.5), ExpiredError), (Client(disconnect_later), ClientDisconnectedError)]
)
def test_decoding_ends_when_the_client_disconnects_or_its_time_out_passes(
    client: Client, reason: type[Exception]
) -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [GOOD] * 20, client))
        await settle()
        await pool.run()  # the headers
        pool.begin()
        with pytest.raises(reason):
            await call
        await pool.run(20)
        assert pool.started == 1 + 4
        assert inference.budget.reserved == 0
        assert inference.budget.pending.total() == 0

    with_inference(scenario)


def test_a_call_with_too_many_pixels_is_rejected_by_the_headers() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [huge()] * 6, Client()))
        await settle()
        await pool.run()
        with pytest.raises(TooLargeError, match="as long as 294 megapixels, over the maximum of 250"):
            await call
        assert not pool.jobs

    with_inference(scenario)


def test_large_images_of_one_call_are_decoded_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [huge()] * 3, Client()))
        await settle()
        await pool.run()
        assert len(pool.jobs) == 1
        call.cancel()
        await pool.run()

    with_inference(scenario)
    gc.collect()
    assert "never retrieved" not in caplog.text, "the decoding that failed after the call had ended"


def test_an_image_over_the_free_memory_is_rejected_and_one_over_the_budget_is_too_large() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        for held, limit, reason in ((2 * COST, 3 * COST - 1, MemoryBudgetError), (0, 2 * COST - 1, TooLargeError)):
            inference.budget.reserved, inference.budget.limit = held, limit
            call = asyncio.ensure_future(inference._decode_one(MODEL.codec, GOOD, MODEL.codec.decode_cost(GOOD)))
            await settle()
            with pytest.raises(reason):
                await call
            assert inference.budget.reserved == held
            assert inference.small_images._value == 4

    with_inference(scenario)


def test_a_burst_is_rejected_before_it_is_decoded() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        calls = [asyncio.ensure_future(decode(inference, [GOOD], Client())) for _ in range(6)]
        await settle()
        for call in calls[4:]:
            with pytest.raises(QueueFullError, match="no room for 1 more: 4 of 4 places"):
                await call
        assert inference.budget.pending["m"] == 4
        await pool.run(4)
        assert [len(await call) for call in calls[:4]] == [1] * 4
        assert inference.budget.pending["m"] == 0

    with_inference(scenario, capacity=4)


def test_unfinished_uploads_reserve_memory_but_no_place_in_the_queue() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        uploads = [asyncio.ensure_future(read(inference, HEAD, Client())) for _ in range(40)]
        await settle()
        assert inference.budget.reserved == 40 * 2**18
        call = asyncio.ensure_future(decode(inference, [GOOD], Client()))
        await settle()
        await pool.run()
        assert len(await call) == 1
        for upload in uploads:
            upload.cancel()
        await settle()
        assert inference.budget.reserved == 0

    with_inference(scenario, capacity=4)


@pytest.mark.parametrize(
    ("headers", "held"),
    [
        (HEAD, 2**18),
        ({b"content-length": b"5000000"}, 2**18),
        ({b"transfer-encoding": b"chunked"}, 2**18),
    ],
)
def test_memory_is_reserved_for_a_body_before_it_is_received(headers: dict[bytes, bytes], held: int) -> None:
    async def scenario(inference: Inference, _: HeldPool) -> None:
        gone = asyncio.ensure_future(read(inference, headers, Client()))
        await settle()
        assert inference.budget.reserved == held
        gone.cancel()
        await settle()
        context = context_of(inference, Client(sends(b"abc")), headers)
        with context.memory:
            assert await inference.read(MODEL, context) == b"abc"
            assert inference.budget.reserved == 3
        with pytest.raises(ClientDisconnectedError):
            await read(inference, headers, Client(disconnect))
        assert inference.budget.reserved == 0

    with_inference(scenario)


def test_memory_is_reserved_while_a_body_is_decompressed() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        plain = bytes(3 * 2**20)
        packed = gzip.compress(plain)
        headers = {b"content-length": b"%d" % len(packed), b"content-encoding": b"gzip"}
        for limit in (4 * len(plain) + 2 * len(packed), 2 * len(plain)):
            inference.budget.limit = limit
            context = context_of(inference, Client(sends(packed)), headers)
            with context.memory:
                call = asyncio.ensure_future(inference.read(MODEL, context))
                await settle()
                assert inference.budget.pending["m"] == 1
                while pool.jobs:
                    await pool.run()
                if limit > 2 * len(plain):
                    assert await call == plain
                    assert inference.budget.reserved == len(plain)
                else:
                    with pytest.raises(TooLargeError):
                        await call
            assert inference.budget.reserved == inference.budget.pending["m"] == 0

    with_inference(scenario)


def test_a_call_after_its_time_out_is_expired_and_the_error_has_the_time_out() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        late = Client(stay_connected, 0.3, age=3.0)
        pixels = MODEL.codec.read_pixels(bytes(SAMPLE))
        for attempt in (
            infer(inference, [pixels], context_of(inference, late)),
            decode(inference, [GOOD], late),
        ):
            with pytest.raises(ExpiredError, match=r"timeout of 300 ms passed"):
                await attempt
        assert not pool.jobs

    with_inference(scenario)


def test_the_exported_response_time_is_from_the_first_byte_to_the_response() -> None:
    async def scenario(inference: Inference, _: HeldPool) -> None:
        scope = call_scope(age=3.0)  # its body took 3 s

        async def answer(model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
            await infer(inference, [MODEL.codec.read_pixels(bytes(SAMPLE))] * 2, context)
            return b"", []

        async def send(message: Message) -> None:
            assert "batchwright_response_seconds_sum" not in inference.metrics.render().decode()

        await inference.serve("m", answer, AsgiContext(scope, stay_connected, send))
        text = inference.metrics.render().decode()
        device = inference.fleet.dispatchers[0].device
        assert f'batchwright_response_seconds_count{{device="{device}",model="m"}} 2.0' in text
        total = next(line for line in text.splitlines() if line.startswith("batchwright_response_seconds_sum"))
        assert float(total.split()[-1]) >= 2 * 3.0
        assert 'batchwright_requests_total{model="m",outcome="ok"} 2.0' in text

    with_inference(scenario)


def test_a_request_is_late_by_the_time_since_its_whole_body_was_read() -> None:
    async def scenario(inference: Inference, _: HeldPool) -> None:
        inference.metrics.objective("m", 2.0, 0.95)
        scope = call_scope(age=3.0)  # its body took 3 s

        def answer(since: float) -> Answer:
            async def infer_late(model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
                await inference.read(MODEL, context)
                context.received -= since
                await infer(inference, [MODEL.codec.read_pixels(bytes(SAMPLE))] * 2, context)
                return b"", []

            return infer_late

        late = 'batchwright_deadline_missed_total{model="m"} 2.0'
        await inference.serve("m", answer(0.0), AsgiContext(scope, sends(b""), discard))
        assert late not in inference.metrics.render().decode()
        await inference.serve("m", answer(3.0), AsgiContext(scope, sends(b""), discard))
        assert late in inference.metrics.render().decode()

    with_inference(scenario)


@pytest.mark.parametrize(
    ("header", "field", "smaller"), [("300", None, 0.3), ("300", 60_000_000, 0.3), ("60000", 300_000, 0.3)]
)
def test_the_smaller_of_the_time_outs_of_protocol_and_header_counts(
    header: str, field: int | None, smaller: float
) -> None:
    entry = {
        "name": "image",
        "shape": [1, 224, 224, 3],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": SAMPLE},
    }
    document = json.dumps({"inputs": [entry], "parameters": {"timeout": field}}).encode()
    headers = [(b"x-timeout-ms", header.encode()), (b"inference-header-content-length", b"%d" % len(document))]
    status: list[int] = []

    async def send(message: Message) -> None:
        status.append(message.get("status", 0))

    async def scenario(inference: Inference, _: HeldPool) -> None:
        path = "/v2/models/m/infer"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {}}
        loop = asyncio.get_running_loop()
        began = loop.time()
        await serve_asgi(Infer(inference).find, scope, sends(document + np.zeros(SAMPLE, np.uint8).tobytes()), send)
        assert status[0] == 504
        assert smaller - 0.1 < loop.time() - began <= smaller

    with_inference(scenario, policy=static(8))


def test_a_body_is_reserved_piece_by_piece_as_it_is_read() -> None:
    pieces: list[Message] = [{"type": "http.request", "body": bytes(3 * 2**20), "more_body": True}]

    async def receive() -> Message:
        return pieces.pop() if pieces else await stay_connected()

    async def scenario(inference: Inference, _: HeldPool) -> None:
        call = asyncio.ensure_future(read(inference, {b"transfer-encoding": b"chunked"}, Client(receive)))
        await settle()
        assert inference.budget.reserved == 3 * 2**20
        call.cancel()
        await settle()
        assert inference.budget.reserved == 0

    with_inference(scenario)


def infer_scope(document: bytes, model: str = "m") -> dict[str, Any]:
    headers = [(b"inference-header-content-length", b"%d" % len(document))]
    path = f"/v2/models/{model}/infer"
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {}}


def pixels_call(samples: int = 1, **more: Any) -> tuple[bytes, bytes]:
    parameters = {"binary_data_size": samples * SAMPLE}
    shape = [samples, 224, 224, 3]
    entry = {"name": "image", "shape": shape, "datatype": "UINT8", "parameters": parameters}
    return json.dumps({"inputs": [entry], **more}).encode(), bytes(samples * SAMPLE)


@pytest.mark.parametrize("route", [Infer, Predict])
def test_a_call_counts_as_pending_only_until_it_is_queued(route: Callable[[Inference], Any]) -> None:
    scope = infer_scope(b"") if route is Infer else {**infer_scope(b""), "path": "/predict/m"}

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(serve_asgi(route(inference).find, scope, sends(GOOD), discard))
        await settle()
        assert inference.budget.pending["m"] == 1, "it is being decoded"
        await pool.run()
        assert inference.fleet.waiting == 1
        assert inference.budget.pending.total() == 0
        call.cancel()
        await settle()

    with_inference(scenario, policy=static(8))


async def discard(message: Message) -> None:
    pass


class SlowReader:
    """A client that reads nothing of the response until the test sets `reading`.

    Attributes:
        sent: messages sent to the client.
        started: set with the first message.
        reading: set by the test.
    """

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.started, self.reading = asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.sent.append(message)
        self.started.set()
        await self.reading.wait()


def test_after_its_inputs_are_dropped_a_call_reserves_the_size_of_its_response() -> None:
    document, pixels = pixels_call(2, id="mine")

    async def scenario(inference: Inference, _: HeldPool) -> None:
        executor: Any = inference.fleet.dispatchers[0].executor
        inputs: list[weakref.ref[Any]] = []

        def small(outputs: list[Any]) -> list[Any]:
            inputs.extend(map(weakref.ref, outputs))
            executor.log.clear()
            return [np.zeros(10, np.float32) for _ in outputs]

        executor.fault, client = small, SlowReader()
        call = asyncio.ensure_future(
            serve_asgi(Infer(inference).find, infer_scope(document), sends(document + pixels), client)
        )
        await settle()
        assert inference.budget.reserved == len(document + pixels) + 4 * len(document), "the body and the parsed values"
        await client.started.wait()
        await asyncio.sleep(0.1)
        length = next(int(value) for name, value in client.sent[0]["headers"] if name == b"content-length")
        assert inference.budget.reserved == length, "the response, which the client has not read yet"
        assert [one() is None for one in inputs] == [True, True], "the inputs are freed already"
        client.reading.set()
        await call
        assert inference.budget.reserved == 0
        assert json.loads(client.sent[1]["body"])["id"] == "mine"

    with_inference(scenario, policy=static(2))


def test_a_long_document_is_parsed_with_a_reservation_one_at_a_time() -> None:
    flat = json.dumps(
        {"inputs": [{"name": "image", "shape": [1, 224, 224, 3], "datatype": "UINT8", "data": [1] * SAMPLE}]}
    )
    scope = {**infer_scope(b""), "headers": []}

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        calls = [
            asyncio.ensure_future(serve_asgi(Infer(inference).find, scope, sends(flat.encode()), discard))
            for _ in range(3)
        ]
        await settle()
        assert len(pool.jobs) == 1, "the check of its size"
        assert inference.budget.reserved == 3 * len(flat)
        await pool.run()
        assert len(pool.jobs) == 1, "its parsing"
        assert inference.budget.reserved > 3 * len(flat) + 8_000_000
        await pool.run()
        assert len(pool.jobs) == 1
        assert inference.budget.reserved == 3 * len(flat) + 4 * len(flat), "its values, until the response"
        for call in calls:
            call.cancel()
        await settle()
        assert inference.budget.reserved == 0

    with_inference(scenario, policy=static(8))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], b"{" + b" " * 2**23 + b"}"),
        ([(b"content-encoding", b"gzip")], gzip.compress(b"{" + b" " * 2**26 + b"}")),
        ([(b"inference-header-content-length", b"9000000")], bytes(10_000_000)),
        ([(b"content-length", b"9000000")], b""),
    ],
    ids=["long", "compressed", "before a tensor", "announced"],
)
def test_the_error_for_json_over_the_limit_proposes_binary_data(headers: list[Any], body: bytes) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        scope = {**infer_scope(b""), "headers": headers}
        call = asyncio.ensure_future(serve_asgi(Infer(inference).find, scope, sends(body), send))
        await settle()
        while pool.jobs:
            await pool.run()
            assert inference.budget.reserved < 2.5 * 2**23
        await call
        assert sent[0]["status"] == 413
        assert "send tensors as binary data" in json.loads(sent[1]["body"])["error"]

    with_inference(scenario)


def broken() -> NoReturn:
    raise ZeroDivisionError


def test_a_bug_is_counted_as_a_failed_request() -> None:
    sent: list[Message] = []

    async def answer(model: ServedModel, context: RequestContext) -> tuple[bytes, Headers]:
        context.samples = 3
        return broken()

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario(inference: Inference, _: HeldPool) -> None:
        await inference.serve("m", answer, AsgiContext(call_scope(), stay_connected, send))
        assert sent[0]["status"] == 500
        text = inference.metrics.render().decode()
        assert 'batchwright_requests_total{model="m",outcome="failed"} 3.0' in text
        assert inference.metrics.statistics.of("m").fail.count == 1

    with_inference(scenario)


def test_images_that_take_long_leave_a_thread_to_others() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        inference = replace(inference, decoding=asyncio.Semaphore(2), heavy=asyncio.Semaphore(1))
        calls = [asyncio.ensure_future(decode(inference, [huge()], Client())) for _ in range(3)]
        await settle()
        assert len(pool.jobs) == 1
        calls.append(asyncio.ensure_future(decode(inference, [GOOD], Client())))
        await settle()
        assert len(pool.jobs) == 2
        for call in calls:
            call.cancel()
        await pool.run(2)
        assert (inference.heavy._value, inference.decoding._value) == (1, 2)
        assert inference.budget.reserved == 0

    with_inference(scenario)


def test_the_check_for_room_reads_no_waiting_request() -> None:
    reads = 0

    class Watched(BatchKey):
        @property
        def model(self) -> str:
            nonlocal reads
            reads += 1
            return "m"

    async def scenario(inference: Inference, _: HeldPool) -> None:
        waiting = submit(inference.fleet, "m", [0.0] * 7)
        await settle()
        inference.fleet.dispatchers[0].policies.batcher.set_kinds(lambda _: Watched("m"))
        reads_before = reads
        context = context_of(inference, Client(timeout=60.0))
        with context.memory:
            inference._begin_pending("m", 1, context)
        assert reads == reads_before
        assert inference.fleet.queue_length("m") == 7
        waiting.cancel()

    with_inference(scenario, policy=static(8))


def test_a_hung_decode_keeps_its_thread_and_memory_and_takes_none_of_the_others() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        user_pool = HeldPool()
        inference = replace(inference, user_pool=user_pool, user_code=asyncio.Semaphore(1))
        hung = asyncio.ensure_future(inference.run_user_code(1000, str))
        waiting = asyncio.ensure_future(inference.run_user_code(10, str))
        await settle()
        assert len(user_pool.jobs) == 1, "the other one waits without a thread"
        for call in (hung, waiting):
            call.cancel()
        await asyncio.gather(hung, waiting, return_exceptions=True)
        assert inference.budget.reserved == 1000, "its thread has the body, although the call has ended"
        reading = asyncio.ensure_future(decode(inference, [GOOD], Client()))
        await settle()
        await pool.run()
        assert len(await reading) == 1, "images are decoded by another pool"
        after = asyncio.ensure_future(inference.run_user_code(10, str))
        await settle()
        assert len(user_pool.jobs) == 1
        await user_pool.run(2)
        await settle()
        await user_pool.run()
        assert await after == ""
        assert inference.budget.reserved == 0

    with_inference(scenario)
