"""Lookahead: the device takes the launch that the policy decides for the end of a batch, as long as it is current."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import ModelPolicy, choose
from policies.profile import Profile
from policies.rules.control_limit import greedy, serial
from policies.rules.lazy_batching import LazyBatching
from policies.types import Action, State
from server.backends.executor import Batch, Completion, Standby, ThreadExecutor, with_timeout
from server.errors import BatchTimeoutError, ExecutionError, ExpiredError, RejectedError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.lookahead import Lookahead
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, FakeExecutor, chosen, run_scenario, submit

STAGED = STEPS.in_stages(4)  # a batch of b takes 10 + b ms, in equal stages
LAZY = {"m": choose("lazy:slo_ms=1000", STAGED)}


class RecordingExecutor(FakeExecutor):
    """Records the first stage of each batch that the dispatcher launched, standby launches not included."""

    def __init__(self, profile: Profile = STAGED) -> None:
        super().__init__(profile)
        self.launched: list[int] = []

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        self.launched.append(batch.first_stage)
        return super().run(batch)


def test_a_batch_runs_all_stages_by_standby_launches() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> str:
        answers = await submit(dispatcher, "m", [1.0, 2.0])
        assert [float(answer.output) for answer in answers] == [1.0, 2.0]
        return dispatcher._metrics.render().decode()

    executor = RecordingExecutor()
    metrics = run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0]
    assert len(executor.log) == 4
    assert 'batchwright_idle_gap_seconds_count{device="fake"} 3.0' in metrics


def test_after_an_arrival_the_policy_decides_at_the_end_of_the_stage() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        first = submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0.004)  # in the second stage
        await asyncio.gather(first, submit(dispatcher, "m", [2.0]))

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched in ([0], [0, 2]), "the new request catches up, then both run the remaining stages together"
    assert [len(inputs) for _, _, inputs in executor.log] == [1, 1, 1, 1, 2, 2]


def test_a_cancelled_request_is_not_in_the_next_stage() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        gone, stays = submit(dispatcher, "m", [1.0]), submit(dispatcher, "m", [2.0])
        await asyncio.sleep(0.001)
        gone.cancel()
        assert float((await stays)[0].output) == 2.0

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert [len(inputs) for _, _, inputs in executor.log] == [2, 1, 1, 1]


def test_a_swapped_policy_decides_from_the_end_of_the_stage_on() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        call = submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0.001)
        dispatcher.policies.set("m", choose("greedy", STAGED))
        await call

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0]
    assert len(executor.log) == 2, "the second launch, by greedy, runs to the end"


def test_near_a_time_out_the_policy_decides_after_each_stage_and_late_requests_are_dropped() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        urgent = submit(dispatcher, "m", [1.0], 0.0125)
        await asyncio.sleep(0.001)
        second = submit(dispatcher, "m", [2.0])
        with pytest.raises(ExpiredError, match="would pass"):  # both together would be complete after 14.5 ms
            await urgent
        assert float((await second)[0].output) == 2.0

    executor = RecordingExecutor()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched[:2] == [0, 0]
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
        bad, good = submit(dispatcher, "m", [1.0]), submit(dispatcher, "m", [2.0])
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
        assert float((await submit(dispatcher, "m", [1.0]))[0].output) == 1.0
        assert dispatcher.chosen["m"].name == "greedy"

    broken: dict[str, ModelPolicy] = dict(chosen(FailingLookahead(STAGED), STAGED))
    run_scenario(scenario, broken, FakeExecutor(STAGED))


class Adding:
    """Adds one in each stage, after the test has set `free`."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.entered.set()
        assert self.free.wait(5.0)
        return [np.float32(x + 1) for x in batch.inputs]


def test_the_device_starts_a_standby_launch_before_the_loop_is_told_of_the_batch_before() -> None:
    async def main() -> list[Completion]:
        standby, loop = Standby(), asyncio.get_running_loop()
        running = executor.run(Batch("m", [1.0], standby=standby))
        second: asyncio.Future[Completion] = loop.create_future()
        standby.offer(Batch("m", (), 1, 1, standby), second)  # with the outputs of the first one as inputs
        device.free.set()
        first = await running
        assert not standby.withdraw(), "it was taken"
        third: asyncio.Future[Completion] = loop.create_future()
        standby.offer(Batch("m", [7.0]), third)
        return [first, await second, *([] if standby.withdraw() else [await third])]

    device = Adding()
    executor = ThreadExecutor(device)
    done = asyncio.run(main())
    executor.close()
    assert [float(completion.outputs[0]) for completion in done][:2] == [2.0, 3.0]
    assert all(one.finished <= other.started for one, other in pairwise(done))


