"""The dispatcher with stages: metrics, backlog, reports to the controller, policy swaps."""

import asyncio
from typing import Any

from policies.catalog import ModelPolicy, choose
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import STEPS, FakeExecutor, run_scenario, submit

STAGED = STEPS.in_stages(4)  # a batch of b takes 10 + b ms, in equal stages


def lazy(spec: str = "lazy:slo_ms=1000") -> dict[str, ModelPolicy]:
    return {"m": choose(spec, STAGED)}


def test_requests_are_counted_once_and_energies_add_up_over_stages() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> tuple[list[Sample], str]:
        answers = await submit(dispatcher, "m", [1.0, 2.0])
        assert len(executor.log) == 4
        await asyncio.sleep(0.001)  # metrics come after the answers
        return answers, dispatcher._metrics.render().decode()

    answers, metrics = run_scenario(scenario, lazy(), FakeExecutor(STAGED))
    assert [float(answer.output) for answer in answers] == [1.0, 2.0]
    assert [round(answer.energy or 0.0, 9) for answer in answers] == [0.1, 0.1]
    assert [round(answer.service, 9) for answer in answers] == [0.012, 0.012]
    labels = '{device="fake",model="m"}'
    assert f"batchwright_batch_size_sum{labels} 2.0" in metrics
    assert f"batchwright_batch_size_count{labels} 1.0" in metrics


def test_the_backlog_includes_the_remaining_stages_of_the_batch_in_service() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        call = submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0.001)
        assert round(dispatcher.backlog(), 6) == 0.010, "11 ms for all four stages, of which 1 ms has passed"
        await call

    run_scenario(scenario, lazy(), FakeExecutor(STAGED))


def test_whole_batches_and_single_stages_are_reported_separately() -> None:
    reported: list[Any] = []

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        dispatcher.accounting.on_served = lambda *batch: reported.append(batch[1])
        dispatcher.accounting.on_unprofiled_work = reported.append
        await submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0)
        dispatcher.policies.set("m", choose("greedy", STAGED))
        await submit(dispatcher, "m", [1.0, 2.0])
        await asyncio.sleep(0)

    run_scenario(scenario, lazy(), FakeExecutor(STAGED))
    assert reported == ["m", "m", "m", "m", 2]


def test_requests_between_stages_are_finished_after_a_swap() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[float]:
        first = submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0.004)
        second = submit(dispatcher, "m", [2.0])
        await asyncio.sleep(0.004)
        dispatcher.policies.set("m", choose("greedy", STAGED))
        return [float((await call)[0].output) for call in (first, second)]

    assert run_scenario(scenario, lazy(), FakeExecutor(STAGED)) == [1.0, 2.0]
