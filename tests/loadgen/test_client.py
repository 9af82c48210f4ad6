"""The client: an open loop, response times from the scheduled instant, and every way in which an answer can fail."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from loadgen import client
from loadgen.client import Response, RunLog, offer, open_session
from loadgen.report import Record
from policies.types import SpecError
from tests.support.stub_server import METADATA, Stub, busy, hang_up, hold, serving
from tests.support.virtual_clock import virtual_loop

PATIENCE = 30.0  # s; reached only by a client that waits for what never comes


class Slow:
    """A sender whose answers take for ever compared with the gaps between requests."""

    async def send(self) -> Response:
        await asyncio.sleep(1000.0)
        return Response(200)


def offered(
    instants: list[float], clock_of: Callable[[asyncio.AbstractEventLoop], Callable[[], float]]
) -> list[Record]:
    loop, log = virtual_loop(), RunLog()
    try:
        loop.run_until_complete(offer(Slow(), instants, log, clock_of(loop)))
    finally:
        loop.close()
    assert log.sent == len(log.records) == len(instants)
    return log.records


def with_server(stub: Stub, scenario: Callable[[ClientSession, str], Coroutine[Any, Any, Any]], patience: float) -> Any:
    async def main() -> Any:
        async with serving(stub) as url, open_session(patience) as session:
            return await scenario(session, url)

    return asyncio.run(main())


def load(stub: Stub, requests: int, pixels: bool = False, patience: float = PATIENCE) -> list[Record]:
    async def scenario(session: ClientSession, url: str) -> list[Record]:
        log = RunLog()
        sender: client.Sender = (
            await client.pixel_sender(session, url, None)
            if pixels
            else await client.image_sender(session, url, None, None)
        )
        await offer(sender, np.arange(requests) * 1e-3, log)
        assert log.errors == sum(record.status != 200 for record in log.records)
        return sorted(log.records, key=lambda record: record.scheduled)

    records = with_server(stub, scenario, patience)
    assert isinstance(records, list)
    return records


def test_requests_leave_on_time_whatever_the_answers_do() -> None:
    records = offered([0.0, 0.5, 0.5, 0.5, 2.0], lambda loop: loop.time)
    assert [r.sent for r in records] == [r.scheduled for r in records] == [0.0, 0.5, 0.5, 0.5, 2.0]
    assert [r.finished for r in records] == [1000.0, 1000.5, 1000.5, 1000.5, 1002.0]


def test_a_timer_that_fires_early_sends_nothing_early() -> None:
    records = offered([0.01 * i for i in range(50)], lambda loop: lambda: 0.9 * loop.time())
    assert all(r.sent >= r.scheduled for r in records)


def test_gaps_below_the_loops_resolution_are_waited_for_without_a_spin() -> None:
    turns = 0

    def counting(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
        def clock() -> float:
            nonlocal turns
            turns += 1
            return loop.time()

        return clock

    records = offered([1e-5 * i for i in range(1000)], counting)
    assert max(r.sent - r.scheduled for r in records) <= 1.1e-3
    assert turns < 4 * len(records)


def test_a_request_in_flight_when_the_run_is_cancelled_counts_as_interrupted() -> None:
    async def main() -> list[Record]:
        log = RunLog()
        task = asyncio.create_task(offer(Slow(), [0.0, 5.0, 5000.0], log, loop.time))
        await asyncio.sleep(10.0)
        task.cancel()
        await asyncio.wait([task])
        return sorted(log.records, key=lambda record: record.scheduled)

    loop = virtual_loop()
    records = loop.run_until_complete(main())
    loop.close()
    assert [(r.scheduled, r.finished, r.status) for r in records] == [
        (0.0, 10.0, "interrupted"),
        (5.0, 10.0, "interrupted"),
    ]


def test_a_late_first_answer_delays_no_later_request() -> None:
    """The first answer waits for all others: a client that waits for answers before it sends would never end."""
    release = asyncio.Event()

    async def let_go(_: web.Request) -> None:
        release.set()

    stub = Stub([hold(release), None, None, None, let_go])
    records = load(stub, 5)
    assert [r.status for r in records] == [200] * 5
    assert records[0].finished > max(r.sent for r in records)


@pytest.mark.parametrize("pixels", [False, True])
def test_what_the_answer_tells_is_recorded_in_base_units(pixels: bool) -> None:
    (record,) = load(Stub(), 1, pixels)
    assert (record.status, record.batch_size, record.waiting, record.service, record.energy) == (
        200,
        2,
        1.5e-3,
        4e-3,
        0.03,
    )
    assert record.scheduled <= record.sent <= record.finished


def test_the_photograph_goes_to_predict_as_it_is() -> None:
    stub = Stub()
    load(stub, 2)
    path, headers, body = stub.calls[1]
    assert path == "/predict/tiny"
    assert body == client.sample_photograph().read_bytes()
    assert headers["Content-Type"] == "image/jpeg"
    assert headers["Accept-Encoding"] == "identity"


def test_pixels_go_as_one_binary_tensor_of_the_models_size() -> None:
    stub = Stub()
    load(stub, 1, pixels=True)
    path, headers, body = stub.calls[0]
    length = int(headers["Inference-Header-Content-Length"])
    document = json.loads(body[:length])
    assert path == "/v2/models/tiny/infer"
    assert len(body) - length == 4 * 5 * 3
    assert document["inputs"] == [
        {"name": "image", "datatype": "UINT8", "shape": [1, 4, 5, 3], "parameters": {"binary_data_size": 60}}
    ]
    assert document["outputs"] == [{"name": "logits", "parameters": {"classification": 1, "binary_data": False}}]


@pytest.mark.parametrize("pixels", [False, True])
def test_refusals_and_lost_connections_are_counted_and_the_load_goes_on(pixels: bool) -> None:
    records = load(Stub([None, busy, hang_up, busy]), 6, pixels)
    assert sorted(str(r.status) for r in records) == ["200", "200", "200", "503", "503", "connection"]
    assert all(r.batch_size is None for r in records if r.status != 200)


def test_a_hung_answer_is_given_up() -> None:
    never = asyncio.Event()

    async def scenario(session: ClientSession, url: str) -> list[Record]:
        sender = await client.image_sender(session, url, None, None)
        log = RunLog()
        await offer(sender, [0.0], log)
        never.set()  # lets the server stop
        return log.records

    (record,) = with_server(Stub([hold(never)]), scenario, 0.01)
    assert record.status == "timeout"


@pytest.mark.parametrize("text", ["", "fine", "[1]", '{"batch_size": "two", "energy_mj": null}', '{"batch_size": 0}'])
def test_an_answer_without_facts_is_an_answer(text: str) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(text=text)

    (record,) = load(Stub([reply]), 1)
    assert (record.status, record.batch_size, record.waiting, record.energy) == (200, None, None, None)


def test_a_common_start_in_the_future_is_waited_for() -> None:
    loop, log = virtual_loop(), RunLog()
    loop.run_until_complete(offer(Slow(), [0.0, 1.0], log, loop.time, start=loop.time() + 3.0))
    loop.close()
    assert [(r.scheduled, r.sent) for r in log.records] == [(0.0, 0.0), (1.0, 1.0)]


def test_a_key_goes_with_every_request_and_a_server_that_misses_it_is_told_of() -> None:
    async def scenario(session: ClientSession, url: str) -> None:
        with pytest.raises(SpecError, match="asks for a key; give --api-key"):
            await client.find_model(session, url, None)
        async with open_session(key="secret") as keyed:
            assert await client.find_model(keyed, url, None) == "tiny"

    with_server(Stub(key="secret"), scenario, PATIENCE)


def test_nobody_listens_is_said_with_the_url_and_a_remedy() -> None:
    async def main() -> None:
        async with open_session() as session:
            await client.image_sender(session, "http://127.0.0.1:1", None, None)

    with pytest.raises(SpecError, match=r"no server answers at http://127.0.0.1:1 .*serve-model"):
        asyncio.run(main())


def prepare(stub: Stub, model: str | None, pixels: bool = False) -> str:
    """The path that requests would be sent to."""

    async def scenario(session: ClientSession, url: str) -> str:
        sender = (
            await client.pixel_sender(session, url, model)
            if pixels
            else await client.image_sender(session, url, model, None)
        )
        return sender.post.url.removeprefix(url)

    path = with_server(stub, scenario, PATIENCE)
    assert isinstance(path, str)
    return path


def test_a_server_that_lists_no_models_is_asked_for_its_only_one() -> None:
    assert prepare(Stub(models=None), None) == "/predict"
    assert prepare(Stub(models={"error": "what?"}), "a b/c") == "/predict/a%20b%2Fc"


READY, LOADING = {"name": "tiny", "state": "READY"}, {"name": "other", "state": "UNAVAILABLE"}


def test_the_only_model_that_is_ready_is_taken() -> None:
    assert prepare(Stub(models=[LOADING, READY]), None) == "/predict/tiny"
    assert prepare(Stub(models=[LOADING, READY]), None, pixels=True) == "/v2/models/tiny/infer"


@pytest.mark.parametrize(
    ("stub", "model", "words"),
    [
        (Stub(models=[READY, {"name": "second"}]), None, r"several or no models \(ready: tiny, second\); .*--model"),
        (Stub(models=[LOADING]), None, r"\(ready: none\)"),
        (Stub(), "huge", r"no model 'huge' .*\(ready: tiny\)"),
        (Stub(models=None), None, "does not list its models"),
        (Stub(models=None), "huge", "answers 404"),
        (Stub(metadata={"inputs": []}), None, "no model metadata"),
        (Stub(metadata=METADATA | {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}), None, "FP32"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_before_the_load(stub: Stub, model: str | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        prepare(stub, model, pixels=True)


def test_an_image_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    async def scenario(session: ClientSession, url: str) -> None:
        await client.image_sender(session, url, None, tmp_path)

    with pytest.raises(SpecError, match="cannot read the image"):
        with_server(Stub(), scenario, PATIENCE)