@pytest.mark.parametrize("fault", [False, True])
def test_the_device_takes_neither_a_withdrawn_launch_nor_one_after_a_fault(fault: bool) -> None:
    async def main() -> None:
        standby = Standby()
        running = executor.run(Batch("m", ["x" if fault else 1.0], standby=standby))
        second: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        standby.offer(Batch("m", [2.0]), second)
        assert device.entered.wait(5.0)
        assert fault or standby.withdraw()
        device.free.set()
        await asyncio.wait([running])
        assert (running.exception() is not None) == fault
        await asyncio.sleep(0.01)
        assert not second.done()
        assert standby.withdraw() == fault

    device = Adding()
    executor = ThreadExecutor(device)
    asyncio.run(main())
    executor.close()


def test_a_batch_that_ends_after_its_timeout_takes_no_standby_launch() -> None:
    async def main() -> None:
        standby = Standby()
        late = with_timeout(executor, Batch("m", [1.0], standby=standby), 0.01)
        with pytest.raises(BatchTimeoutError):
            await late
        standby.offer(Batch("m", [2.0]), asyncio.get_running_loop().create_future())
        device.free.set()
        await asyncio.sleep(0.2)  # the batch ends meanwhile
        assert standby.withdraw(), "it is for the batch that runs now, on another thread"
        executor.close()

    device = Adding()
    executor = ThreadExecutor(device)
    asyncio.run(main())


def test_a_function_that_was_queued_runs_before_a_standby_launch() -> None:
    async def main() -> None:
        standby = Standby()
        running = executor.run(Batch("m", [1.0], standby=standby))
        assert device.entered.wait(5.0)
        standby.offer(Batch("m", [2.0]), asyncio.get_running_loop().create_future())
        called = executor.call(lambda: "called")
        device.free.set()
        await running
        assert called.result(5.0) == "called"
        assert standby.withdraw(), "the loop decides after the function"

    device = Adding()
    executor = ThreadExecutor(device)
    asyncio.run(main())
    executor.close()


def test_a_full_queue_is_served_without_the_loop() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        await asyncio.gather(*(submit(dispatcher, "m", [n]) for n in range(20)))

    executor = RecordingExecutor(STEPS)
    run_scenario(scenario, chosen(greedy(8)), executor)
    assert executor.launched == [0], "the others are standby launches"
    assert [inputs for _, _, inputs in executor.log] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert all(one[1] == other[0] for one, other in pairwise(executor.log))


def test_a_standby_launch_follows_arrivals_cancellations_and_swaps() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        first = submit(dispatcher, "m", [0])
        await asyncio.sleep(0.001)
        gone, stays = submit(dispatcher, "m", [1]), submit(dispatcher, "m", [2])
        await asyncio.sleep(0.001)
        gone.cancel()
        late = submit(dispatcher, "m", [3])
        await asyncio.gather(first, stays, late)
        assert executor.log[1][2] == [2, 3]
        calls = [submit(dispatcher, "m", [n]) for n in range(4, 10)]
        await asyncio.sleep(0.001)
        dispatcher.policies.set("m", chosen(serial())["m"])
        await asyncio.gather(*calls)
        assert [len(inputs) for _, _, inputs in executor.log[2:]] == [6]
        calls = [submit(dispatcher, "m", [n]) for n in range(10, 13)]
        await asyncio.gather(*calls)
        assert [len(inputs) for _, _, inputs in executor.log[3:]] == [1, 1, 1]

    run_scenario(scenario, chosen(greedy(8)), RecordingExecutor(STEPS))


def test_a_request_that_is_cancelled_after_the_device_has_taken_it_is_in_service() -> None:
    """The device takes the launch, and the loop removes the request before it is told."""
    began, taken, held = threading.Event(), threading.Event(), threading.Event()

    class Device:
        def __init__(self) -> None:
            self.batches: list[list[Any]] = []

        def serve(self, batch: Batch, /) -> Sequence[Any]:
            self.batches.append(list(batch.inputs))
            began.set()
            if len(self.batches) == 1:
                assert held.wait(5.0)
            if len(self.batches) == 2:
                taken.set()
            return batch.inputs

    async def main() -> None:
        dispatcher = Dispatcher(executor, chosen(greedy(8)), Metrics(), time.monotonic)
        serving = asyncio.ensure_future(dispatcher.run())
        first = submit(dispatcher, "m", [0.0])
        await asyncio.to_thread(began.wait, 5.0)
        gone, stays = submit(dispatcher, "m", [1.0]), submit(dispatcher, "m", [2.0])
        await asyncio.sleep(0.01)  # the offer is made
        held.set()
        assert taken.wait(5.0)  # the loop stands still meanwhile
        gone.cancel()
        assert [sample.output for sample in await stays] == [2.0]
        await first
        assert device.batches == [[0.0], [1.0, 2.0]]
        assert [sample.output for sample in await submit(dispatcher, "m", [3.0])] == [3.0]
        assert dispatcher.open_calls == 0
        assert not dispatcher.policies.batcher.busy
        serving.cancel()

    device = Device()
    executor = ThreadExecutor(device, "cpu")
    asyncio.run(main())
    executor.close()


