"""Lookahead: the device takes standby launches between stages unless the queue or the policy changes."""

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


class RecordingExecutor(FakeExecutor):
    """Records the first stage of each batch that the dispatcher launched, standby launches not included."""

    def __init__(self) -> None:
        super().__init__(STAGED)
        self.launched: list[int] = []

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        self.launched.append(batch.first_stage)
        return super().run(batch)


def test_a_batch_runs_all_stages_by_standby_launches() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> str:
        answers = await dispatcher.submit("m", [1.0, 2.0])
        assert [float(answer.output) for answer in answers] == [1.0, 2.0]
        return dispatcher._metrics.render().decode()

    executor = RecordingExecutor()
    metrics = run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0]
    assert len(executor.log) == 4
    assert 'batchwright_idle_gap_seconds_count{device="fake"} 3.0' in metrics


def test_after_an_arrival_the_policy_decides_at_the_end_of_the_stage() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        first = dispatcher.submit("m", [1.0])
        await asyncio.sleep(0.004)  # in the second stage
        await asyncio.gather(first, dispatcher.submit("m", [2.0]))

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0, 0, 2], "the new request catches up, then both run the remaining stages together"
    assert [len(inputs) for _, _, inputs in executor.log] == [1, 1, 1, 1, 2, 2]


def test_a_cancelled_request_is_not_in_the_next_stage() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        gone, stays = dispatcher.submit("m", [1.0]), dispatcher.submit("m", [2.0])
        await asyncio.sleep(0.001)
        gone.cancel()
        assert float((await stays)[0].output) == 2.0

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert [len(inputs) for _, _, inputs in executor.log] == [2, 1, 1, 1]


def test_a_swapped_policy_decides_from_the_end_of_the_stage_on() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        call = dispatcher.submit("m", [1.0])
        await asyncio.sleep(0.001)
        dispatcher.set_policy("m", choose("greedy", STAGED))
        await call

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0, 1]
    assert len(executor.log) == 2, "the second launch, by greedy, runs to the end"


def test_near_a_time_out_the_policy_decides_after_each_stage_and_late_requests_are_dropped() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        urgent = dispatcher.submit("m", [1.0], 0.0125)
        await asyncio.sleep(0.001)
        second = dispatcher.submit("m", [2.0])
        with pytest.raises(ExpiredError, match="would pass"):  # both together would be complete after 14.5 ms
            await urgent
        assert float((await second)[0].output) == 2.0

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched[:3] == [0, 0, 1]
    assert [len(inputs) for _, _, inputs in executor.log] == [1] * 5


def test_after_a_failed_stage_its_samples_are_retried_and_no_standby_launch_is_taken() -> None:
    executor = RecordingExecutor()

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
    assert executor.launched[:3] == [0, 1, 1], "the stage once, and then each of its samples"


class FailingLookahead(LazyBatching):
    """Raises where requests are suspended."""

    def decide(self, state: State, /) -> Action:
        if state.suspended:
            raise ZeroDivisionError
        return super().decide(state)


def test_a_policy_that_fails_in_the_lookahead_is_replaced_at_the_end_of_the_stage() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        assert float((await dispatcher.submit("m", [1.0]))[0].output) == 1.0
        assert dispatcher.chosen["m"].name == "greedy"

    broken: dict[str, Chosen] = dict(chosen(FailingLookahead(STAGED), STAGED))
    run_scenario(scenario, broken, FakeExecutor(STAGED))


class Adding:
    """Adds one in each stage, after the test has set `free`."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.entered.set()
        assert self.free.wait(5.0)
        return [np.float32(x + 1) for x in batch.inputs]


def test_the_device_takes_standby_launches_in_order_with_the_outputs_of_the_one_before() -> None:
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


def test_the_device_does_not_take_withdrawn_launches() -> None:
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


def test_no_standby_launch_is_offered_while_a_time_out_may_pass_before_the_end_of_the_stage() -> None:
    class Late(RecordingExecutor):
        """Takes twice the service time of its profile."""

        async def _serve(self, batch: Batch) -> Completion:
            await asyncio.sleep(STAGED.launch_time(len(batch.inputs), batch.first_stage, batch.last_stage))
            return await super()._serve(batch)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        first = dispatcher.submit("m", [1.0] * 8)
        await asyncio.sleep(0.001)
        second = dispatcher.submit("m", [2.0] * 8)
        urgent = dispatcher.submit("m", [3.0], 0.052)  # 47 ms are enough by the profile; it takes 36 + 36 + 22
        await first
        assert loop.time() == pytest.approx(0.036)
        await second
        with pytest.raises(ExpiredError):
            await urgent

    executor = Late()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0, 1, 0, 1, 2], (
        "the second batch has no standby launches until the request has expired"
    )
