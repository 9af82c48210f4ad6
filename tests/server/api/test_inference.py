"""One inference call: memory reservations, admission control, and cancellation."""

import asyncio
import gzip
import io
import json
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from starlette.types import Message

from policies.rules.control_limit import greedy, static
from policies.types import Kind, Policy
from server.api.inference import Inference
from server.api.open_inference.routes import Infer
from server.api.predict import Predict
from server.errors import BadInputError, ExpiredError, QueueFullError, TooLargeError
from server.models.images import emulated_model
from server.models.model import Inputs
from server.models.signature import Tensor
from server.scheduling.admission import Limits
from server.scheduling.calls import Answer
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.asgi import ClientGoneError
from server.transport.memory_budget import MemoryBudget, MemoryBudgetError
from server.transport.request_context import RequestContext
from tests.support.fakes import chosen, run_scenario

MODEL = emulated_model("m", 8)
SAMPLE = 224 * 224 * 3
HEAD = {b"content-length": b"500000"}


class HeldPool(Executor):
    """Threads that begin only when the test says so.

    Attributes:
        jobs: not begun.
        begun: how many have.
    """

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.begun = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: function(*arguments, **named)))
        return future

    async def run(self, most: int = 1) -> None:
        """Do so many of the jobs, and let the loop see it."""
        for _ in range(min(most, len(self.jobs))):
            future, job = self.jobs.popleft()
            self.begun += future.set_running_or_notify_cancel()
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  (as a pool does)
                future.set_exception(error)
        await settle()


async def settle() -> None:
    """Run all tasks as far as they can, at this instant."""
    for _ in range(20):
        await asyncio.sleep(0)


async def stays() -> Message:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def leaves() -> Message:
    return {"type": "http.disconnect"}


