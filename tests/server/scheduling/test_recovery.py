"""Device faults: recovery of failed batches, the batch timeout, lost devices."""

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.catalog import ModelPolicy
from policies.rules.control_limit import greedy
from server.backends.executor import Batch, Completion, ThreadExecutor
from server.errors import (
    BatchTimeoutError,
    DeviceLostError,
    DrainingError,
    ExecutionError,
    NotFiniteError,
    OutOfMemoryError,
    UnavailableError,
    WorkerDiedError,
)
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.recovery import Deaths, Recovery, run_in_parts
from server.telemetry.metrics import Metrics
from tests.support.fakes import UNLIMITED, FakeExecutor, chosen, run_scenario, submit
from tests.support.virtual_clock import pause, virtual_loop


def poisoned(outputs: list[Any]) -> list[Any]:
    if any(output < 0 for output in outputs):
        raise ValueError("a negative sample")
    return outputs


@given(st.lists(st.floats(-1, 1, width=32).filter(bool), min_size=1, max_size=20))
def test_poisoned_samples_fail_alone(samples: list[float]) -> None:
    executor = FakeExecutor()
    executor.fault = poisoned

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        calls = [submit(dispatcher, "m", [sample]) for sample in samples]
        done = await asyncio.gather(*calls, return_exceptions=True)
        for sample, result in zip(samples, done, strict=True):
            if sample < 0:
                assert isinstance(result, ExecutionError)
                assert "ValueError" in str(result)
                assert "a negative sample" not in str(result), "the message of the exception is for the log only"
            else:
                assert not isinstance(result, BaseException)
                assert result[0].output == np.float32(sample)
        assert dispatcher.open_calls == 0
        assert dispatcher.chosen["m"].profile.max_batch_size == 8, "the batch size was not the cause"

    run_scenario(scenario, chosen(greedy(8)), executor)


def too_large(largest: int) -> Callable[[list[Any]], list[Any]]:
    def fault(outputs: list[Any]) -> list[Any]:
        if len(outputs) > largest:
            raise OutOfMemoryError
        return outputs

    return fault


@pytest.mark.parametrize(("fits", "learned"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 4)])
def test_out_of_memory_halves_the_batch_and_the_maximum_batch_size_and_all_requests_are_served(
    fits: int, learned: int
) -> None:
    executor = FakeExecutor()
    executor.fault = too_large(fits)
    reduced: list[tuple[str, ModelPolicy]] = []

    def on_reduced(model: str, before: ModelPolicy) -> None:
        reduced.append((model, before))
        raise RuntimeError("a bug in the controller")

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        dispatcher.policies.on_batch_size_reduced = on_reduced
        before = dispatcher.chosen["m"]
        answers = await submit(dispatcher, "m", [float(n) for n in range(20)])
        assert [a.output for a in answers] == list(range(20))
        assert dispatcher.chosen["m"].profile.max_batch_size == learned
        assert max(len(entry[2]) for entry in executor.log[-3:]) <= learned
        assert reduced[0] == ("m", before)

    run_scenario(scenario, chosen(greedy(8)), executor)


def test_after_the_batch_timeout_the_device_is_lost_and_all_calls_fail() -> None:
    class Hung(FakeExecutor):
        def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
            return asyncio.get_running_loop().create_future()

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        assert dispatcher.alive
        calls = [submit(dispatcher, "m", [float(n)]) for n in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 3
        assert str(results[0]) == "the device is lost; send the request to another server"
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)
        assert dispatcher.broken.is_set()
        assert not dispatcher.ready
        assert not dispatcher.alive

    run_scenario(scenario, chosen(greedy(2)), Hung())


def test_a_pause_of_the_process_does_not_count_for_the_batch_timeout() -> None:
    class Slow(FakeExecutor):
        async def run_to_end(self, batch: Batch) -> Completion:
            await asyncio.sleep(31.0)  # above the batch timeout of 30 s
            return Completion(list(batch.inputs), 0.0, 31.0)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> Any:
        asyncio.get_running_loop().call_later(29.0, pause, 100.0)
        answers = await submit(dispatcher, "m", [1.0])
        return answers[0].output

    assert run_scenario(scenario, chosen(greedy(2)), Slow()) == 1.0


