"""Deciding ahead of a stage's end: the device goes on unasked, unless something happens."""

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from policies.catalog import Chosen, choose
from policies.rules.lazy_batching import LazyBatching
from policies.types import Action, State
from server.backends.executor import Batch, Completion, StandbyLaunches, ThreadExecutor
from server.errors import ExecutionError, ExpiredError
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import STEPS, FakeExecutor, chosen, run_scenario

STAGED = STEPS.in_stages(4)  # a batch of b takes 10 + b ms, in equal stages
LAZY = {"m": choose("lazy:slo_ms=1000", STAGED)}


class Asked(FakeExecutor):
    """Remembers what it was asked to run, beside what it went on with."""

    def __init__(self) -> None:
        super().__init__(STAGED)
        self.asked: list[int] = []

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        self.asked.append(batch.first_stage)
        return super().run(batch)


def test_a_batch_goes_through_all_stages_without_being_asked_about_again() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> str:
        answers = await dispatcher.submit("m", [1.0, 2.0])
        assert [float(answer.output) for answer in answers] == [1.0, 2.0]
        return dispatcher._metrics.render().decode()

    executor = Asked()
    metrics = run_scenario(scenario, LAZY, executor)
    assert executor.asked == [0]
    assert len(executor.log) == 4
    assert 'batchwright_idle_gap_seconds_count{device="fake"} 3.0' in metrics


def test_an_arrival_is_asked_about_at_the_next_boundary() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        first = dispatcher.submit("m", [1.0])
        await asyncio.sleep(0.004)  # in the second stage
        await asyncio.gather(first, dispatcher.submit("m", [2.0]))

    executor = Asked()
    run_scenario(scenario, LAZY, executor)
    assert executor.asked == [0, 0, 2], "the newcomer catches up, and both ride on from where the first one stood"
    assert [len(inputs) for _, _, inputs in executor.log] == [1, 1, 1, 1, 2, 2]


def test_who_leaves_in_a_stage_is_not_in_the_next_one() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        gone, stays = dispatcher.submit("m", [1.0]), dispatcher.submit("m", [2.0])
        await asyncio.sleep(0.001)
        gone.cancel()
        assert float((await stays)[0].output) == 2.0

    executor = Asked()
    run_scenario(scenario, LAZY, executor)
    assert [len(inputs) for _, _, inputs in executor.log] == [2, 1, 1, 1]


def test_a_swap_holds_from_the_next_boundary_on() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        call = dispatcher.submit("m", [1.0])
        await asyncio.sleep(0.001)
        dispatcher.set_policy("m", choose("greedy", STAGED))
        await call

    executor = Asked()
    run_scenario(scenario, LAZY, executor)
    assert executor.asked == [0, 1]
    assert len(executor.log) == 2, "greedily, to the end"


def test_with_a_time_out_near_the_policy_is_asked_and_the_doomed_dropped() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        hurried = dispatcher.submit("m", [1.0], 0.0125)
        await asyncio.sleep(0.001)
        second = dispatcher.submit("m", [2.0])
        with pytest.raises(ExpiredError, match="would pass"):  # both together would be done after 14.5 ms
            await hurried
        assert float((await second)[0].output) == 2.0

    executor = Asked()
    run_scenario(scenario, LAZY, executor)
    assert executor.asked[:3] == [0, 0, 1]
    assert [len(inputs) for _, _, inputs in executor.log] == [1] * 5


def test_a_stage_that_fails_fails_what_is_in_it_and_nothing_goes_on() -> None:
    executor = Asked()

    def fault(outputs: list[Any]) -> list[Any]:
        if len(executor.log) == 2:
            raise RuntimeError("no")
        if len(outputs) == 1 and len(executor.log) > 2 and float(outputs[0]) == 1.0:
            raise RuntimeError("poisoned")
        return outputs

    executor.fault = fault

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        bad, good = dispatcher.submit("m", [1.0]), dispatcher.submit("m", [2.0])
        with pytest.raises(ExecutionError, match="this input alone"):
            await bad
        assert float((await good)[0].output) == 2.0

    run_scenario(scenario, LAZY, executor)
    assert executor.asked[:3] == [0, 1, 1], "the stage once, and then each of its samples"


class BreaksAhead(LazyBatching):
    """Breaks where somebody is between stages."""

    def decide(self, state: State, /) -> Action:
        if state.suspended:
            raise ZeroDivisionError
        return super().decide(state)


def test_a_policy_that_breaks_ahead_is_replaced_at_the_boundary() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        assert float((await dispatcher.submit("m", [1.0]))[0].output) == 1.0
        assert dispatcher.chosen["m"].name == "greedy"

    broken: dict[str, Chosen] = dict(chosen(BreaksAhead(STAGED), STAGED))
    run_scenario(scenario, broken, FakeExecutor(STAGED))


class Adding:
    """Adds one in each stage; waits, if told to, until the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.entered.set()
        assert self.free.wait(5.0)
        return [np.float32(x + 1) for x in batch.inputs]


def test_the_devices_thread_takes_what_is_offered_in_order_with_the_outputs_of_the_one_before() -> None:
    async def main() -> list[Completion]:
        standby = StandbyLaunches()
        running = executor.run(Batch("m", [1.0], 0, 1, standby))
        second, third = (standby.offer(Batch("m", (), stage, 1)) for stage in (1, 2))
        device.free.set()
        return [await running, await second, await third]

    device = Adding()
    executor = ThreadExecutor(device)
    done = asyncio.run(main())
    executor.close()
    assert [float(completion.outputs[0]) for completion in done] == [2.0, 3.0, 4.0]
    assert all(one.finished <= other.started for one, other in pairwise(done))


def test_the_devices_thread_does_not_take_what_was_withdrawn() -> None:
    async def main() -> int:
        standby = StandbyLaunches()
        running = executor.run(Batch("m", [1.0], 0, 1, standby))
        second = standby.offer(Batch("m", (), 1, 1))
        assert device.entered.wait(5.0)
        standby.withdraw()
        device.free.set()
        await running
        await asyncio.sleep(0.01)
        assert not second.done()
        return standby.taken

    device = Adding()
    executor = ThreadExecutor(device)
    assert asyncio.run(main()) == 0
    executor.close()


def test_nothing_is_decided_ahead_while_a_time_out_may_pass_before_the_end() -> None:
    class Late(Asked):
        """Takes twice as long as it is believed to."""

        async def _serve(self, batch: Batch) -> Completion:
            await asyncio.sleep(STAGED.launch_time(len(batch.inputs), batch.first_stage, batch.last_stage))
            return await super()._serve(batch)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        first = dispatcher.submit("m", [1.0] * 8)
        await asyncio.sleep(0.001)
        second = dispatcher.submit("m", [2.0] * 8)
        hurried = dispatcher.submit("m", [3.0], 0.052)  # 47 ms are believed to be enough; it takes 36 + 36 + 22
        await first
        assert loop.time() == pytest.approx(0.036)
        await second
        with pytest.raises(ExpiredError):
            await hurried

    executor = Late()
    run_scenario(scenario, LAZY, executor)
    assert executor.asked == [0, 1, 0, 1, 2], "the second batch is asked about until the hurried request has expired"
