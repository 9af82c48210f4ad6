"""Everything of a call is freed when it ends, by reference counts: the garbage collector is off."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policies.rules.control_limit import greedy
from server.backends.executor import Batch, Completion
from server.errors import ServerError
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import FakeExecutor, chosen, run_scenario, submit


class Array:
    """An input or output that can be watched."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    logging.disable()  # pytest keeps the records, with the frames of their exceptions
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


class Executor(FakeExecutor):
    """Takes some seconds for each batch, and keeps nothing of it."""

    seconds = 0.01

    async def serve(self, batch: Batch) -> Completion:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds)
        return Completion(self.fault(list(batch.inputs)), start, asyncio.get_running_loop().time())


class Watch:
    """Weak references to what was made for calls."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Array]] = []

    def array(self) -> Array:
        made = Array()
        self.made.append(weakref.ref(made))
        return made

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.made)


async def ended(future: "asyncio.Future[Any]") -> str:
    """Wait for the end of a call as its handler does, and keep nothing of it."""
    try:
        answers = await future
        return f"{len(answers)} answers"
    except ServerError as error:
        return type(error).__name__
    except asyncio.CancelledError:
        return "cancelled"


def run(scenario: Callable[[Dispatcher, Executor, Watch], Any]) -> None:
    watch, executor = Watch(), Executor()
    executor.fault = lambda outputs: [watch.array() for _ in outputs]

    async def watched(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        await scenario(dispatcher, executor, watch)

    run_scenario(watched, chosen(greedy(8)), executor)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_answered_call() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Executor, watch: Watch) -> None:
        assert await ended(submit(dispatcher, "m", [watch.array(), watch.array()])) == "2 answers"
        await settle()
        assert (len(watch.made), watch.alive) == (4, 0)

    run(scenario)


def test_one_of_two_calls_of_a_batch_whose_other_has_more_to_come() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Executor, watch: Watch) -> None:
        long = submit(dispatcher, "m", [watch.array() for _ in range(9)])  # two batches of at most eight
        inputs = len(watch.made)
        short = submit(dispatcher, "m", [watch.array()])
        assert await ended(long) == "9 answers"
        assert await ended(short) == "1 answers"
        del long, short
        await settle()
        assert inputs == 9
        assert watch.alive == 0

    run(scenario)


def test_a_call_that_fails_alone() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Executor, watch: Watch) -> None:
        def fail(_: list[Any]) -> list[Any]:
            raise ValueError("broken")

        executor.fault = fail
        assert await ended(submit(dispatcher, "m", [watch.array()])) == "ExecutionError"
        await settle()
        assert (len(watch.made), watch.alive) == (1, 0)

    run(scenario)


def test_a_call_that_expires() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Executor, watch: Watch) -> None:
        executor.seconds = 1.0
        first = submit(dispatcher, "m", [object()])
        await asyncio.sleep(0)
        made = [watch.array()]
        future = submit(dispatcher, "m", made, 0.1)
        made.clear()
        assert await ended(future) == "ExpiredError"
        del future
        await settle()
        assert watch.alive == 0, "the first call is still in service"
        await ended(first)

    run(scenario)


@pytest.mark.parametrize("after", [0.001, 0.013], ids=["in the queue", "in service"])
def test_a_call_that_is_cancelled(after: float) -> None:
    async def scenario(dispatcher: Dispatcher, executor: Executor, watch: Watch) -> None:
        first = submit(dispatcher, "m", [object()])
        await asyncio.sleep(0)
        made = [watch.array()]
        future = submit(dispatcher, "m", made)
        made.clear()
        await asyncio.sleep(after)
        future.cancel()
        assert await ended(future) == "cancelled"
        del future
        if after < 0.01:
            await settle()
            assert watch.alive == 0, "it was queued, so that nothing reads its input"
        await ended(first)
        del first
        await asyncio.sleep(0.1)
        assert watch.alive == 0

    run(scenario)
