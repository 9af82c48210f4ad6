"""Inference calls over sockets, with a dispatcher: outcomes, memory and decoding."""

import asyncio
import gc
import io
import logging
import re
import time
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from policies.profile import Profile
from policies.rules.control_limit import static
from server.api.inference import Inference
from server.api.open_inference.infer import Infer
from server.api.predict import Predict
from server.errors import BadInputError
from server.models.images.codec import emulated_model
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.http_call import HttpCall
from server.transport.request import Handler
from tests.support.fakes import UNLIMITED, FakeExecutor, chosen
from tests.support.inference_server import App, Server, exchange, post, run, serving, settle, until

pytestmark = pytest.mark.usefixtures("quiet")

PIXELS = bytes(range(256)) * 588
INFER, PREDICT = "/v2/models/m/infer", "/predict"
RAW = b"Inference-Header-Content-Length: 0"


@dataclass
class InferenceApp(App):
    """The inference routes of one model on a fake device."""

    inference: Inference | None = None

    def find(self, path: str) -> Handler | None:
        assert self.inference is not None
        return Infer(self.inference).find(path) or Predict(self.inference).find(path)


@asynccontextmanager
async def inferring(
    batch_size: int = 1, service: float = 0.002
) -> AsyncIterator[tuple[Server, Inference, FakeExecutor]]:
    profile = Profile("constant", (service, service, service))
    executor, metrics = FakeExecutor(profile), Metrics()
    executor.fault = lambda inputs: [np.arange(1000, dtype=np.float32) for _ in inputs]
    loop = asyncio.get_running_loop()
    policy = chosen(static(batch_size), profile)
    dispatcher = Dispatcher(executor, policy, metrics, loop.time, UNLIMITED)
    running = asyncio.ensure_future(dispatcher.run())
    app = InferenceApp()
    with ThreadPoolExecutor(4) as pool:
        app.inference = Inference({"m": emulated_model("m", 3)}, Fleet([dispatcher]), metrics, pool, 100, app.budget)
        async with serving(app=app) as server:
            yield server, app.inference, executor
        assert not +app.inference.calls, "no call is open"
        assert app.inference.fleet.waiting == 0
    running.cancel()


def outcomes(inference: Inference) -> dict[str, int]:
    """The number of requests by outcome, of those that occurred."""
    lines = re.findall(r'_requests_total\{.*outcome="(\w+)".*\} (\S+)', inference.metrics.render().decode())
    return {outcome: int(float(count)) for outcome, count in lines if float(count)}


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (300, 300), "red").save(file, kind)
    return file.getvalue()


def test_calls_are_answered_and_counted(loop: str) -> None:
    sent = b"".join(
        [
            post(PREDICT, picture("JPEG")),
            post(INFER, picture("PNG"), RAW),
            post(INFER, PIXELS, RAW),
            post(INFER, PIXELS[1:], RAW),
            post("/v2/models/other/infer", PIXELS, RAW),
            post("/v2/models/m/versions/2/infer", PIXELS, RAW),
            post(PREDICT, picture("JPEG")[:-300]),
            post(INFER, b"no JSON", b"X-Timeout-Ms: 60000"),
            post(INFER, PIXELS, RAW, b"X-Timeout-Ms: no number"),
            post(INFER, PIXELS, RAW, b"X-Timeout-Ms: 0.001"),
        ]
    )

    async def scenario() -> Any:
        async with inferring() as (server, inference, _):
            responses, closed = await exchange(await server.pair(), [sent], server.busy)
            answered = [(one.status, re.sub(rb"[\d.]+", b"", one.body)) for one in responses]
            return answered, closed, outcomes(inference)

    answered, closed, counted = run(scenario(), loop)
    assert [status for status, _ in answered] == [200, 200, 200, 400, 404, 404, 400, 400, 400, 504]
    assert not closed
    assert counted == {"ok": 3, "bad_input": 5, "expired": 1}, "but of a model that is not served"


@pytest.mark.parametrize("stage", ["body", "queue", "service", "decoding"])
def test_a_disconnect_is_counted_once(stage: str, loop: str) -> None:
    async def scenario() -> None:
        async with inferring(2 if stage == "queue" else 1, 0.2) as (server, inference, _):
            client = await server.pair()
            sent = post(PREDICT, picture("JPEG")) if stage == "decoding" else post(INFER, PIXELS, RAW)
            client.setblocking(True)
            await asyncio.to_thread(client.sendall, sent[:-1] if stage == "body" else sent)
            fleet = inference.fleet
            begun = {
                "body": lambda: server.app.budget.reserved,
                "queue": lambda: fleet.waiting,
                "service": lambda: fleet.open_calls and not fleet.waiting,
                "decoding": lambda: server.app.budget.pending.total() or fleet.open_calls,
            }
            await until(begun[stage])
            for connection in server.connections:
                connection.abort()
            client.close()
            await until(lambda: not +inference.calls)
            await settle()
            assert outcomes(inference) == {"cancelled": 1}
            await until(lambda: not server.app.budget.reserved)  # a thread that decodes keeps its memory

    run(scenario(), loop)