def test_poisoned_samples_do_not_reduce_the_maximum_batch_size_further() -> None:
    def fault(outputs: list[Any]) -> list[Any]:
        return poisoned(too_large(4)(outputs))

    executor = FakeExecutor()
    executor.fault = fault

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        samples = [1.0, -2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0]  # neither half is served whole
        await asyncio.gather(*(submit(dispatcher, "m", [x]) for x in samples), return_exceptions=True)
        assert dispatcher.chosen["m"].profile.max_batch_size == 4

    run_scenario(scenario, chosen(greedy(8)), executor)


def test_a_device_lost_during_recovery_ends_the_dispatcher() -> None:
    def fault(outputs: list[Any]) -> list[Any]:
        raise RuntimeError("oops") if len(outputs) > 1 else DeviceLostError("an illegal access")

    executor = FakeExecutor()
    executor.fault = fault

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        with pytest.raises(UnavailableError, match="the device is lost; send"):
            await submit(dispatcher, "m", [1.0, 2.0])
        with pytest.raises(DrainingError):
            submit(dispatcher, "m", [1.0])

    run_scenario(scenario, chosen(greedy(2)), executor)


def test_a_dispatcher_whose_loop_does_not_run_is_not_alive() -> None:
    loop = virtual_loop()

    async def main() -> list[bool]:
        dispatcher = Dispatcher(FakeExecutor(), chosen(greedy(2)), Metrics(), loop.time)
        await asyncio.sleep(100)
        seen = [dispatcher.alive]  # without requests there is nothing to do
        waiting = submit(dispatcher, "m", [1.0])  # the loop is not running
        for wait in (4.9, 0.2):
            await asyncio.sleep(wait)
            seen.append(dispatcher.alive)
        waiting.cancel()
        return seen

    assert loop.run_until_complete(main()) == [True, True, False]
    loop.close()


def fail(outputs: list[Any]) -> list[Any]:
    raise RuntimeError("the device burns")


@pytest.mark.parametrize("fault", [fail, lambda outputs: []])
def test_a_failing_batch_fails_its_requests_and_the_loop_continues(fault: Callable[[list[Any]], list[Any]]) -> None:
    executor = FakeExecutor()

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> list[Sample]:
        executor.fault = fault
        with pytest.raises(ExecutionError, match="the model failed on this input alone"):
            await submit(dispatcher, "m", [1.0, 2.0])
        executor.fault = lambda outputs: outputs
        return await submit(dispatcher, "m", [3.0])

    assert float(run_scenario(scenario, chosen(greedy(8)), executor)[0].output) == 3.0


def test_after_a_failed_batch_the_remaining_requests_of_its_call_are_not_run() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        executor.fault = fail
        with pytest.raises(ExecutionError):
            await submit(dispatcher, "m", [1.0, 2.0, 3.0, 4.0, 5.0])
        await asyncio.sleep(1.0)
        assert [entry[2] for entry in executor.log] == [[1.0, 2.0], [1.0], [2.0]]

    run_scenario(scenario, chosen(greedy(2)))


class Parts:
    """Runs parts of a batch directly; `fault` raises for some inputs.

    Attributes:
        sizes: of the parts that were run.
        restarts: number of restarts.
    """

    def __init__(self, fault: Callable[[Sequence[Any]], None]) -> None:
        self._fault = fault
        self.sizes: list[int] = []
        self.restarts = 0

    async def run(self, batch: Batch) -> Completion:
        self.sizes.append(len(batch.inputs))
        self._fault(batch.inputs)
        return Completion(list(batch.inputs), 0.0, 1.0)

    async def restart(self, _: str, error: DeviceLostError) -> None:
        self.restarts += 1

    def recover(self, inputs: Sequence[Any], error: Exception) -> Recovery:
        async def main() -> Recovery:
            return await run_in_parts(lambda part: asyncio.ensure_future(self.run(part)), self.restart, batch, error)

        batch = Batch("m", inputs)
        return asyncio.run(main())


