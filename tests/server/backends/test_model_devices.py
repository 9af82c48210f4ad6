"""Several models on one device, also under one name, and one that is loaded while others serve."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import server.backends.executor
from profiler.back_to_back import back_to_back
from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import LoadingExecutor, ModelDevices
from server.errors import BatchTimeoutError, DeviceLostError, WorkerDiedError


class Named:
    """Returns its name, and the thread that it runs on; loaded on the thread that runs it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loads = self.batches = 0
        self.release = threading.Event()

    def load(self) -> None:
        self.thread = threading.get_ident()
        self.loads += 1

    def restart(self, hung: bool) -> None:
        self.release.set()
        self.load()

    def watch(self, _: Callable[[str], None]) -> None:
        pass

    def end(self) -> None:
        self.release.set()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.batches += 1
        if batch.inputs[0] == "hang":
            self.release.wait(20)
        return [(self.name, self.thread == threading.get_ident())] * len(batch.inputs)


def test_a_batch_runs_on_the_model_of_its_id() -> None:
    first, second = Named("first"), Named("second")
    devices = ModelDevices({"m": first})
    first.load()
    devices.add("m#2", "m", second)
    second.load()
    executor = ThreadExecutor(devices, "cpu")

    async def scenario() -> None:
        assert (await executor.run(Batch("m", [0]))).outputs[0][0] == "first"
        assert (await executor.run(Batch("m", [0], id="m#2"))).outputs[0][0] == "second"
        ahead = LoadingExecutor(executor, "m#2", "cpu", 9.0)
        assert (await ahead.run(Batch("m", [0]))).outputs[0][0] == "second"
        cycles = [cycle async for cycle in back_to_back(ahead, [Batch("m", [0]) for _ in range(3)])]
        assert {cycle.completion.outputs[0][0] for cycle in cycles} == {"second"}
        for cycle in cycles:
            service = cycle.completion.finished - cycle.completion.started
            assert cycle.seconds == service, "the time that is left to others is none of the batch's"
        devices.remove("m")
        with pytest.raises(KeyError):
            await executor.run(Batch("m", [0]))

    asyncio.run(scenario())
    executor.close()


def test_a_batch_that_is_queued_behind_one_that_hangs_fails_and_never_runs() -> None:
    hanging, other = Named("m"), Named("other")
    executor = ThreadExecutor(ModelDevices({"m": hanging, "other": other}), "cpu")

    async def scenario() -> None:
        hung = executor.run(Batch("m", ["hang"]))
        with pytest.raises(BatchTimeoutError):
            await LoadingExecutor(executor, "other", "cpu", 0.05).run(Batch("other", [0]))
        hanging.release.set()
        await hung

    hanging.load()
    asyncio.run(scenario())
    executor.close()
    assert other.batches == 0


def test_a_batch_of_a_model_that_is_loaded_and_hangs_is_given_up_and_those_behind_it_run_after_the_restart() -> None:
    named = Named("m")
    named.load()
    executor = ThreadExecutor(ModelDevices({"m": named}), "cpu")

    async def scenario() -> None:
        with pytest.raises(BatchTimeoutError) as caught:
            await LoadingExecutor(executor, "m", "cpu", 0.1).run(Batch("m", ["hang"]))
        behind = executor.run(Batch("m", [0]))
        cancelled = executor.run(Batch("m", ["hang"]))
        cancelled.cancel()
        await executor.restart("m", caught.value)
        assert (await asyncio.wait_for(behind, 10)).outputs == [("m", True)]
        assert (await asyncio.wait_for(executor.run(Batch("m", [0])), 10)).outputs == [("m", True)]

    asyncio.run(scenario())
    named.release.set()
    executor.close()


def test_a_model_that_is_not_loaded_again_in_time_loses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Named):
        def restart(self, hung: bool) -> None:
            self.release.wait(20)

    monkeypatch.setattr(server.backends.executor, "LOAD_TIMEOUT", 0.05)
    named = Hanging("m")
    executor = ThreadExecutor(ModelDevices({"m": named}), "cpu")
    with pytest.raises(DeviceLostError, match=r"m was not loaded again within 0.05 s") as caught:
        asyncio.run(executor.restart("m", WorkerDiedError("it died")))
    assert not isinstance(caught.value, WorkerDiedError), "which would be tried again"
    named.release.set()
    executor.close()
