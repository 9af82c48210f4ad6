"""Who is let in: by room, and by time."""

import asyncio

import pytest

from policies.rules.control_limit import greedy
from server.admission import Limits
from server.dispatcher import Dispatcher
from server.errors import QueueFullError, TooLateError
from tests.server.doubles import FakeExecutor, parts, play


def test_capacity_counts_the_waiting_and_admits_a_call_whole_or_not_at_all() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        running = dispatcher.submit("m", [0.0])
        await asyncio.sleep(0.001)  # in service: it takes no place
        waiting = dispatcher.submit("m", [1.0, 2.0, 3.0])
        with pytest.raises(QueueFullError, match="3 of 4 places") as refusal:
            dispatcher.submit("m", [4.0, 5.0])
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after >= 1
        assert dispatcher.queue_length("m") == 3
        await asyncio.gather(running, waiting, dispatcher.submit("m", [6.0]))

    play(scenario, parts(greedy(8)), limits=Limits(4))


def test_an_answer_that_would_be_late_is_refused_at_once() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        with pytest.raises(TooLateError, match="at least 11 ms, over the time-out of 10 ms"):
            dispatcher.submit("m", [0.0], 0.010)
        running = dispatcher.submit("m", [0.0], 0.0111)
        await asyncio.sleep(0.001)  # 10 ms of service are left
        waiting = dispatcher.submit("m", [float(n) for n in range(10)])  # 18 ms for eight, 12 for two
        with pytest.raises(TooLateError, match="at least 41 ms") as refused:
            dispatcher.submit("m", [1.0], 0.0405)
        assert refused.value.retry_after == 1
        assert dispatcher.queue_length("m") == 10
        in_time = dispatcher.submit("m", [1.0], 0.0411)
        await asyncio.gather(running, waiting, in_time)
        assert asyncio.get_running_loop().time() == pytest.approx(0.042)

    play(scenario, parts(greedy(8)))


def test_a_full_queue_says_how_long_its_work_takes() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = dispatcher.submit("m", [0.0])
        await asyncio.sleep(0.001)
        waiting = dispatcher.submit("m", [float(n) for n in range(1000)])
        with pytest.raises(QueueFullError, match="come again in 3 s"):  # 125 batches of 18 ms
            dispatcher.submit("m", [1.0])
        await asyncio.gather(running, waiting)

    play(scenario, parts(greedy(8)), limits=Limits(1000))
