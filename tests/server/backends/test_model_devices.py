"""Several models on one device: their revisions, and a thread of its own for one that is loaded while others serve."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import DeviceOnThread, ModelDevices, RevisionExecutor
from server.errors import BatchTimeoutError


class Named:
    """Returns its name, and the thread that it runs on; loaded on the thread that runs it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loads = 0
        self.release = threading.Event()

    def load(self) -> None:
        self.thread = threading.get_ident()
        self.loads += 1

    restart = load

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        if batch.inputs[0] == "hang":
            self.release.wait(20)
        return [(self.name, self.thread == threading.get_ident())] * len(batch.inputs)


def test_a_batch_runs_on_the_revision_that_made_its_inputs() -> None:
    first, second = Named("first"), Named("second")
    devices = ModelDevices({"m": first})
    first.load()
    devices.add("m", 1, second)
    second.load()
    executor = ThreadExecutor(devices, "cpu")

    async def scenario() -> None:
        assert (await executor.run(Batch("m", [0]))).outputs[0][0] == "first"
        assert (await executor.run(Batch("m", [0], revision=1))).outputs[0][0] == "second"
        ahead = RevisionExecutor(executor, 1, "cpu", 10.0)
        assert (await ahead.run(Batch("m", [0]))).outputs[0][0] == "second"
        devices.remove("m", 0)
        with pytest.raises(KeyError):
            await executor.run(Batch("m", [0]))

    asyncio.run(scenario())
    executor.close()


def test_a_batch_of_a_new_revision_that_hangs_is_given_up_and_those_behind_it_run_after_the_restart() -> None:
    named = Named("m")
    named.load()
    executor = ThreadExecutor(ModelDevices({"m": named}), "cpu")

    async def scenario() -> None:
        with pytest.raises(BatchTimeoutError) as caught:
            await RevisionExecutor(executor, 0, "cpu", 0.1).run(Batch("m", ["hang"]))
        behind = executor.run(Batch("m", [0]))
        cancelled = executor.run(Batch("m", ["hang"]))
        cancelled.cancel()
        await executor.restart("m", caught.value)
        assert (await asyncio.wait_for(behind, 10)).outputs == [("m", True)]
        assert (await asyncio.wait_for(executor.run(Batch("m", [0])), 10)).outputs == [("m", True)]

    asyncio.run(scenario())
    named.release.set()
    executor.close()


def test_a_device_on_a_thread_is_loaded_and_run_there_and_errors_reach_the_caller() -> None:
    named = Named("m")
    own = DeviceOnThread(named)
    own.load()
    assert named.thread != threading.get_ident()
    assert own.serve(Batch("m", [0, 0])) == [("m", True)] * 2
    with pytest.raises(ZeroDivisionError):
        own.call(lambda: 1 // 0)
    with pytest.raises(BatchTimeoutError, match=r"did not end within 0\.01 s"):
        own.call(partial(threading.Event().wait, 1), 0.01)
    own.end()


def test_a_hung_device_on_a_thread_goes_on_on_another_thread() -> None:
    named = Named("m")
    own = DeviceOnThread(named)
    own.load()
    hung = threading.Thread(target=own.serve, args=(Batch("m", ["hang"]),))
    hung.start()
    before = named.thread
    own.restart()
    assert named.loads == 2
    assert named.thread != before
    assert own.serve(Batch("m", [0])) == [("m", True)]
    named.release.set()
    hung.join(10)
    assert not hung.is_alive()
    own.end()


def test_removing_a_revision_ends_its_thread() -> None:
    own = DeviceOnThread(Named("m"))
    own.load()
    devices = ModelDevices({})
    devices.add("m", 3, own)
    thread = own._thread._thread
    devices.remove("m", 3)
    thread.join(10)
    assert not thread.is_alive()
    devices.remove("m", 3)  # again, as after a load that failed
