"""Batches of users' models in their workers, through the executor: standby, order, other batches, and deaths."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from policies.types import SpecError
from profiler.back_to_back import back_to_back
from server.backends.executor import Batch, Completion, Standby, ThreadExecutor
from server.backends.model_devices import LoadingExecutor, ModelDevices
from server.backends.worker_device import Cost, WorkerDevice
from server.errors import BatchTimeoutError, WorkerDiedError
from server.models.sources import source_of

CODE = """
import time, numpy as np
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [-1])}
    outputs = {"y": Tensor("FP32", [-1])}
    def load(self, device):
        if device == "cuda:7":
            raise RuntimeError("no such device")
    def run(self, x):
        time.sleep(0.003)
        if (x == 77).any():
            time.sleep(60)
        if (x < 0).any():
            raise ValueError("negative")
        return {"y": 2 * x}
"""

BUSY = "end = time.process_time() + 0.05\n            while time.process_time() < end: pass"
HANGS = 77.0


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[dict[str, WorkerDevice]]:
    found = {}
    for name in ("m", "n"):
        (tmp_path / f"{name}.py").write_text(CODE)
        _, worker = source_of(f"{tmp_path}/{name}.py:Mine").load(name, "pretrained", 8, 1)
        found[name] = WorkerDevice(name, worker, "cpu")
        found[name].load()
    yield found
    for device in found.values():
        device.end()


@pytest.fixture
def executor(devices: dict[str, WorkerDevice]) -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor(ModelDevices(devices), "cpu")
    yield executor
    executor.close()


def batch(value: float, size: int = 3, model: str = "m", width: int = 2) -> Batch:
    return Batch(model, [{"x": np.full(width, value + index, np.float32)} for index in range(size)])


def is_right(batch: Batch, completion: Completion) -> bool:
    pairs = zip(batch.inputs, completion.outputs, strict=True)
    return all(bool((row["y"] == 2 * sample["x"]).all()) for sample, row in pairs)


@pytest.mark.parametrize("width", [2, 20_000, 200_000], ids=["small", "large", "too large to be offered"])
def test_batches_follow_each_other_with_their_own_outputs(executor: ThreadExecutor, width: int) -> None:
    async def scenario() -> list[Any]:
        batches = [batch(float(number), 1 + number % 3, width=width) for number in range(20)]
        return [cycle async for cycle in back_to_back(executor, batches)]

    for run in (asyncio.run, uvloop.run):
        cycles = run(scenario())
        assert len(cycles) == 20
        assert all(is_right(cycle.batch, cycle.completion) for cycle in cycles)
        taken = sum(cycle.completion.next_started is not None for cycle in cycles)
        assert taken > 10 if width < 100_000 else taken == 0


def test_a_batch_that_fails_takes_no_standby_and_the_next_one_runs(executor: ThreadExecutor) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="negative"):
            await executor.run(batch(-5.0))
        assert is_right(batch(1.0), await executor.run(batch(1.0)))

    asyncio.run(scenario())


def test_batches_of_two_models_never_run_at_the_same_time(executor: ThreadExecutor) -> None:
    async def work(model: str) -> Sequence[Completion]:
        own = LoadingExecutor(executor, "n", "cpu", 9.0) if model == "n" else executor
        found = []
        for number in range(15):
            one = batch(float(number), model=model)
            found.append(await own.run(one))
            assert is_right(one, found[-1])
        return found

    async def scenario() -> list[Completion]:
        return [each for found in await asyncio.gather(work("m"), work("n")) for each in found]

    done = sorted(uvloop.run(scenario()), key=lambda each: each.started)
    assert all(before.finished <= after.started for before, after in pairwise(done))


def test_a_process_that_died_between_two_batches_is_noticed_at_the_next(
    executor: ThreadExecutor, devices: dict[str, WorkerDevice]
) -> None:
    async def scenario() -> None:
        await executor.run(batch(1.0))
        pid = devices["m"].facts()["pid"]
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        for _ in range(2):
            with pytest.raises(WorkerDiedError):
                await asyncio.wait_for(executor.run(batch(1.0)), 10.0)
        await executor.restart("m", WorkerDiedError("it died"))
        assert is_right(batch(1.0), await executor.run(batch(1.0)))
        assert devices["m"].facts()["restarts"] == 1
        assert devices["m"].facts()["pid"] != pid

    asyncio.run(scenario())


def test_a_batch_in_service_when_the_process_dies_says_how(
    executor: ThreadExecutor, devices: dict[str, WorkerDevice]
) -> None:
    async def scenario() -> None:
        running = executor.run(batch(HANGS, size=1))
        await asyncio.sleep(0.05)
        os.kill(devices["m"].facts()["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="the model's process was killed by SIGKILL"):
            await asyncio.wait_for(running, 10.0)
        assert is_right(batch(2.0, model="n"), await executor.run(batch(2.0, model="n"))), "the device is free"

    asyncio.run(scenario())


def test_the_answer_of_a_batch_that_was_given_up_is_dropped(executor: ThreadExecutor) -> None:
    async def scenario() -> None:
        for _ in range(5):
            late = executor.run(batch(1.0))
            late.cancel()
            following = batch(101.0)
            assert is_right(following, await executor.run(following))

    for _ in range(2):
        asyncio.run(scenario())


def test_an_offer_to_a_failed_batch_is_not_taken_after_a_batch_of_the_thread(
    executor: ThreadExecutor, devices: dict[str, WorkerDevice]
) -> None:
    async def scenario() -> None:
        standby = Standby()
        running = executor.run(replace(batch(-9.0), standby=standby))
        following: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        second = batch(2.0)
        standby.offer(second, following)
        with pytest.raises(ValueError, match="negative"):
            await running
        assert devices["m"].serve(batch(1.0))  # as the thread does with a batch of a model that is being measured
        assert standby.withdraw(), "the worker has not taken the offer, whose completion nothing would read"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_launch_that_the_worker_took_before_it_died_fails_at_once(
    executor: ThreadExecutor, devices: dict[str, WorkerDevice]
) -> None:
    async def scenario() -> None:
        for pause in (0.0, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007):
            standby = Standby()
            first, second = replace(batch(1.0), standby=standby), batch(2.0)
            running = executor.run(first)
            following: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            standby.offer(second, following)
            await asyncio.sleep(pause)
            with suppress(ProcessLookupError):  # it had been dying when the restart found it running
                os.kill(devices["m"].facts()["pid"], signal.SIGKILL)
            ended: list[Any] = [*await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 10.0)]
            if standby.withdraw():
                assert not following.done()
            else:
                ended += await asyncio.wait_for(asyncio.gather(following, return_exceptions=True), 10.0)
            for one, result in zip((first, second), ended, strict=False):
                assert isinstance(result, WorkerDiedError) or (isinstance(result, Completion) and is_right(one, result))
            assert len({id(result) for result in ended if isinstance(result, WorkerDiedError)}) < 2, "one death"
            await executor.restart("m", WorkerDiedError("it died"))

    asyncio.run(scenario())


def test_a_completion_has_the_cpu_time_of_its_batch(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(CODE.replace("time.sleep(0.003)", f"if x[0, 0] > 5:\n            {BUSY}"))
    _, worker = source_of(f"{tmp_path}/busy.py:Mine").load("busy", "pretrained", 8, 1)
    device = WorkerDevice("busy", worker, "cpu")
    device.load()
    executor = ThreadExecutor(ModelDevices({"busy": device}), "cpu")

    async def cpu_time(value: float) -> float:
        found = (await executor.run(batch(value, model="busy"))).cpu_time
        assert found is not None
        return found

    assert asyncio.run(cpu_time(1.0)) < 0.05 <= asyncio.run(cpu_time(9.0))
    executor.close()
    device.end()


def test_restarts_are_reported_with_their_reason(executor: ThreadExecutor, devices: dict[str, WorkerDevice]) -> None:
    reasons = list[str]()
    ModelDevices(devices).watch(reasons.append)

    async def scenario() -> None:
        os.kill(devices["m"].facts()["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await executor.run(batch(1.0))
        await executor.restart("m", WorkerDiedError("it died"))
        hanging = executor.run(batch(HANGS))
        hanging.cancel()
        await asyncio.sleep(0)
        await executor.restart("m", BatchTimeoutError("it hangs"))
        assert is_right(batch(1.0), await executor.run(batch(1.0)))

    asyncio.run(scenario())
    assert reasons == ["died", "hung"]


def test_a_function_is_called_between_batches(devices: dict[str, WorkerDevice], executor: ThreadExecutor) -> None:
    async def scenario() -> None:
        before = executor.run(batch(1.0))
        alone = asyncio.wrap_future(executor.call_between(lambda: devices["m"].serve(batch(2.0))))
        after = executor.run(batch(3.0))
        first, between, last = await before, await alone, await after
        assert is_right(batch(2.0), replace(first, outputs=between))
        assert last.started - first.finished > 0.003, "which the function took"
        direct = await executor.run(batch(4.0))
        assert is_right(batch(4.0), direct)

    asyncio.run(scenario())


def test_batches_are_handed_over_again_after_one_that_waited_for_a_function(executor: ThreadExecutor) -> None:
    """A batch that the thread runs has no CPU time; others that follow it without a pause would have none for ever."""

    async def scenario() -> list[bool]:
        between = asyncio.wrap_future(executor.call_between(lambda: time.sleep(0.02)))
        cycles = [cycle async for cycle in back_to_back(executor, [batch(float(number)) for number in range(20)])]
        await between
        return [cycle.completion.cpu_time is not None for cycle in cycles]

    for run in (asyncio.run, uvloop.run):
        assert run(scenario()) == [False] + 19 * [True]


def test_an_exception_of_load_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    _, worker = source_of(f"{tmp_path}/own.py:Mine").load("own", "pretrained", 8, 1)
    device = WorkerDevice("own", worker, "cuda:7")
    with pytest.raises(SpecError, match=r"loading own failed: own.py line 9: RuntimeError: no such device"):
        device.load()
    device.end()


@pytest.mark.slow
def test_the_threads_of_a_model_are_chosen_and_kept_in_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = "torch.get_num_threads()"
    code = CODE.replace("import time,", "import time, torch,").replace("2 * x", f"x * 0 + {threads}")
    (tmp_path / "torched.py").write_text(code)
    _, worker = source_of(f"{tmp_path}/torched.py:Mine").load("torched", "pretrained", 8, 1)
    device = WorkerDevice("torched", worker, "cpu")
    device.load()
    one = batch(1.0, 1, "torched")

    def used() -> int:
        (row,) = device.serve(one)
        return int(row["y"][0])

    trials = list[int]()

    def time_with(_: WorkerDevice, count: int, __: Batch) -> Cost:
        trials.append(count)
        return Cost((1.0 if len(trials) > 2 else 9.0) / count, 1.0)

    whole = WorkerDevice.time_with
    monkeypatch.setattr(WorkerDevice, "time_with", time_with)
    monkeypatch.setattr("server.backends.worker_device.available_cpus", lambda: 2)
    device.choose_threads(one, None)
    assert used() == 2, "which takes half of the time with one"
    assert trials == [1, 2] * 3
    monkeypatch.setattr("server.backends.worker_device.available_cpus", lambda: 40)
    device.choose_threads(one, None)
    assert used() == 39, "since all processors save little"
    monkeypatch.setattr("server.backends.worker_device.available_cpus", lambda: 2)
    monkeypatch.setattr(WorkerDevice, "time_with", lambda _, count, __: Cost((1.0e-3, 0.7e-3)[count - 1], 1.0))
    device.choose_threads(one, None)
    assert used() == 1, "since a third of a time this short is less than a wait of one thread for another"
    monkeypatch.setattr(WorkerDevice, "time_with", whole)
    device.choose_threads(one, 3)
    assert device.time_with(1, one).time > 0.0
    assert used() == 3, "those in use stay"
    os.kill(device.facts()["pid"], signal.SIGKILL)
    with suppress(WorkerDiedError):
        device.serve(one)
    device.restart(False)
    assert used() == 3
    device.end()


def test_a_model_without_torch_has_no_threads_to_choose(devices: dict[str, WorkerDevice]) -> None:
    devices["m"].choose_threads(batch(1.0, 1), None)
    assert devices["m"].threads is None


FAULTS = """
import resource, numpy as np
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"faults": Tensor("FP32", [1])}
    def run(self, x):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (1 << 26, 1 << 25):  # bytes
            b"1" * size
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return {"faults": np.full_like(x, faults)}
"""


def test_memory_that_a_batch_frees_is_kept_for_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(FAULTS)
    _, worker = source_of(f"{tmp_path}/m.py:Mine").load("m", "pretrained", 8, 1)
    device = WorkerDevice("m", worker, "cpu")
    device.load()
    faults = [float(device.serve(batch(1.0, width=1))[0]["faults"][0]) for _ in range(3)]
    device.end()
    assert max(faults[1:]) < 100  # of 24,576 pages
