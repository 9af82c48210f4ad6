"""Samples of different shapes are kinds of their own: they never share a batch, and their number is bounded."""

import asyncio
from typing import Any

import pytest

from policies.catalog import choose
from server.errors import TooManyShapesError
from server.scheduling.admission import MAX_SHAPES
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, UNLIMITED, FakeExecutor, submit
from tests.support.virtual_clock import virtual_loop


def run_scenario(scenario: Any, spec: str) -> FakeExecutor:
    loop, executor = virtual_loop(), FakeExecutor()

    async def main() -> None:
        chosen = {"m": choose(spec, STEPS)}
        dispatcher = Dispatcher(executor, chosen, Metrics(), loop.time, UNLIMITED, by_shape=["m"])
        task = asyncio.ensure_future(dispatcher.run())
        try:
            await scenario(dispatcher)
        finally:
            task.cancel()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return executor


@pytest.mark.parametrize("spec", ["greedy", "smdp:w2=1", "static:2,max_wait_ms=50", "rate-matching"])
def test_a_batch_has_samples_of_one_shape(spec: str) -> None:
    async def scenario(dispatcher: Dispatcher) -> None:
        first = submit(dispatcher, "m", [199.0], shapes=["1"])
        calls = [
            submit(dispatcher, "m", [float(shape) * 100 + index], shapes=[str(shape)])
            for index in range(4)
            for shape in (1, 2, 3)
        ]
        both = submit(dispatcher, "m", [105.0, 205.0], shapes=["1", "2"])
        answers = await asyncio.gather(first, *calls, both)
        assert [float(sample.output) for sample in answers[-1]] == [105.0, 205.0], "in the order of the call"
        dispatcher.policies.set("m", choose("greedy", STEPS))
        await asyncio.gather(*(submit(dispatcher, "m", [shape * 100.0], shapes=[str(shape)]) for shape in (1, 2)))

    executor = run_scenario(scenario, spec)
    batches = [inputs for _, _, inputs in executor.log]
    assert all(len({value // 100 for value in inputs}) == 1 for inputs in batches)
    assert max(map(len, batches)) > 1, "samples of equal shape do share a batch"


def test_the_number_of_shapes_that_wait_is_bounded() -> None:
    async def scenario(dispatcher: Dispatcher) -> None:
        calls = [submit(dispatcher, "m", [0.0], shapes=["running"])]
        await asyncio.sleep(0.001)
        calls += [submit(dispatcher, "m", [1.0], shapes=[str(shape)]) for shape in range(MAX_SHAPES)]
        with pytest.raises(TooManyShapesError, match=f"requests of {MAX_SHAPES + 1} different shapes would wait"):
            submit(dispatcher, "m", [1.0], shapes=["one too many"])
        calls.append(submit(dispatcher, "m", [1.0], shapes=["7"]))
        await asyncio.gather(*calls)
        await submit(dispatcher, "m", [1.0], shapes=["one too many"])

    run_scenario(scenario, "greedy")
