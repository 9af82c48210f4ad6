"""The dispatcher on a virtual clock, so that all instants are exact."""

import asyncio
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import pytest

from policies.catalog import CATALOG, choose
from policies.planning.simulation import SimulatedDevice
from policies.profile import load_profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.simulator import simulate
from policies.rules.control_limit import greedy, serial, static, timeout
from policies.types import Action, BatchKey, Launch, Policy, Request, State
from server.backends.executor import Batch, Completion
from server.errors import (
    DrainingError,
    ExecutionError,
    ExpiredError,
)
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, FakeExecutor, chosen, run_scenario, submit
from tests.support.virtual_clock import virtual_loop


@pytest.mark.parametrize("max_wait_ms", ["inf", "25"])
@pytest.mark.parametrize("load", [0.1, 0.7, 1.2])
@pytest.mark.parametrize("name", CATALOG)
def test_simulator_and_dispatcher_launch_the_same_batches_at_the_same_times(
    name: str, load: float, max_wait_ms: str
) -> None:
    profile = load_profile("googlenet-tesla-p4-x10").truncated(16)
    rule = CATALOG[name]
    profile = profile.in_stages(4) if rule.needs_stages else profile
    spec = f"{rule.example}{',' if ':' in rule.example else ':'}max_wait_ms={max_wait_ms}"
    rate = load * profile.capacity
    arrivals = 100 if load == 0.1 and max_wait_ms == "25" else 200  # batches are small: 100 make as many launches
    instants = poisson(rate, arrivals / rate, np.random.default_rng(7)).tolist()

    async def serve(dispatcher: Dispatcher, executor: FakeExecutor) -> list[tuple[float, float, list[Any]]]:
        calls = []
        for n, instant in enumerate(instants):
            await asyncio.sleep(instant - asyncio.get_running_loop().time())
            calls.append(submit(dispatcher, "m", [n]))
        await dispatcher.drain()
        await asyncio.gather(*calls)
        return executor.log

    choice = choose(spec, profile)
    served_live = run_scenario(serve, {"m": choice}, FakeExecutor(profile))
    choice = choose(spec, profile)
    requests = [
        Request(n, t, BatchKey("m"), deadline=t + choice.slo, stages=profile.stages) for n, t in enumerate(instants)
    ]
    batcher = Batcher(choice.policy, {"m": 16}, choice.monitor)
    simulated = [
        (s.start, s.finish, [r.id for r in s.launch.requests])
        for s in simulate(batcher, requests, SimulatedDevice(profile, profile.service_time).service_time)
    ]
    until = instants[-1]  # after the last arrival the dispatcher drains at once, and the simulator does not
    before = [entry for entry in simulated if entry[0] < until]
    assert len(before) > 8
    assert [entry[2] for entry in served_live[: len(before)]] == [entry[2] for entry in before]
    # the virtual loop adds relative delays, so the last bits may differ
    np.testing.assert_allclose([e[:2] for e in served_live[: len(before)]], [e[:2] for e in before], rtol=0, atol=1e-9)
    served = sorted(chain(*(entry[2] for entry in served_live)))
    assert sorted(set(served)) == list(range(len(instants)))
    assert len(served) <= profile.stages * len(instants), "the last ones are drained with all stages in one launch"


def test_an_answer_has_batch_size_times_and_energy() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[Sample]:
        first = submit(dispatcher, "m", [10.0])
        await asyncio.sleep(0.002)
        second = submit(dispatcher, "m", [20.0, 30.0])
        return [*await first, *await second]

    answers = run_scenario(scenario, chosen(greedy(8)))
    assert [float(a.output) for a in answers] == [10.0, 20.0, 30.0]
    assert [a.batch_size for a in answers] == [1, 2, 2]
    assert [a.waiting for a in answers] == pytest.approx([0.0, 0.009, 0.009])
    assert [a.service for a in answers] == pytest.approx([0.011, 0.012, 0.012])
    assert [a.energy for a in answers] == pytest.approx([0.1, 0.1, 0.1])


