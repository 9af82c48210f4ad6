"""Requests that are uploaded when they are admitted: answers, cancellations, faults, and devices that are lost."""

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from policies.profile import Profile
from policies.rules.control_limit import greedy, static
from server.backends.cuda import graph
from server.backends.cuda.graph import GraphDevice
from server.backends.executor import Batch, Completion, ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.errors import DeviceLostError, NotFiniteError, ServerError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from tests.server.backends.cuda.test_graph import MODEL, free, logits, network, sample
from tests.support.fake_graphs import FakeRuntime
from tests.support.fakes import FakeExecutor, chosen, run_scenario, submit

QUICK = Profile("quick", tuple(1e-3 + 1e-4 * b for b in range(1, 7)))


@pytest.mark.parametrize("slots", [12, 1024])
def test_every_request_gets_its_own_answer_and_leaves_its_slot(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_MOST_SLOTS", slots)
    monkeypatch.setattr(logging.getLogger("batchwright.dispatcher"), "disabled", True)  # pytest would keep tracebacks
    device, rng = GraphDevice(MODEL, network, FakeRuntime()), np.random.default_rng(0)
    everything = free(device)

    async def call(dispatcher: Dispatcher, mark: int, cancel: bool) -> None:
        await asyncio.sleep(float(rng.uniform(0, 0.05)))
        future = submit(dispatcher, "m", [sample(mark)])
        if cancel:
            await asyncio.sleep(float(rng.uniform(0, 0.003)))
            future.cancel()
        elif mark == 255:
            with pytest.raises((NotFiniteError, ServerError)):
                await future
        else:
            (answered,) = await future
            assert [answered.output.tolist()] == logits(mark)

    async def main() -> None:
        executor = ThreadExecutor(ModelDevices({"m": device}), "d")
        dispatcher = Dispatcher(executor, chosen(greedy(6), QUICK), Metrics(), asyncio.get_running_loop().time)
        task = asyncio.ensure_future(dispatcher.run())
        marks = [255 if index % 50 == 7 else index % 250 for index in range(200)]
        await asyncio.gather(*(call(dispatcher, mark, index % 5 == 3) for index, mark in enumerate(marks)))
        await dispatcher.drain()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        executor.close()

    asyncio.run(main())
    assert free(device) == everything


class Uploading(FakeExecutor):
    """An executor that marks what was uploaded to it."""

    def upload(self, model: str, each: Any) -> Any:
        assert model == "m"
        return self.name, each

    async def serve(self, batch: Batch) -> Completion:
        completion = await super().serve(batch)
        return Completion([each for _, each in batch.inputs], completion.started, completion.finished)


def test_a_request_is_uploaded_at_its_arrival_and_not_at_its_launch() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        first = submit(dispatcher, "m", [1.0])
        (waiting,) = [call.samples[0] for call in dispatcher._calls]
        assert waiting.data == ("fake", 1.0)
        assert waiting.input == 1.0
        second = submit(dispatcher, "m", [2.0])
        assert [each.output for each in [*await first, *await second]] == [1.0, 2.0]
        assert [inputs for _, _, inputs in executor.log] == [[("fake", 1.0), ("fake", 2.0)]]

    run_scenario(scenario, chosen(static(2)), Uploading())


def test_the_calls_of_a_lost_device_are_uploaded_to_the_next_one() -> None:
    async def main() -> None:
        executors = [Uploading(), Uploading()]
        loop = asyncio.get_running_loop()

        def lose(_: list[Any]) -> list[Any]:
            raise DeviceLostError("gone")

        for index, executor in enumerate(executors):
            executor.name = str(index)
        executors[0].fault = lose
        fleet = Fleet([Dispatcher(each, chosen(greedy(8)), Metrics(), loop.time) for each in executors])
        task = asyncio.ensure_future(fleet.run())
        (answered,) = await submit(fleet, "m", [5.0])
        assert (answered.output, answered.device) == (5.0, "1")
        assert executors[1].log[0][2] == [("1", 5.0)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