def hangs(inputs: Sequence[Any]) -> None:
    if -1 in inputs:
        raise BatchTimeoutError("late")


def test_after_the_batch_timeout_each_request_is_retried_alone() -> None:
    parts = Parts(hangs)
    recovery = parts.recover([1, -1, 2, 3], BatchTimeoutError("late"))
    assert parts.sizes == [1, 1, 1, 1]
    assert [isinstance(part.result, Completion) for part in recovery.parts] == [True, False, True, True]
    assert parts.restarts == 2, "after the batch, and after the request that hangs alone"


def kills(inputs: Sequence[Any]) -> None:
    if any(each < 0 for each in inputs):
        raise WorkerDiedError("the model's process was killed by SIGSEGV")


@given(st.lists(st.integers(-1, 5).filter(bool), min_size=1, max_size=20))
def test_a_sample_that_ends_the_process_fails_alone(inputs: list[int]) -> None:
    parts = Parts(kills)
    recovery = parts.recover(inputs, WorkerDiedError("killed"))
    assert parts.sizes[0] == len(inputs), "once more as it was"
    found = {part.first + index: part.result for part in recovery.parts for index in range(part.size)}
    assert [isinstance(found[index], WorkerDiedError) for index in range(len(inputs))] == [each < 0 for each in inputs]
    died = sum(any(each < 0 for each in inputs[part.first : part.first + part.size]) for part in recovery.parts)
    assert parts.restarts >= 1 + died, "also after the last one"


def test_a_batch_whose_process_something_else_has_killed_is_run_again_as_it_was() -> None:
    parts = Parts(lambda _: None)
    assert parts.recover([1, 2, 3], WorkerDiedError("killed")).parts[0].size == 3
    assert (parts.sizes, parts.restarts) == ([3], 1)