def test_one_call_with_many_samples_may_be_served_in_different_batches_and_is_answered_together() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> list[float]:
        answers = await submit(dispatcher, "m", [float(n) for n in range(5)])
        assert [len(entry[2]) for entry in executor.log] == [2, 2, 1]
        return [float(a.output) for a in answers]

    assert run_scenario(scenario, chosen(greedy(2))) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_requests_expire_while_the_device_is_busy_and_are_never_run() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)
        late = submit(dispatcher, "m", [1.0], 0.03)
        with pytest.raises(ExpiredError, match="30 ms"):
            await late
        assert asyncio.get_running_loop().time() == pytest.approx(0.031)
        await running
        await dispatcher.drain()
        assert [entry[2] for entry in executor.log] == [[0.0]]

    run_scenario(
        scenario, chosen(greedy(8)), FakeExecutor(replace(STEPS, service_times=(0.1,) * 8))
    )  # slower than its profile


def test_a_cancelled_call_leaves_the_queue_at_once() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)
        gone, stays = submit(dispatcher, "m", [1.0, 2.0]), submit(dispatcher, "m", [3.0])
        gone.cancel()
        await asyncio.sleep(0)
        assert dispatcher.queue.length("m") == 1
        await asyncio.gather(running, stays)
        assert [entry[2] for entry in executor.log] == [[0.0], [3.0]]
        assert dispatcher.open_calls == 0

    run_scenario(scenario, chosen(greedy(8)))


def test_a_call_cancelled_in_service_does_not_affect_the_others_in_its_batch() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[Sample]:
        gone, stays = submit(dispatcher, "m", [1.0]), submit(dispatcher, "m", [2.0])
        await asyncio.sleep(0.001)
        gone.cancel()
        return await stays

    answers = run_scenario(scenario, chosen(greedy(8)))
    assert float(answers[0].output) == 2.0


@dataclass(frozen=True)
class Broken:
    def decide(self, state: State, /) -> Action:
        raise ZeroDivisionError


class FailingExecutor:
    """An executor whose `run` raises."""

    name = "failing"

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        raise RuntimeError("no device")


def test_a_broken_loop_fails_all_calls_rejects_new_ones_and_does_not_block_a_drain() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        with pytest.raises(ExecutionError, match="the dispatcher failed"):
            await submit(dispatcher, "m", [1.0])
        assert not dispatcher.ready
        with pytest.raises(DrainingError):
            submit(dispatcher, "m", [2.0])
        await dispatcher.drain()

    run_scenario(scenario, chosen(greedy(8)), FailingExecutor())  # type: ignore[arg-type]


def test_a_swap_keeps_the_measured_rate() -> None:
    first, second = (choose("greedy", STEPS), choose("rate-matching", STEPS))

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> tuple[float, float]:
        await submit(dispatcher, "m", [1.0, 2.0])
        before = dispatcher.queue.arrival_rate("m")
        dispatcher.policies.set("m", second)
        return before, dispatcher.queue.arrival_rate("m")

    before, after = run_scenario(scenario, {"m": first})
    assert before == after > 0


def test_long_after_the_last_arrival_the_rate_is_0() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> tuple[float, float]:
        await submit(dispatcher, "m", [1.0, 2.0])
        before = dispatcher.queue.arrival_rate("m")
        await asyncio.sleep(60.0)
        return before, dispatcher.queue.arrival_rate("m")

    before, after = run_scenario(scenario, {"m": choose("greedy", STEPS)})
    assert before > after == 0.0


@dataclass(frozen=True)
class EmptyLaunch:
    def decide(self, state: State, /) -> Action:
        return Launch([])


@pytest.mark.parametrize("policy", [Broken(), EmptyLaunch()])
def test_a_broken_policy_is_replaced_by_greedy_service_until_another_one_is_set(policy: Policy) -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        await submit(dispatcher, "m", [1.0])
        dispatcher.policies.set("m", chosen(static(2))["m"])
        first = submit(dispatcher, "m", [2.0])
        await asyncio.sleep(5)
        assert not first.done()
        await asyncio.gather(first, submit(dispatcher, "m", [3.0]))
        assert executor.log[-1][2] == [2.0, 3.0]

    run_scenario(scenario, chosen(policy))


