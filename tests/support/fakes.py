"""Fakes of the server's protocols on a virtual clock."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from policies.catalog import ModelPolicy
from policies.profile import Profile
from policies.queue.monitor import Monitor, NoMonitor
from policies.types import Policy
from server.backends.executor import Batch, Completion
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.levels import Levels
from server.telemetry.metrics import Metrics
from tests.support.virtual_clock import virtual_loop

STEPS = Profile("steps", tuple(0.010 + 0.001 * b for b in range(1, 9)), energies=tuple(0.1 * b for b in range(1, 9)))


class FakeExecutor:
    """Serves each batch in its profile's service time on the loop's clock; each output is its input.

    Attributes:
        log: (start, finish, inputs) of each batch.
        fault: set by a test to raise an exception, or to change the outputs.
        handover: time that it reports from the end of a batch to the start of the standby launch, s.
    """

    name = "fake"
    handover = 0.0

    def __init__(self, profile: Profile = STEPS) -> None:
        self._profile = profile
        self.log: list[tuple[float, float, list[Any]]] = []
        self.fault: Callable[[list[Any]], list[Any]] = lambda outputs: outputs

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        return asyncio.ensure_future(self.run_to_end(batch))

    async def run_to_end(self, batch: Batch) -> Completion:
        completion = await self.serve(batch)
        if batch.standby is not None and (taken := batch.standby.take(completion.outputs)) is not None:
            self._start(*taken)
            completion = replace(completion, next_started=completion.finished + self.handover)
        return completion

    def _start(self, batch: Batch, done: "asyncio.Future[Completion]") -> None:
        """Run a standby launch, as a device's thread does."""

        def end(running: "asyncio.Future[Completion]") -> None:
            if done.done() or running.cancelled():
                return
            error = running.exception()
            done.set_result(running.result()) if error is None else done.set_exception(error)

        asyncio.ensure_future(self.run_to_end(batch)).add_done_callback(end)

    async def serve(self, batch: Batch) -> Completion:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(self._profile.launch_time(len(batch.inputs), batch.first_stage, batch.last_stage))
        self.log.append((start, loop.time(), list(batch.inputs)))
        outputs = self.fault([np.float32(x) if isinstance(x, float) else x for x in batch.inputs])
        return Completion(outputs, start, loop.time())


def chosen(
    policy: Policy, profile: Profile = STEPS, monitor: Monitor | None = None, **fields: Any
) -> Mapping[str, ModelPolicy]:
    """One model, "m", with this policy."""
    return {"m": ModelPolicy("spec", "name", {}, profile, policy, monitor or NoMonitor(), **fields)}


UNLIMITED = Limits(10**6)
Scenario = Callable[[Dispatcher, FakeExecutor], Coroutine[Any, Any, Any]]


def run_scenario(
    scenario: Scenario,
    by_model: Mapping[str, ModelPolicy],
    executor: FakeExecutor | None = None,
    limits: Limits = UNLIMITED,
    levels: Mapping[str, Levels] | None = None,
) -> Any:
    """Run a scenario against a running dispatcher on a virtual clock."""
    loop = virtual_loop()
    executor = executor or FakeExecutor()

    async def main() -> Any:
        metrics = Metrics()
        dispatcher = Dispatcher(executor, by_model, metrics, loop.time, limits, levels=levels)
        task = asyncio.ensure_future(dispatcher.run())
        try:
            return await scenario(dispatcher, executor)
        finally:
            task.cancel()

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def submit(
    to: Dispatcher | Fleet,
    model: str,
    inputs: Sequence[Any],
    timeout: float = inf,
    lengths: Sequence[float] = (),
    shapes: Sequence[str] = (),
    id: str = "",
    level: int = 1,
) -> "asyncio.Future[list[Sample]]":
    """Submit a call of samples with these inputs, and lengths or shapes where they differ in them."""
    lengths, shapes = lengths or [0.0] * len(inputs), shapes or [""] * len(inputs)
    samples = [Sample(*sample) for sample in zip(inputs, lengths, shapes, strict=True)]
    return to.submit(model, samples, timeout, id, level)
