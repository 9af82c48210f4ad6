"""Models that take over a name: calls of the former one are served by it, first and without waiting for more."""

import asyncio
from typing import Any

import pytest

from policies.queue.batcher import Batcher
from policies.queue.drain import Drain
from policies.queue.monitor import NoMonitor
from policies.rules.control_limit import static
from policies.rules.finish_first import FinishRetired
from policies.types import BatchKey, Launch, Request, State, Wait
from server.backends.executor import Batch, Completion
from server.errors import OutOfMemoryError
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import FakeExecutor, chosen, run_scenario, submit

MODELS = ["m", "m#2", "m#3"]


class Recording(FakeExecutor):
    """Notes the model of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[str, int]] = []  # id and size

    async def run_to_end(self, batch: Batch) -> Completion:
        self.batches.append((batch.id, len(batch.inputs)))
        return await super().run_to_end(batch)


def test_queued_calls_of_a_replaced_model_are_served_by_it_at_once() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Any) -> None:
        old = [submit(dispatcher, "m", [n]) for n in range(3)]
        await asyncio.sleep(0.5)
        assert not executor.batches, "static:4 waits for a fourth"
        dispatcher.policies.switch("m", "m#2", chosen(static(4))["m"])
        new = [submit(dispatcher, "m", [10 + n], id="m#2") for n in range(3)]
        late = submit(dispatcher, "m", [3])  # its body was read before the swap
        await asyncio.gather(*old, late)
        assert [size for model, size in executor.batches if model == "m"] in ([3, 1], [4])
        assert not any(model == "m#2" for model, _ in executor.batches), "three of the new one wait for a fourth"
        dispatcher.policies.forget("m")
        new.append(submit(dispatcher, "m", [13], id="m#2"))
        await asyncio.gather(*new)
        assert executor.batches[-1] == ("m#2", 4)

    run_scenario(scenario, chosen(static(4)), Recording())


def test_models_of_one_name_never_share_a_batch_even_while_the_server_drains() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Any) -> None:
        calls = []
        for model in MODELS:
            if model != "m":
                dispatcher.policies.switch("m", model, chosen(static(8))["m"])
            calls += [submit(dispatcher, "m", [(model, n)], id=model) for n in range(2)]
        await dispatcher.drain()
        for call in calls:
            ((model, _),) = [sample.output for sample in await call]
            assert model in MODELS
        assert all(len({model for model, _ in batch}) == 1 for _, _, batch in executor.log)
        assert sorted(executor.batches) == [(model, 2) for model in MODELS]

    run_scenario(scenario, chosen(static(8)), Recording())


def test_a_batch_of_a_replaced_model_that_does_not_fit_the_memory_does_not_reduce_those_of_the_new_one() -> None:
    class Large(Recording):
        async def run_to_end(self, batch: Batch) -> Completion:
            if batch.id == "m" and len(batch.inputs) > 2:
                raise OutOfMemoryError
            return await super().run_to_end(batch)

    async def scenario(dispatcher: Dispatcher, executor: Any) -> None:
        old = [submit(dispatcher, "m", [n], id="m") for n in range(4)]
        dispatcher.policies.switch("m", "m#2", chosen(static(8))["m"])
        await asyncio.gather(*old)
        assert sorted(size for _, size in executor.batches) == [2, 2]
        await asyncio.gather(*(submit(dispatcher, "m", [n], id="m#2") for n in range(8)))
        assert executor.batches[-1] == ("m#2", 8)

    run_scenario(scenario, chosen(static(8)), Large())


def test_calls_of_an_unloaded_model_are_served() -> None:
    async def scenario(dispatcher: Dispatcher, executor: Any) -> None:
        call = submit(dispatcher, "m", [1, 2])
        dispatcher.policies.switch("m", None)
        assert len(await call) == 2
        assert executor.batches == [("m", 2)]

    run_scenario(scenario, chosen(static(8)), Recording())


def test_batches_of_a_replaced_model_and_beside_one_that_is_loaded_are_no_evidence_of_drift() -> None:
    async def scenario(dispatcher: Dispatcher, _: Any) -> None:
        served: list[str] = []
        unprofiled: list[str] = []
        dispatcher.accounting.on_served = lambda model, *_: served.append(model)
        dispatcher.accounting.on_unprofiled_work = unprofiled.append
        call = submit(dispatcher, "m", [1])
        await asyncio.sleep(0.001)  # it is in service
        dispatcher.policies.switch("m", "m#2", chosen(static(1))["m"])
        await call
        await submit(dispatcher, "m", [2], id="m#2")
        await asyncio.sleep(0.001)  # the controller hears of a batch after its answers
        assert (served, unprofiled) == (["m"], ["m"])
        dispatcher.accounting.shared = True  # another one is being loaded
        await submit(dispatcher, "m", [3], id="m#2")
        await asyncio.sleep(0.001)
        assert (served, unprofiled) == (["m"], ["m", "m"])

    run_scenario(scenario, chosen(static(1)))


def test_requests_of_retired_kinds_are_launched_before_the_policy_decides() -> None:
    policy = FinishRetired(static(8), Drain({"m": 2}))
    new = [Request(n, float(n), BatchKey("m")) for n in range(3)]
    old = [Request(10 + n, 5.0 + n, BatchKey("m", retired="m#1")) for n in range(3)]
    action = policy.decide(State(9.0, (*new, *old)))
    assert isinstance(action, Launch)
    assert [request.id for request in action.requests] == [10, 11]
    assert isinstance(policy.decide(State(9.0, new)), Wait)
    suspended = policy.decide(State(9.0, new, old[:1]))
    assert isinstance(suspended, Launch)
    assert [request.id for request in suspended.requests] == [10]


def test_the_batcher_rejects_a_batch_of_two_models_of_one_name() -> None:
    class Mixing:
        def decide(self, state: State, /) -> Launch:
            return Launch(state.waiting)

    batcher = Batcher(Mixing(), {"m": 8}, NoMonitor())
    for number, retired in enumerate(("", "m#1")):
        batcher.arrive(Request(number, 0.0, BatchKey("m", retired=retired)))
    with pytest.raises(Exception, match="of one kind"):
        batcher.decide(1.0)
