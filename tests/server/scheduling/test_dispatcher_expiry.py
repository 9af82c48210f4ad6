"""Expired requests: dropped at their timeout, and observed by admission control."""

import asyncio
import time
from dataclasses import replace

import pytest
import uvloop

from policies.rules.control_limit import greedy, static
from server.errors import ExpiredError, TooLateError
from server.scheduling.calls import InferenceCall, Sample
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, UNLIMITED, FakeExecutor, chosen, run_scenario, submit


def test_requests_of_an_idle_queue_expire_at_their_time_outs() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        calls = [submit(dispatcher, "m", [0.0], timeout) for timeout in (0.3, 0.1, 0.2)]
        for call, at in zip((calls[1], calls[2], calls[0]), (0.1, 0.2, 0.3), strict=True):
            with pytest.raises(ExpiredError):
                await call
            assert loop.time() == pytest.approx(at)
        assert dispatcher.queue.length("m") == 0

    run_scenario(scenario, chosen(static(8)))


def test_expired_requests_raise_the_margin_of_admission_control() -> None:
    slow = FakeExecutor(replace(STEPS, service_times=(0.2,) * 8))  # 18 ms for eight by the profile

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0] * 8)
        await asyncio.sleep(0.001)
        waiting = submit(dispatcher, "m", [1.0] * 16)
        urgent = [submit(dispatcher, "m", [2.0], 0.1) for _ in range(4)]
        for call in urgent:
            with pytest.raises(ExpiredError):
                await call
        # the same backlog and timeout as before, but four answers were late meanwhile
        with pytest.raises(TooLateError):
            submit(dispatcher, "m", [3.0], 0.1)
        await asyncio.gather(running, waiting)

    run_scenario(scenario, chosen(greedy(8)), slow)


def test_a_launch_that_the_limit_of_tokens_makes_smaller_is_judged_as_it_is_launched() -> None:
    profile = replace(STEPS, max_batch_tokens=2)  # batches of two of length 1: 12 ms, but 18 ms for eight

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        urgent = [submit(dispatcher, "m", [float(n)], 0.0155, [1.0]) for n in range(2)]
        others = [submit(dispatcher, "m", [float(n)], lengths=[1.0]) for n in range(6)]
        await asyncio.gather(*urgent, *others)

    run_scenario(scenario, chosen(greedy(8), profile))


def test_calls_that_have_expired_already_are_queued_and_dropped_on_the_servers_event_loop() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = Dispatcher(FakeExecutor(), chosen(static(8)), Metrics(), time.monotonic, UNLIMITED)
        now = time.monotonic()
        calls = [
            InferenceCall(loop.create_future(), "m", [Sample(0.0)], arrival=now, expires=now - late, earliest=0.0)
            for late in (0.1, 0.2)
        ]
        for call in calls:
            dispatcher.enqueue(call)
        for call in calls:
            with pytest.raises(ExpiredError):
                await call.future

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
