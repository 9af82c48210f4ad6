"""Priority levels: which level a request is of, and the places that it may take."""

import asyncio
from math import inf

import pytest

from policies.rules.control_limit import greedy
from server.errors import BadInputError, QueueFullError, TooLateError
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.levels import ONE_LEVEL, Levels, levels_of
from tests.support.fakes import FakeExecutor, chosen, run_scenario, submit

TWO, FIVE = Levels(2, 0.1), Levels(5, 0.25, (inf, 1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize(
    ("priority", "header", "least", "of_two", "of_five"),
    [
        (0, None, 1, 2, 5),
        (1, None, 1, 1, 1),
        (2, None, 1, 2, 2),
        (0, b"u=0", 1, 1, 1),
        (0, b"u=1", 1, 1, 2),
        (0, b"u=2", 1, 1, 3),
        (0, b"u=3", 1, 2, 5),
        (0, b"u=7, i", 1, 2, 5),
        (0, b"i, u=0", 1, 1, 1),
        (0, b"u=0;a", 1, 1, 1),
        (0, b"i", 1, 2, 5),
        (0, b"u=x", 1, 2, 5),
        (2, b"u=0", 1, 2, 2),  # the protocol's parameter counts
        (1, None, 2, 2, 2),  # the key has no level before 2
        (0, b"u=0", 7, 2, 5),
    ],
)
def test_the_level_follows_from_parameter_header_and_key(
    priority: int, header: bytes | None, least: int, of_two: int, of_five: int
) -> None:
    assert TWO.level(priority, header, least) == of_two
    assert FIVE.level(priority, header, least) == of_five
    assert ONE_LEVEL.level(min(priority, 1), header, least) == 1


@pytest.mark.parametrize(
    ("levels", "priority", "remedy"),
    [(ONE_LEVEL, 2, "has 1 levels; send 0 or 1"), (TWO, 3, "`priority` is 3, and the model has 2 levels; send 1 to 2")],
)
def test_a_level_beyond_the_last_is_refused(levels: Levels, priority: int, remedy: str) -> None:
    with pytest.raises(BadInputError, match=remedy):
        levels.level(priority, None, 1)


def test_a_part_of_the_queue_is_reserved_for_the_first_level() -> None:
    assert [TWO.places(100, level) for level in (1, 2)] == [100, 90]
    assert FIVE.places(100, 5) == 75
    assert FIVE.places(1, 5) == 1
    assert ONE_LEVEL.places(100, 1) == 100


def test_each_level_has_a_longest_wait() -> None:
    assert [FIVE.max_wait(level) for level in (1, 2, 5)] == [inf, 1.0, 4.0]
    assert TWO.max_wait(2) == inf
    assert levels_of({"m": TWO}, "m") is TWO
    assert levels_of({"m": TWO}, "other") is ONE_LEVEL


async def busy(dispatcher: Dispatcher) -> "asyncio.Future[list[Sample]]":
    running = submit(dispatcher, "m", [-1.0])
    await asyncio.sleep(0.001)
    return running


def test_a_batch_takes_the_first_level_first() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> list[list[float]]:
        calls = [await busy(dispatcher)]
        calls += [submit(dispatcher, "m", [float(n)], level=2) for n in range(3)]
        calls += [submit(dispatcher, "m", [float(n)], level=1) for n in (10, 11)]
        await asyncio.gather(*calls)
        return [inputs for *_, inputs in executor.log]

    batches = run_scenario(scenario, chosen(greedy(2)), levels={"m": Levels(2)})
    assert batches == [[-1.0], [10.0, 11.0], [0.0, 1.0], [2.0]]


def test_a_request_that_has_waited_too_long_precedes_the_first_level() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> list[list[float]]:
        calls = [await busy(dispatcher), submit(dispatcher, "m", [0.0], level=2)]
        for n in range(20):  # more of level 1 than can be served
            calls.append(submit(dispatcher, "m", [float(10 + n)]))
            await asyncio.sleep(0.005)
        await asyncio.gather(*calls)
        return [inputs for *_, inputs in executor.log]

    for wait, last in ((0.04, False), (inf, True)):
        batches = run_scenario(scenario, chosen(greedy(1)), levels={"m": Levels(2, 0.1, (inf, wait))})
        place = batches.index([0.0])
        assert (place == len(batches) - 1) == last
        assert last or 2 <= place <= 5, "11 ms a batch"


def test_bulk_is_refused_first() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        calls = [await busy(dispatcher), submit(dispatcher, "m", [0.0] * 7, level=2)]
        calls.append(submit(dispatcher, "m", [0.0], level=2))
        with pytest.raises(QueueFullError, match="8 of 8 places"):
            submit(dispatcher, "m", [0.0], level=2)
        calls.append(submit(dispatcher, "m", [0.0, 0.0]))
        with pytest.raises(QueueFullError, match="10 of 10 places"):
            submit(dispatcher, "m", [0.0])
        await asyncio.gather(*calls)

    run_scenario(scenario, chosen(greedy(2)), limits=Limits(10), levels={"m": Levels(2, 0.2)})


def test_bulk_behind_a_call_delays_neither_its_deadline_nor_its_retry() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        calls = [await busy(dispatcher), submit(dispatcher, "m", [0.0] * 1300, level=2)]  # 2.9 s
        with pytest.raises(TooLateError):
            submit(dispatcher, "m", [0.0], 0.1, level=2)
        calls.append(submit(dispatcher, "m", [0.0], 0.1))
        with pytest.raises(QueueFullError, match="retry in 3 s"):
            submit(dispatcher, "m", [0.0] * 200, level=2)
        with pytest.raises(QueueFullError, match="retry in 1 s"):
            submit(dispatcher, "m", [0.0] * 200)
        await asyncio.gather(*calls)

    run_scenario(scenario, chosen(greedy(2)), limits=Limits(1500), levels={"m": Levels(2, 0.1)})