def test_draining_serves_all_accepted_calls_without_waiting_and_rejects_new_ones() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        calls = [submit(dispatcher, "m", [float(n)]) for n in range(3)]
        draining = asyncio.ensure_future(dispatcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            submit(dispatcher, "m", [9.0])
        dispatcher.policies.set("m", chosen(static(8))["m"])  # a swap must not stop the draining
        await draining
        assert all(call.done() for call in calls)
        assert [entry[2] for entry in executor.log] == [[0.0, 1.0, 2.0]]

    run_scenario(scenario, chosen(static(8)))


def test_a_swapped_policy_decides_from_the_next_epoch_on_and_queued_requests_stay() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        waiting = submit(dispatcher, "m", [1.0])
        await asyncio.sleep(5)
        dispatcher.policies.set("m", chosen(greedy(8))["m"])
        await waiting
        assert executor.log[0][0] == pytest.approx(5.0)

    run_scenario(scenario, chosen(static(2)))


def test_models_of_one_device_have_separate_policies() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        a, b = submit(dispatcher, "a", [1.0]), submit(dispatcher, "b", [2.0])
        await a
        assert [entry[2] for entry in executor.log] == [[1.0]]
        await asyncio.gather(b, submit(dispatcher, "b", [3.0]))
        assert executor.log[-1][2] == [2.0, 3.0]

    run_scenario(scenario, {"a": chosen(greedy(8))["m"], "b": chosen(static(2))["m"]})


def test_the_slowdown_by_other_models_is_that_of_their_measured_rates() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        assert dispatcher.queue.slowdown("a") == dispatcher.queue.slowdown("b") == 1.0
        for _ in range(200):
            for model in ("a", "b"):
                submit(dispatcher, model, [1.0])
            await asyncio.sleep(0.01)
        load = dispatcher.queue.arrival_rate("b") / STEPS.capacity
        assert load > 0.05, "of one request each 10 ms"
        assert dispatcher.queue.slowdown("a") == pytest.approx(1.0 / (1.0 - load), rel=1e-6)
        assert dispatcher.queue.slowdown("b") == 1.0, "greedy has no table"

    run_scenario(scenario, {"a": choose("smdp", STEPS), "b": choose("greedy", STEPS)})


def test_a_deadline_is_missed_not_enforced() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        await submit(dispatcher, "m", [1.0, 2.0])
        assert [inputs for _, _, inputs in executor.log] == [[1.0], [2.0]]

    run_scenario(scenario, chosen(serial(), slo=0.012))


def test_the_idle_gap_counts_only_between_batches_while_requests_wait() -> None:
    loop = virtual_loop()
    metrics = Metrics()

    async def main() -> None:
        dispatcher = Dispatcher(FakeExecutor(), chosen(timeout(2, 0.1)), metrics, loop.time)
        task = asyncio.ensure_future(dispatcher.run())
        await submit(dispatcher, "m", [1.0, 2.0, 3.0, 4.0])  # two batches at once: one gap
        await asyncio.sleep(1.0)
        await submit(dispatcher, "m", [5.0])  # after an idle period: none
        await submit(dispatcher, "m", [5.0])  # the policy waited: none
        task.cancel()

    loop.run_until_complete(main())
    loop.close()
    text = metrics.render().decode()
    assert 'batchwright_idle_gap_seconds_count{device="fake"} 1.0' in text
    assert 'batchwright_idle_gap_seconds_sum{device="fake"} 0.0' in text


def test_a_request_after_a_long_idle_period_is_served_at_once() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> float:
        await asyncio.sleep(3600)
        (answer,) = await submit(dispatcher, "m", [1.0], inf)
        return answer.waiting

    assert run_scenario(scenario, chosen(greedy(STEPS.max_batch_size))) == 0.0


def test_each_request_has_its_share_of_the_cpu_time_of_its_batch() -> None:
    class Counting(FakeExecutor):
        async def run_to_end(self, batch: Batch) -> Completion:
            return replace(await super().run_to_end(batch), cpu_time=0.012)

    reported = list[float | None]()

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[Sample]:
        dispatcher.accounting.on_served = lambda *batch: reported.append(batch[-1])
        samples = await submit(dispatcher, "m", [1.0, 2.0, 3.0])
        await asyncio.sleep(0)
        return samples

    samples = run_scenario(scenario, chosen(greedy(8)), Counting())
    assert [sample.cpu_time for sample in samples] == pytest.approx([0.004] * 3)
    assert reported == [0.012]


def test_a_failing_controller_loses_no_request_and_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []

    def broken(model: str, batch_size: int, *_: float | None) -> None:
        sizes.append(batch_size)
        raise RuntimeError("a bug")

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[list[Sample]]:
        dispatcher.accounting.on_served = broken
        first = await submit(dispatcher, "m", [1.0])
        await asyncio.sleep(0)
        return [first, await submit(dispatcher, "m", [2.0])]

    answers = run_scenario(scenario, chosen(greedy(8)))
    assert [answer.output for call in answers for answer in call] == [1.0, 2.0]
    assert sizes == [1]
    assert "the controller failed" in caplog.text