def sends(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    """A client that sends its whole body, and then waits."""
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return messages.pop() if messages else await stays()

    return receive


class Client(NamedTuple):
    """A client: its connection, its time-out, and how long ago its call began, s."""

    receive: Callable[[], Coroutine[Any, Any, Message]] = stays
    timeout: float = float("inf")
    ago: float = 0.0


def context_of(inference: Inference, client: Client, headers: Mapping[bytes, bytes] | None = None) -> RequestContext:
    scope = {"headers": [*(headers or {}).items()], "state": {"began": monotonic() - client.ago}}
    context = RequestContext(scope, client.receive, inference.budget)
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
        parts_ = ({"m": MODEL}, Fleet([dispatcher]), Metrics(), pool, capacity, MemoryBudget(limit, lambda: 1))
        await scenario(Inference(*parts_, asyncio.Semaphore(4)), pool)

    run_scenario(build, chosen(policy or greedy(8)), limits=Limits(capacity))


async def decode(inference: Inference, pictures: list[bytes], client: Client) -> list[Any]:
    context = context_of(inference, client)
    tensor = Tensor("image", "BYTES", (len(pictures),), pictures)
    with context.memory:
        return await inference._decode(MODEL, MODEL.codec.from_tensor(tensor, {}, {}), context)


async def read(inference: Inference, headers: Mapping[bytes, bytes], client: Client) -> bytes:
    context = context_of(inference, client, headers)
    with context.memory:
        return await inference.read(MODEL, context)


async def infer(inference: Inference, samples: list[Any], context: RequestContext) -> list[Answer]:
    async def inputs() -> Inputs:
        return Inputs(len(samples), lambda: samples)

    return await inference.infer(MODEL, context, inputs)


def png(side: int = 300) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def huge(side: int = 7000) -> bytes:
    """A PNG of which there is little but the header."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


GOOD = png()
BAD = GOOD[:-20] + bytes(8) + GOOD[-12:]  # its header is good
COST = MODEL.codec.measure(GOOD).held


def test_decoding_is_counted_while_it_goes_on_and_pictures_that_wait_take_nothing() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [GOOD] * 20, Client()))
        await settle()
        await pool.run()  # their headers
        assert len(pool.jobs) == 4
        assert inference.budget.held == 20 * SAMPLE + 4 * COST
        while pool.jobs:
            await pool.run()
        assert len(await call) == 20
        assert inference.budget.held == 0
        assert inference.decoding._value == 4

    with_inference(scenario)


def test_one_bad_picture_ends_its_call_and_what_is_still_decoded_stays_counted() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [BAD, *[GOOD] * 19], Client()))
        await settle()
        await pool.run()  # their headers
        await pool.run()  # the bad one
        with pytest.raises(BadInputError, match="damaged"):
            await call
        await settle()
        assert len(pool.jobs) == 4, "three that had begun, and the one whose turn it was: no further one"
        assert inference.budget.held == 4 * COST
        await pool.run(4)
        assert not pool.jobs
        assert inference.budget.held == 0

    with_inference(scenario)


@pytest.mark.parametrize(("client", "reason"), [(Client(timeout=0.5), ExpiredError), (Client(leaves), ClientGoneError)])
def test_a_client_that_left_or_timed_out_ends_decoding(client: Client, reason: type[Exception]) -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [GOOD] * 20, client))
        await settle()
        await pool.run()
        with pytest.raises(reason):
            await call
        await pool.run(20)
        assert pool.begun == 1 + 4
        assert inference.budget.held == 0
        assert inference.budget.pending.total() == 0

    with_inference(scenario)


def test_a_call_of_too_many_pixels_is_refused_by_the_headers() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [huge()] * 6, Client()))
        await settle()
        await pool.run()
        with pytest.raises(TooLargeError, match="as long as 294 megapixels, over the bound of 250"):
            await call
        assert not pool.jobs

    with_inference(scenario)


def test_large_pictures_of_one_call_are_decoded_one_by_one() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(decode(inference, [huge()] * 3, Client()))
        await settle()
        await pool.run()
        assert len(pool.jobs) == 1
        call.cancel()
        await pool.run()

    with_inference(scenario)


def test_a_picture_that_finds_no_room_is_refused_and_one_that_never_does_is_too_large() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        for held, limit, reason in ((2 * COST, 3 * COST - 1, MemoryBudgetError), (0, 2 * COST - 1, TooLargeError)):
            inference.budget.held, inference.budget.limit = held, limit
            call = asyncio.ensure_future(inference._decode_one(MODEL.codec, GOOD, MODEL.codec.measure(GOOD)))
            await settle()
            with pytest.raises(reason):
                await call
            assert inference.budget.held == held
            assert inference.decoding._value == 4

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


def test_bodies_that_do_not_come_take_bytes_but_no_place() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        uploads = [asyncio.ensure_future(read(inference, HEAD, Client())) for _ in range(40)]
        await settle()
        assert inference.budget.held == 40 * 500_000
        call = asyncio.ensure_future(decode(inference, [GOOD], Client()))
        await settle()
        await pool.run()
        assert len(await call) == 1
        for upload in uploads:
            upload.cancel()
        await settle()
        assert inference.budget.held == 0

    with_inference(scenario, capacity=4)


@pytest.mark.parametrize(
    ("headers", "held"),
    [
        (HEAD, 500_000),
        ({b"content-length": b"5000000"}, 2**19),
        ({b"transfer-encoding": b"chunked"}, 2**19),
    ],
)
def test_what_a_connection_may_hold_is_counted_before_it_is_seen(headers: dict[bytes, bytes], held: int) -> None:
    async def scenario(inference: Inference, _: HeldPool) -> None:
        gone = asyncio.ensure_future(read(inference, headers, Client()))
        await settle()
        assert inference.budget.held == held
        gone.cancel()
        await settle()
        context = context_of(inference, Client(sends(b"abc")), headers)
        with context.memory:
            assert await inference.read(MODEL, context) == b"abc"
            assert inference.budget.held == 3
        with pytest.raises(ClientGoneError):
            await read(inference, headers, Client(leaves))
        assert inference.budget.held == 0

    with_inference(scenario)


def test_a_body_is_counted_as_it_is_unpacked() -> None:
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
                    assert inference.budget.held == len(plain)
                else:
                    with pytest.raises(TooLargeError):
                        await call
            assert inference.budget.held == inference.budget.pending["m"] == 0

    with_inference(scenario)


def test_a_time_out_that_has_passed_is_expired_and_says_what_the_client_sent() -> None:
    async def scenario(inference: Inference, pool: HeldPool) -> None:
        late = Client(stays, 0.3, ago=3.0)
        pixels = MODEL.codec.pixels(bytes(SAMPLE))
        for attempt in (
            infer(inference, [pixels], context_of(inference, late)),
            inference._submit(MODEL, [pixels], context_of(inference, late)),
            decode(inference, [GOOD], late),
        ):
            with pytest.raises(ExpiredError, match=r"time-out of 300 ms passed"):
                await attempt
        assert not pool.jobs

    with_inference(scenario)


def test_the_response_time_that_is_exported_begins_with_the_call_and_ends_with_its_answer() -> None:
    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def scenario(inference: Inference, _: HeldPool) -> None:
        scope = {"type": "http", "headers": [], "state": {"began": monotonic() - 3.0}}  # its body took so long
        async with inference.answering("m", scope, stays, send) as context:
            await infer(inference, [MODEL.codec.pixels(bytes(SAMPLE))] * 2, context)
            assert "batchwright_response_seconds_sum" not in inference.metrics.render().decode()
        text = inference.metrics.render().decode()
        assert f'batchwright_response_seconds_count{{device="{inference.fleet.first.device}",model="m"}} 2.0' in text
        total = next(line for line in text.splitlines() if line.startswith("batchwright_response_seconds_sum"))
        assert float(total.split()[-1]) >= 2 * 3.0
        assert 'batchwright_requests_total{model="m",outcome="ok"} 2.0' in text

    with_inference(scenario)


@pytest.mark.parametrize(
    ("header", "field", "least"), [("300", None, 0.3), ("300", 60_000_000, 0.3), ("60000", 300_000, 0.3)]
)
def test_the_least_of_the_protocols_time_out_and_the_headers_holds(
    header: str, field: int | None, least: float
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
        await Infer(inference)(scope, sends(document + np.zeros(SAMPLE, np.uint8).tobytes()), send)
        assert status[0] == 504
        assert least - 0.1 < loop.time() - began <= least

    with_inference(scenario, policy=static(8))


def test_a_body_is_reserved_piece_by_piece_as_it_is_read() -> None:
    pieces: list[Message] = [{"type": "http.request", "body": bytes(3 * 2**20), "more_body": True}]

    async def receive() -> Message:
        return pieces.pop() if pieces else await stays()

    async def scenario(inference: Inference, _: HeldPool) -> None:
        call = asyncio.ensure_future(read(inference, {b"transfer-encoding": b"chunked"}, Client(receive)))
        await settle()
        assert inference.budget.held == 3 * 2**20
        call.cancel()
        await settle()
        assert inference.budget.held == 0

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
def test_a_call_counts_as_on_its_way_to_the_queue_only_until_it_is_there(route: Callable[[Inference], Any]) -> None:
    scope = infer_scope(b"") if route is Infer else {**infer_scope(b""), "path": "/predict/m"}

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        call = asyncio.ensure_future(route(inference)(scope, sends(GOOD), discard))
        await settle()
        assert inference.budget.pending["m"] == 1, "it is being decoded"
        await pool.run()
        assert inference.fleet.waiting == 1
        assert inference.budget.pending["m"] == inference.budget.all_pending == 0
        call.cancel()
        await settle()

    with_inference(scenario, policy=static(8))


async def discard(message: Message) -> None:
    pass


class Unread:
    """A client that takes nothing of its answer until told so.

    Attributes:
        sent: the messages that it was sent.
        begun: set with the first of them.
        taken: to be set.
    """

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.begun, self.taken = asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.sent.append(message)
        self.begun.set()
        await self.taken.wait()


def test_what_a_call_holds_is_reserved_until_its_answer_is_sent_and_then_the_answer_alone() -> None:
    document, pixels = pixels_call(2, id="mine")

    async def scenario(inference: Inference, _: HeldPool) -> None:
        executor: Any = inference.fleet.first._executor
        inputs: list[weakref.ref[Any]] = []

        def small(outputs: list[Any]) -> list[Any]:
            inputs.extend(map(weakref.ref, outputs))
            executor.log.clear()
            return [np.zeros(10, np.float32) for _ in outputs]

        executor.fault, client = small, Unread()
        call = asyncio.ensure_future(Infer(inference)(infer_scope(document), sends(document + pixels), client))
        await settle()
        assert inference.budget.held == len(document + pixels) + 4 * len(document), "the body, and what was parsed"
        await client.begun.wait()
        await asyncio.sleep(0.1)
        length = next(int(value) for name, value in client.sent[0]["headers"] if name == b"content-length")
        assert inference.budget.held == length, "the answer, which the client has not taken yet"
        assert [one() is None for one in inputs] == [True, True], "the inputs are gone, though it has not"
        client.taken.set()
        await call
        assert inference.budget.held == 0
        assert json.loads(client.sent[1]["body"])["id"] == "mine"

    with_inference(scenario, policy=static(2))


def test_a_long_document_is_parsed_with_a_reservation_one_at_a_time() -> None:
    flat = json.dumps(
        {"inputs": [{"name": "image", "shape": [1, 224, 224, 3], "datatype": "UINT8", "data": [1] * SAMPLE}]}
    )
    scope = {**infer_scope(b""), "headers": []}

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        calls = [asyncio.ensure_future(Infer(inference)(scope, sends(flat.encode()), discard)) for _ in range(3)]
        await settle()
        assert len(pool.jobs) == 1, "its measure"
        assert inference.budget.held == 3 * len(flat)
        await pool.run()
        assert len(pool.jobs) == 1, "its parsing"
        assert inference.budget.held > 3 * len(flat) + 8_000_000
        await pool.run()
        assert len(pool.jobs) == 1
        assert inference.budget.held == 3 * len(flat) + 4 * len(flat), "its values, until the call is answered"
        for call in calls:
            call.cancel()
        await settle()
        assert inference.budget.held == 0

    with_inference(scenario, policy=static(8))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], b"{" + b" " * 2**20 + b"}"),
        ([(b"content-encoding", b"gzip")], gzip.compress(b"{" + b" " * 2**24 + b"}")),
        ([(b"inference-header-content-length", b"2000000")], bytes(3_000_000)),
        ([(b"content-length", b"2000000")], b""),
    ],
    ids=["long", "compressed", "before a tensor", "announced"],
)
def test_json_over_a_mebibyte_is_told_to_come_as_binary_data(headers: list[Any], body: bytes) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario(inference: Inference, pool: HeldPool) -> None:
        scope = {**infer_scope(b""), "headers": headers}
        call = asyncio.ensure_future(Infer(inference)(scope, sends(body), send))
        await settle()
        while pool.jobs:
            await pool.run()
            assert inference.budget.held < 2.5 * 2**20
        await call
        assert sent[0]["status"] == 413
        assert "send tensors as binary data" in json.loads(sent[1]["body"])["error"]

    with_inference(scenario)


def broken() -> None:
    raise ZeroDivisionError


def test_a_bug_is_counted_as_a_failed_request() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario(inference: Inference, _: HeldPool) -> None:
        async with inference.answering("m", {"type": "http", "headers": [], "state": {}}, stays, send) as context:
            context.samples = 3
            broken()
        assert sent[0]["status"] == 500
        text = inference.metrics.render().decode()
        assert 'batchwright_requests_total{model="m",outcome="failed"} 3.0' in text
        assert inference.metrics.statistics.of("m").fail.count == 1

    with_inference(scenario)


def test_pictures_that_take_long_leave_a_thread_to_the_others() -> None:
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
        assert inference.budget.held == 0

    with_inference(scenario)


def test_checking_for_room_looks_at_no_waiting_request() -> None:
    looks = 0

    class Watched(Kind):
        @property
        def model(self) -> str:
            nonlocal looks
            looks += 1
            return "m"

    async def scenario(inference: Inference, _: HeldPool) -> None:
        waiting = inference.fleet.submit("m", [0.0] * 7)
        await settle()
        inference.fleet.first._batcher.set_kinds(lambda _: Watched("m"))
        looks_before = looks
        context = context_of(inference, Client(timeout=60.0))
        with context.memory:
            inference._admit("m", 1, context)
        assert looks == looks_before
        assert inference.fleet.queue_length("m") == 7
        waiting.cancel()

    with_inference(scenario, policy=static(8))
