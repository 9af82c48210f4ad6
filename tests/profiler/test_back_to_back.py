"""Tests of batches back to back, through an executor's thread and through one that never takes an offer."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from policies.types import SpecError
from profiler.back_to_back import Cycle, Rotation, back_to_back
from server.backends.executor import Batch, Completion, Executor, ThreadExecutor
from tests.support.timeline import Timeline


class Recorder:
    """A device that records the inputs of its batches, and takes some time for each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.served: list[Any] = []
        self.seconds = seconds

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        if batch.inputs[0] == "broken":
            raise RuntimeError("out of paper")
        time.sleep(self.seconds)
        self.served.append(batch.inputs[0])
        return batch.inputs


def batches(*names: str) -> list[Batch]:
    return [Batch("net", [name]) for name in names]


async def collect(executor: Executor, work: Sequence[Batch]) -> list[Cycle]:
    return [cycle async for cycle in back_to_back(executor, work)]


def test_every_batch_runs_once_in_order_and_cycles_are_from_launch_to_launch() -> None:
    device = Recorder(0.002)
    executor = ThreadExecutor(device)
    cycles = asyncio.run(collect(executor, batches("a", "b", "c", "d")))
    executor.close()
    assert device.served == ["a", "b", "c", "d"]
    assert [cycle.batch.inputs for cycle in cycles] == [["a"], ["b"], ["c"], ["d"]]
    starts = [cycle.completion.started for cycle in cycles]
    for cycle, following in zip(cycles[:-1], starts[1:], strict=True):
        assert cycle.seconds == (cycle.completion.next_started or following) - cycle.completion.started
        assert following >= cycle.completion.finished
    assert cycles[-1].seconds == cycles[-1].completion.finished - starts[-1]


def test_the_device_starts_the_next_batch_before_the_loop_hears_of_the_one_before() -> None:
    loop_may_go_on, last_began = threading.Event(), threading.Event()

    class Waiting(Recorder):
        def serve(self, batch: Batch, /) -> Sequence[Any]:
            if batch.inputs[0] == "b":
                last_began.set()
            else:
                assert loop_may_go_on.wait(5)  # until the next one has been offered
            return super().serve(batch)

    def offering() -> Any:
        yield from batches("a")
        asyncio.get_running_loop().call_soon(blocked)
        yield from batches("b")

    def blocked() -> None:
        """Block the loop until the device has started b by itself."""
        loop_may_go_on.set()
        assert last_began.wait(5)

    executor = ThreadExecutor(Waiting())
    assert len(asyncio.run(collect(executor, offering()))) == 2
    executor.close()


def test_the_time_between_batches_is_in_the_cycle_also_where_the_device_does_not_start_the_next_one() -> None:
    class Plain:
        name = "plain"
        timeline = Timeline(handover=0.25)

        def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
            return self.timeline.completed(batch.inputs, 1.0)

    cycles = asyncio.run(collect(Plain(), batches("a", "b", "c")))
    assert [cycle.seconds for cycle in cycles] == [1.25, 1.25, 1.0]


@pytest.mark.parametrize("names", [["broken"], ["a", "broken"], ["a", "broken", "b"]])
def test_a_failing_batch_ends_the_iteration_and_leaves_the_executor_usable(names: list[str]) -> None:
    device = Recorder()
    executor = ThreadExecutor(device)
    with pytest.raises(SpecError, match="net: a batch of 1 failed: RuntimeError: out of paper"):
        asyncio.run(collect(executor, batches(*names)))
    assert "b" not in device.served
    assert len(asyncio.run(collect(executor, batches("c")))) == 1
    executor.close()


def test_closing_early_waits_for_the_batch_in_service() -> None:
    device = Recorder(0.005)
    executor = ThreadExecutor(device)

    async def first() -> None:
        async with aclosing(back_to_back(executor, batches("a", "b", "c", "d"))) as cycles:
            await anext(cycles)
        assert device.served[-1] in {"b", "c"}
        before = len(device.served)
        await asyncio.sleep(0.02)
        assert len(device.served) == before

    asyncio.run(first())
    executor.close()


def test_the_next_batch_is_offered_before_a_cycle_is_yielded() -> None:
    made: list[str] = []

    def offering() -> Any:
        for batch in batches("a", "b", "c", "d"):
            made.append(batch.inputs[0])
            yield batch

    async def first() -> None:
        async with aclosing(back_to_back(executor, offering())) as cycles:
            cycle = await anext(cycles)
            assert cycle.batch.inputs == ["a"]
            assert made == ["a", "b", "c"], "b is in service, and c is offered"

    executor = ThreadExecutor(Recorder(0.002))
    asyncio.run(first())
    executor.close()


def test_no_batches_give_no_cycles() -> None:
    executor = ThreadExecutor(Recorder())
    assert asyncio.run(collect(executor, [])) == []
    executor.close()


def test_samples_are_taken_in_rotation() -> None:
    rotation = Rotation("abc")
    assert [rotation.take(count) for count in (2, 2, 7, 1)] == [[*"ab"], [*"ca"], [*"bcabcab"], ["c"]]