def test_the_body_of_a_call_that_expires_is_freed_without_garbage_collection(loop: str) -> None:
    async def scenario() -> None:
        async with inferring(batch_size=2) as (server, _, _):
            tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 224, 224, 3]}
            head = orjson.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(PIXELS)}}]})
            length = b"Inference-Header-Content-Length: %d" % len(head)
            for more, body in ((RAW, PIXELS), (length, head + PIXELS)):
                sent = post(INFER, body, more, b"X-Timeout-Ms: 30")
                responses, _ = await exchange(await server.pair(), [sent], server.busy)
                assert [one.status for one in responses] == [504]
                await settle()
                views = [one for one in gc.get_objects() if type(one) is memoryview and one.nbytes == len(body)]
                assert views == [], "nothing refers to the body"

    gc.collect()
    gc.disable()
    try:
        run(scenario(), loop)
    finally:
        gc.enable()


def test_the_time_of_a_call_ends_with_its_answer(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop answers others before it counts the call."""
    calls: list[HttpCall] = []
    begin = HttpCall._begin

    def with_others(call: HttpCall, *arguments: Any) -> None:
        calls.append(call)
        asyncio.get_running_loop().call_soon(time.sleep, 0.01)
        begin(call, *arguments)

    monkeypatch.setattr(HttpCall, "_begin", with_others)

    async def scenario() -> None:
        async with inferring() as (server, inference, _):
            await exchange(await server.pair(), [post(PREDICT, picture("JPEG"))], server.busy)
            await until(lambda: outcomes(inference))
            [counted] = re.findall(r"batchwright_response_seconds_sum\{.*\} (\S+)", inference.metrics.render().decode())
            assert float(counted) == pytest.approx(calls[0].answered - calls[0].began, abs=1e-6)

    run(scenario(), loop)


def test_inputs_and_outputs_of_a_call_are_freed_at_its_end_without_the_collector(loop: str) -> None:
    """Also where it is refused after its batch, fails, expires in the queue or is cancelled."""
    seen = list[weakref.ref[Any]]()

    def watch(inference: Inference) -> None:
        submit = inference.fleet.submit

        def watched(model: str, samples: Any, *rest: Any) -> Any:
            seen.extend(weakref.ref(sample.input) for sample in samples)
            return submit(model, samples, *rest)

        inference.fleet.submit = watched  # type: ignore[assignment]

    async def scenario() -> None:
        async with inferring(batch_size=1) as (server, inference, executor):
            watch(inference)

            def outputs(inputs: Any) -> Any:
                made = [np.arange(1000, dtype=np.float32) for _ in inputs]
                seen.extend(map(weakref.ref, made))
                return made

            def fail(error: Exception) -> Any:
                raise error

            for status, serves in (
                (200, outputs),
                (400, lambda _: fail(BadInputError("a value is wrong"))),
                (500, lambda _: fail(ValueError("a bug"))),
            ):
                executor.fault = serves
                responses, _ = await exchange(await server.pair(), [post(INFER, PIXELS, RAW)], server.busy)
                assert [one.status for one in responses] == [status]
                await settle()
                executor.log.clear()
                assert [number for number, each in enumerate(seen) if each() is not None] == [], f"after {status}"
        async with inferring(batch_size=2) as (server, inference, executor):
            watch(inference)
            sent = [post(INFER, PIXELS, RAW, b"X-Timeout-Ms: 30")]
            responses, _ = await exchange(await server.pair(), sent, server.busy)
            assert [one.status for one in responses] == [504]
            await settle()
            assert [number for number, each in enumerate(seen) if each() is not None] == [], "after its expiry"
            client = await server.pair()
            await asyncio.to_thread(client.sendall, post(INFER, PIXELS, RAW))
            await until(lambda: inference.fleet.waiting)
            for connection in server.connections:
                connection.abort()
            client.close()
            await until(lambda: not inference.fleet.open_calls)
            await settle()
            assert [number for number, each in enumerate(seen) if each() is not None] == [], "after it was cancelled"

    gc.collect()
    gc.disable()
    logging.disable()  # pytest keeps the records, with the frames of their exceptions
    try:
        run(scenario(), loop)
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    assert len(seen) == 6
