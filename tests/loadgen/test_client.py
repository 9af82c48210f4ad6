"""Tests of the open-loop client: sending on schedule, records, and failing responses."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from loadgen.client import Response, RunLog, offer, open_session
from loadgen.live_run import LoadTarget
from loadgen.report import Record
from tests.support.stub_server import Stub, busy, hang_up, hold, serving
from tests.support.virtual_clock import virtual_loop

TIMEOUT = 30.0  # s; reached only if a test fails


class Slow:
    """A sender whose responses take much longer than the gaps between requests."""

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


def with_server(stub: Stub, scenario: Callable[[ClientSession, str], Coroutine[Any, Any, Any]], timeout: float) -> Any:
    async def main() -> Any:
        async with serving(stub) as url, open_session(timeout) as session:
            return await scenario(session, url)

    return asyncio.run(main())


def send_requests(stub: Stub, requests: int, pixels: bool = False, timeout: float = TIMEOUT) -> list[Record]:
    async def scenario(session: ClientSession, url: str) -> list[Record]:
        log = RunLog()
        sender = await LoadTarget(url, pixels=pixels).sender(session)
        await offer(sender, np.arange(requests) * 1e-3, log)
        assert log.errors == sum(record.status != 200 for record in log.records)
        return sorted(log.records, key=lambda record: record.scheduled)

    records = with_server(stub, scenario, timeout)
    assert isinstance(records, list)
    return records


def test_requests_are_sent_on_schedule_independently_of_responses() -> None:
    records = offered([0.0, 0.5, 0.5, 0.5, 2.0], lambda loop: loop.time)
    assert [r.sent for r in records] == [r.scheduled for r in records] == [0.0, 0.5, 0.5, 0.5, 2.0]
    assert [r.finished for r in records] == [1000.0, 1000.5, 1000.5, 1000.5, 1002.0]


def test_no_request_is_sent_early_if_a_timer_fires_early() -> None:
    records = offered([0.01 * i for i in range(50)], lambda loop: lambda: 0.9 * loop.time())
    assert all(r.sent >= r.scheduled for r in records)


def test_gaps_below_the_resolution_of_the_event_loop_cause_no_busy_wait() -> None:
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


def test_a_request_in_flight_at_cancellation_is_recorded_as_interrupted() -> None:
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


def test_a_delayed_first_response_delays_no_later_request() -> None:
    """The first response waits for the last request, so that a closed-loop client would deadlock."""
    release = asyncio.Event()

    async def release_first(_: web.Request) -> None:
        release.set()

    stub = Stub([hold(release), None, None, None, release_first])
    records = send_requests(stub, 5)
    assert [r.status for r in records] == [200] * 5
    assert records[0].finished > max(r.sent for r in records)


@pytest.mark.parametrize("pixels", [False, True])
def test_the_facts_of_a_response_are_recorded_in_base_units(pixels: bool) -> None:
    (record,) = send_requests(Stub(), 1, pixels)
    assert (record.status, record.batch_size, record.waiting, record.service, record.energy) == (
        200,
        2,
        1.5e-3,
        4e-3,
        0.03,
    )
    assert record.scheduled <= record.sent <= record.finished


@pytest.mark.parametrize("pixels", [False, True])
def test_the_load_continues_after_rejected_requests_and_lost_connections(pixels: bool) -> None:
    records = send_requests(Stub([None, busy, hang_up, busy]), 6, pixels)
    assert sorted(str(r.status) for r in records) == ["200", "200", "200", "503", "503", "connection"]
    assert all(r.batch_size is None for r in records if r.status != 200)


def test_a_response_that_never_comes_is_a_timeout() -> None:
    never = asyncio.Event()

    async def scenario(session: ClientSession, url: str) -> list[Record]:
        sender = await LoadTarget(url).sender(session)
        log = RunLog()
        await offer(sender, [0.0], log)
        never.set()  # so that the server can stop
        return log.records

    (record,) = with_server(Stub([hold(never)]), scenario, 0.01)
    assert record.status == "timeout"


@pytest.mark.parametrize("text", ["", "fine", "[1]", '{"batch_size": "two", "energy_mj": null}', '{"batch_size": 0}'])
def test_a_response_without_facts_is_recorded(text: str) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(text=text)

    (record,) = send_requests(Stub([reply]), 1)
    assert (record.status, record.batch_size, record.waiting, record.energy) == (200, None, None, None)


def test_sending_waits_for_a_start_in_the_future() -> None:
    loop, log = virtual_loop(), RunLog()
    loop.run_until_complete(offer(Slow(), [0.0, 1.0], log, loop.time, start=loop.time() + 3.0))
    loop.close()
    assert [(r.scheduled, r.sent) for r in log.records] == [(0.0, 0.0), (1.0, 1.0)]


class Instant:
    """A sender that records when it was called."""

    def __init__(self) -> None:
        self.sent: list[float] = []

    async def send(self) -> Response:
        self.sent.append(time.monotonic())
        return Response(200)


def test_a_precise_run_sends_each_request_at_its_instant_or_later_without_the_loops_timers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_timer(*_: object, **__: object) -> None:
        raise AssertionError("the loop's timers are coarse")

    async def run() -> tuple[Instant, RunLog, float]:
        sender, log, start = Instant(), RunLog(), time.monotonic() + 0.01
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", no_timer)
        monkeypatch.setattr(loop, "call_at", no_timer)
        await offer(sender, instants, log, start=start, precise=True)
        return sender, log, start

    instants = [0.0, 0.0, 0.001, 0.0013, 0.004]
    sender, log, start = asyncio.run(run())
    assert (log.sent, log.errors) == (5, 0)
    assert all(sent >= start + instant for sent, instant in zip(sender.sent, instants, strict=True))
    assert [record.scheduled for record in log.records] == instants


def test_a_cancelled_precise_run_ends_its_thread_at_once() -> None:
    async def run() -> RunLog:
        log = RunLog()
        sending = asyncio.create_task(offer(Instant(), [0.0, 1e6], log, precise=True))
        while not log.records:  # noqa: ASYNC110  (there is no event to await)
            await asyncio.sleep(1e-3)
        assert "precise-timer" in {thread.name for thread in threading.enumerate()}
        sending.cancel()
        await asyncio.wait([sending])
        return log

    assert asyncio.run(run()).sent == 1
    assert "precise-timer" not in {thread.name for thread in threading.enumerate()}
