"""Time-outs of clients: every one is kept, and what is seen of late answers is learned from."""

import asyncio
from dataclasses import replace

import pytest

from policies.rules.control_limit import greedy, static
from server.errors import ExpiredError, TooLateError
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import STEPS, FakeExecutor, chosen, run_scenario


def test_every_time_out_of_an_idle_queue_is_noticed_when_it_passes() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        calls = [dispatcher.submit("m", [0.0], timeout) for timeout in (0.3, 0.1, 0.2)]
        for call, at in zip((calls[1], calls[2], calls[0]), (0.1, 0.2, 0.3), strict=True):
            with pytest.raises(ExpiredError):
                await call
            assert loop.time() == pytest.approx(at)
        assert dispatcher.queue_length("m") == 0

    run_scenario(scenario, chosen(static(8)))


def test_requests_that_expire_teach_how_late_answers_are() -> None:
    slow = FakeExecutor(replace(STEPS, service_times=(0.2,) * 8))  # believed to take 18 ms for eight

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        running = dispatcher.submit("m", [0.0] * 8)
        await asyncio.sleep(0.001)
        waiting = dispatcher.submit("m", [1.0] * 16)
        hurried = [dispatcher.submit("m", [2.0], 0.1) for _ in range(4)]
        for call in hurried:
            with pytest.raises(ExpiredError):
                await call
        # as much work as before, and as much time, but four answers were not there in time
        with pytest.raises(TooLateError):
            dispatcher.submit("m", [3.0], 0.1)
        await asyncio.gather(running, waiting)

    run_scenario(scenario, chosen(greedy(8)), slow)