class Mortal(FakeExecutor):
    """Its process can be killed, and is started again within a second."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self.deaths, self.restarted, self.dies_in_load = deaths, list[float](), 0
        self.fault = self._die

    def _die(self, outputs: list[Any]) -> list[Any]:
        if self.deaths:
            self.deaths -= 1
            raise WorkerDiedError("the model's process was killed by SIGKILL")
        return outputs

    async def restart(self, _: str, error: DeviceLostError) -> None:
        self.restarted.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.5)
        if self.dies_in_load:
            self.dies_in_load -= 1
            raise WorkerDiedError("the model's process was killed by SIGKILL")


def test_calls_wait_while_a_process_is_started_again_and_all_are_answered() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        assert isinstance(executor, Mortal)
        calls = [submit(dispatcher, "m", [float(index)]) for index in range(1, 20)]
        done = await asyncio.gather(*calls)
        assert [result[0].output for result in done] == [float(index) for index in range(1, 20)]
        assert len(executor.restarted) == 1
        assert dispatcher.up
        executor.deaths = 1
        assert (await submit(dispatcher, "m", [3.0]))[0].output == 3.0

    run_scenario(scenario, chosen(greedy(8)), Mortal(1))


@pytest.mark.parametrize(("in_load", "lost"), [(2, False), (3, False), (4, True)])
def test_a_process_that_dies_while_it_is_loaded_again_is_started_again_with_a_longer_pause(
    in_load: int, lost: bool
) -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        assert isinstance(executor, Mortal)
        executor.dies_in_load = in_load
        call = submit(dispatcher, "m", [1.0])
        if lost:
            with pytest.raises(UnavailableError):
                await call
        else:
            assert (await call)[0].output == 1.0
            pauses = np.diff(executor.restarted)
            assert (np.diff(pauses) > 0).all()
        assert dispatcher.up != lost

    run_scenario(scenario, chosen(greedy(8)), Mortal(1))


def test_a_death_that_ended_two_batches_counts_once() -> None:
    async def main() -> None:
        deaths, death = Deaths(), WorkerDiedError("the model's process was killed by SIGKILL")
        for _batch in range(6):
            await deaths.count(death, 0.0)
        for _death in range(3):
            await deaths.count(WorkerDiedError("the model's process was killed by SIGKILL"), 0.0)
        with pytest.raises(WorkerDiedError):
            await deaths.count(WorkerDiedError("the model's process was killed by SIGKILL"), 0.0)

    loop = virtual_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_device_whose_process_dies_five_times_without_a_served_batch_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        for _ in range(4):
            with pytest.raises(ExecutionError):
                await submit(dispatcher, "m", [1.0])
        assert dispatcher.up
        with pytest.raises(UnavailableError):
            await submit(dispatcher, "m", [1.0])
        assert not dispatcher.up

    run_scenario(scenario, chosen(greedy(8)), Mortal(10**6))
    assert "the model's process was killed by SIGKILL" in caplog.text


def test_a_lost_device_that_did_not_hang_is_not_restarted() -> None:
    parts = Parts(hangs)
    with pytest.raises(DeviceLostError, match="gone"):
        parts.recover([1, 2], DeviceLostError("gone"))
    assert (parts.sizes, parts.restarts) == ([], 0)


def test_a_sample_that_does_not_fit_alone_leaves_the_maximum_batch_size() -> None:
    def huge(inputs: Sequence[Any]) -> None:
        if max(inputs) > 100:
            raise OutOfMemoryError("huge")

    assert Parts(huge).recover([999], OutOfMemoryError("huge")).max_batch_size is None
    recovery = Parts(huge).recover([1, 2, 999, 3], OutOfMemoryError("huge"))
    assert recovery.max_batch_size == 1, "of a batch of 2 it is not known which sample did not fit"
    assert [part.size for part in recovery.parts] == [2, 1, 1]


def test_an_exception_without_a_text_fails_only_its_request() -> None:
    class NoTextError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fault(outputs: list[Any]) -> list[Any]:
        if any(output < 0 for output in outputs):
            raise NoTextError
        return outputs

    executor = FakeExecutor()
    executor.fault = fault

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        calls = [submit(dispatcher, "m", [sample]) for sample in (1.0, -1.0, 2.0)]
        good, bad, other = await asyncio.gather(*calls, return_exceptions=True)
        assert "with NoTextError" in str(bad)
        assert not isinstance(good, BaseException)
        assert not isinstance(other, BaseException)
        assert dispatcher.alive

    run_scenario(scenario, chosen(greedy(8)), executor)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("error", [ValueError("a bad sample"), NotFiniteError("the output is not finite")])
def test_inputs_of_a_failed_batch_are_free_before_the_next_garbage_collection(
    size: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take memory that is needed again."""
    monkeypatch.setattr(logging.getLogger("batchwright.dispatcher"), "disabled", True)  # pytest keeps what is logged

    class Failing:
        def serve(self, batch: Batch, /) -> Sequence[Any]:
            raise type(error)(*error.args)

    async def scenario() -> list[object]:
        executor = ThreadExecutor(Failing())
        dispatcher = Dispatcher(executor, chosen(greedy(8)), Metrics(), time.monotonic, UNLIMITED)
        running = asyncio.ensure_future(dispatcher.run())
        inputs = [np.zeros(3, np.float32) for _ in range(size)]
        kept = [*map(weakref.ref, inputs)]
        calls = [submit(dispatcher, "m", [each]) for each in inputs]
        del inputs
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} <= {ExecutionError, NotFiniteError}
        del calls, results
        await asyncio.sleep(0.1)  # the end of the tasks and of the thread's work
        running.cancel()
        executor.close()
        return [ref() for ref in kept]

    gc.disable()
    try:
        assert asyncio.run(scenario()) == [None] * size
    finally:
        gc.enable()
