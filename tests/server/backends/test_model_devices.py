"""Several models on one device: their revisions, and a thread of its own for one that is loaded while others serve."""

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from profiler.back_to_back import back_to_back
from server.backends.executor import Batch, ThreadExecutor
from server.backends.model_devices import ModelDevices, RevisionExecutor
from server.errors import BatchTimeoutError


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

    def end(self) -> None:
        self.release.set()

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.batches += 1
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
        ahead = RevisionExecutor(executor, 1, "cpu", 9.0)
        assert (await ahead.run(Batch("m", [0]))).outputs[0][0] == "second"
        cycles = [cycle async for cycle in back_to_back(ahead, [Batch("m", [0]) for _ in range(3)])]
        assert {cycle.completion.outputs[0][0] for cycle in cycles} == {"second"}
        for cycle in cycles:
            service = cycle.completion.finished - cycle.completion.started
            assert cycle.seconds == service, "the time that is left to others is none of the batch's"
        devices.remove("m", 0)
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
            await RevisionExecutor(executor, 0, "cpu", 0.05).run(Batch("other", [0]))
        hanging.release.set()
        await hung

    hanging.load()
    asyncio.run(scenario())
    executor.close()
    assert other.batches == 0


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


@pytest.mark.parametrize("cyclic", [False, True])
def test_networks_of_a_removed_revision_that_stay_alive_are_found(cyclic: bool) -> None:
    class Holder:
        __slots__ = ("net", "settings")

        def __init__(self, net: torch.nn.Module) -> None:
            self.net, self.settings = net, {"on": True}

    class Device:
        def __init__(self) -> None:
            net = torch.nn.Sequential(torch.nn.Linear(2, 2))
            if cyclic:
                net.again = [net]  # type: ignore[assignment]
            self.models = {"m": Holder(net)}

        def serve(self, batch: Batch, /) -> Sequence[Any]:
            return batch.inputs

    devices = ModelDevices({"m": Device()})
    networks = devices.remove("m", 0)
    assert len(networks) == 2
    assert [network() is not None for network in networks] == [cyclic, cyclic]
    gc.collect()
    assert [network() for network in networks] == [None, None]