_EVENTS = st.tuples(st.sampled_from(["arrive", "cancel", "swap", "expire"]), st.floats(0.0, 0.03), st.integers(0, 99))
_SPECS = ["greedy", "static:3,max_wait_ms=15", "timeout:5", "smdp:w2=2", "serial", "max-under-deadline:slo_ms=40"]


@cache
def solved(spec: str) -> ModelPolicy:
    return choose(spec, STEPS)


def started(number: int) -> ModelPolicy:
    """The policy with a monitor that has measured nothing yet."""
    chosen = solved(_SPECS[number % len(_SPECS)])
    return replace(chosen, monitor=deepcopy(chosen.monitor))


@settings(max_examples=100)
@given(st.lists(_EVENTS, min_size=5, max_size=40), st.sampled_from([1.0, 0.7, 1.5]))
def test_a_taken_launch_is_the_decision_of_that_instant(events: list[tuple[str, float, int]], pace: float) -> None:
    """Whatever happens while batches run, faster or slower than predicted, a decision is at most as old as stated."""
    slow = replace(STEPS, service_times=tuple(pace * t for t in STEPS.service_times))

    class Checking(FakeExecutor):
        async def serve(self, batch: Batch) -> Completion:
            completion = await super().serve(batch)
            ahead = dispatchers[0]._lookahead
            offered, now = ahead._offered, asyncio.get_running_loop().time()
            if offered is not None:
                predicted = STEPS.service_time(len(batch.inputs))
                oldest = max(1e-3, 0.1 * predicted) if now > completion.started + predicted else inf
                if pace == 1.0:
                    fresh = dispatchers[0].policies.batcher.lookahead(ahead._running.launch, now)  # type: ignore[union-attr]
                    assert fresh is not None
                    assert fresh.requests == offered.launch.requests
                assert now - decided[-1] <= oldest + 1e-9
                assert all(not r.payload.call.future.done() for r in offered.launch.requests), "none is removed"
            return completion

    dispatchers: list[Dispatcher] = []
    decided: list[float] = []  # instants
    decide = Lookahead._decide

    def noting(ahead: Lookahead) -> None:
        decided.append(ahead._clock())
        decide(ahead)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        dispatchers.append(dispatcher)
        calls: list[asyncio.Future[Any]] = []
        for what, wait, number in events:
            await asyncio.sleep(wait)
            if what == "arrive" or (what == "expire" and number % 2):
                calls += [submit(dispatcher, "m", [n]) for n in range(1 + number % 5)]
            elif what == "expire":
                with suppress(RejectedError):
                    calls.append(submit(dispatcher, "m", [0], 0.005 + number / 2000))
            elif what == "cancel" and calls:
                calls[number % len(calls)].cancel()
            elif what == "swap":
                dispatcher.policies.set("m", started(number))
        await dispatcher.drain()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(not isinstance(r, Exception) or isinstance(r, ExpiredError) for r in results)
        await asyncio.sleep(1.0)  # a batch whose requests were all cancelled may still run
        assert not dispatcher.policies.batcher.busy
        assert len(dispatcher.policies.batcher) == 0

    with patch.object(Lookahead, "_decide", noting):
        run_scenario(scenario, {"m": started(0)}, Checking(slow))


def test_no_standby_launch_is_offered_while_a_time_out_may_pass_before_the_end_of_the_stage() -> None:
    class Late(RecordingExecutor):
        """Takes twice the service time of its profile."""

        async def serve(self, batch: Batch) -> Completion:
            await asyncio.sleep(STAGED.launch_time(len(batch.inputs), batch.first_stage, batch.last_stage))
            return await super().serve(batch)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        first = submit(dispatcher, "m", [1.0] * 8)
        await asyncio.sleep(0.001)
        second = submit(dispatcher, "m", [2.0] * 8)
        urgent = submit(dispatcher, "m", [3.0], 0.052)  # 47 ms are enough by the profile; it takes 36 + 36 + 22
        await first
        assert loop.time() == pytest.approx(0.036)
        await second
        with pytest.raises(ExpiredError):
            await urgent

    executor = Late()
    run_scenario(scenario, LAZY, executor)
    assert executor.launched == [0, 0, 1], "the second batch has no standby launch until the request has expired"
