"""A fleet of several devices, on a virtual clock."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.catalog import ModelPolicy, choose
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.rules.control_limit import greedy, static
from policies.rules.maximum_wait import MaximumWait
from policies.types import Policy
from server.backends.executor import Batch
from server.errors import (
    BadInputError,
    DeviceLostError,
    DrainingError,
    ExpiredError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from server.scheduling.admission import Limits
from server.scheduling.calls import InferenceCall, Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.levels import Levels
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, UNLIMITED, FakeExecutor, chosen, submit
from tests.support.virtual_clock import virtual_loop

SLOW = replace(STEPS, name="slow", service_times=tuple(2.0 * t for t in STEPS.service_times))
Scenario = Callable[[Fleet, list[FakeExecutor]], Coroutine[Any, Any, Any]]


def run_scenario(
    scenario: Scenario,
    *profiles: Profile,
    policy: Policy | None = None,
    limits: Limits = UNLIMITED,
    levels: Mapping[str, Levels] | None = None,
) -> Any:
    """Run a scenario against a running fleet, a device for each profile, on a virtual clock."""
    loop = virtual_loop()
    executors = [FakeExecutor(profile) for profile in profiles]
    for index, executor in enumerate(executors):
        executor.name = f"device {index}"

    async def main() -> Any:
        metrics = Metrics()
        fleet = Fleet(
            [
                Dispatcher(executor, chosen(policy or greedy(8), profile), metrics, loop.time, limits, levels=levels)
                for executor, profile in zip(executors, profiles, strict=True)
            ],
            limits.capacity,
        )
        task = asyncio.ensure_future(fleet.run())
        try:
            return await scenario(fleet, executors)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def lose(executor: FakeExecutor) -> None:
    def lost(_: list[Any]) -> list[Any]:
        raise DeviceLostError("gone")

    executor.fault = lost


def served(executor: FakeExecutor) -> list[Any]:
    return [sample for _, _, inputs in executor.log for sample in inputs]


def test_a_call_goes_whole_to_the_device_with_the_least_expected_response_time() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        one = submit(fleet, "m", [1.0])  # 11 ms on the first, 22 on the second
        await asyncio.sleep(0.001)
        two = submit(fleet, "m", [2.0, 3.0])  # 10 + 12 on the first, 24 on the second
        three = submit(fleet, "m", [4.0] * 5)  # 10 + 17 on the first, 30 on the second
        four = submit(fleet, "m", [5.0] * 4)  # 10 + 18 + 13 on the first, 28 on the second
        answers = [*await one, *await two, *await three, *await four]
        assert [served(executor) for executor in executors] == [[1.0, 2.0, 3.0, *[4.0] * 5], [5.0] * 4]
        assert [answer.device for answer in answers] == ["device 0"] * 8 + ["device 1"] * 4

    run_scenario(scenario, STEPS, SLOW)


def test_each_device_measures_and_uses_its_own_share_of_the_arrival_rate() -> None:
    async def scenario(fleet: Fleet, _: list[FakeExecutor]) -> None:
        for dispatcher, profile in zip(fleet.dispatchers, (STEPS, SLOW), strict=True):
            dispatcher.policies.set("m", choose("smdp:w2=0", profile))
        loop, calls = asyncio.get_running_loop(), list[asyncio.Future[list[Sample]]]()
        rate = 0.6 * fleet.capacity("m")
        for instant in poisson(rate, 6.0, np.random.default_rng(1)).tolist():
            await asyncio.sleep(instant - loop.time())
            calls.append(submit(fleet, "m", [0.0]))
        shares = [dispatcher.queue.arrival_rate("m") for dispatcher in fleet.dispatchers]
        assert min(shares) > 0.0
        assert sum(shares) == pytest.approx(fleet.arrival_rate("m"))
        assert fleet.arrival_rate("m") == pytest.approx(rate, rel=0.35)  # estimated from about 60 arrivals
        await fleet.drain()
        answers = [await call for call in calls]
        by_device = [sum(answer[0].device == f"device {n}" for answer in answers) for n in range(2)]
        assert by_device[0] > by_device[1] > 0

    run_scenario(scenario, STEPS, SLOW)


def test_calls_of_a_lost_device_are_answered_by_the_others_and_their_time_outs_still_hold() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        lose(executors[0])
        calls = [submit(fleet, "m", [float(n)]) for n in range(30)]
        urgent = submit(fleet, "m", [99.0], 0.08)
        before = [dispatcher.open_calls for dispatcher in fleet.dispatchers]
        assert min(before) > 0
        answers = [(await call)[0] for call in calls]
        assert [float(answer.output) for answer in answers] == [float(n) for n in range(30)]
        assert {answer.device for answer in answers} == {"device 1"}
        assert max(answer.waiting for answer in answers) > 0.011, "since its arrival, not since it was moved"
        with pytest.raises(ExpiredError):
            await urgent
        await asyncio.sleep(0.0)  # so that the last calls are removed
        assert (fleet.alive, fleet.ready, fleet.broken.is_set()) == (True, True, False)
        assert [fleet.serves(dispatcher) for dispatcher in fleet.dispatchers] == [False, True]
        assert fleet.queue_length("m") == fleet.open_calls == 0
        with pytest.raises(BadInputError, match="device 0 is lost"):
            fleet.set_serving(0, True)

    run_scenario(scenario, STEPS, SLOW)


def test_requests_of_a_lost_device_keep_their_place_by_arrival_and_their_maximum_wait() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        lose(executors[0])
        old = submit(fleet, "m", [1.0])
        await asyncio.sleep(0.9)
        young = submit(fleet, "m", [2.0])
        assert [dispatcher.open_calls for dispatcher in fleet.dispatchers] == [1, 1]
        fleet.set_serving(0, False)  # it launches, and is lost
        answers = [(await call)[0] for call in (old, young)]
        assert served(executors[1]) == [1.0, 2.0]
        assert [answer.waiting for answer in answers] == pytest.approx([1.0, 0.1]), "the maximum wait of the older one"

    run_scenario(scenario, STEPS, STEPS, policy=MaximumWait(static(8), 8, 1.0))


def test_calls_of_a_dispatcher_that_fails_by_a_bug_move_too() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> list[str]:
        def bug(_: Batch) -> Any:
            raise ZeroDivisionError

        executors[0].run = bug  # type: ignore[method-assign]
        calls = [submit(fleet, "m", [float(n)]) for n in range(4)]
        return [(await call)[0].device for call in calls]

    assert run_scenario(scenario, STEPS, SLOW) == ["device 1"] * 4


def test_when_the_last_device_is_lost_the_fleet_is_broken() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        lose(executors[0])
        first = submit(fleet, "m", [1.0])
        await first
        lose(executors[1])
        second = submit(fleet, "m", [2.0])
        with pytest.raises(UnavailableError):
            await second
        assert (fleet.alive, fleet.ready, fleet.broken.is_set()) == (False, False, True)
        with pytest.raises(DrainingError):
            submit(fleet, "m", [3.0])

    run_scenario(scenario, STEPS, SLOW)


def test_a_call_that_breaks_devices_fails_before_all_are_lost() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        def poisoned(outputs: list[Any]) -> list[Any]:
            if 666.0 in outputs:
                raise DeviceLostError("gone")
            return outputs

        for executor in executors:
            executor.fault = poisoned
        bad = submit(fleet, "m", [666.0])
        await asyncio.sleep(0.001)
        waiting = [submit(fleet, "m", [float(n)]) for n in range(6)]
        with pytest.raises(UnavailableError):
            await bad
        assert [float((await call)[0].output) for call in waiting] == [float(n) for n in range(6)]
        assert sum(fleet.serves(dispatcher) for dispatcher in fleet.dispatchers) == 1

    run_scenario(scenario, STEPS, STEPS, STEPS, policy=greedy(1))


def test_a_retired_device_serves_its_calls_at_once_and_can_be_resumed() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        waiting = submit(fleet, "m", [1.0])  # waits for seven more
        await asyncio.sleep(1.0)
        assert not waiting.done()
        fleet.set_serving(0, False)
        assert (await waiting)[0].device == "device 0"
        retired = [submit(fleet, "m", [float(n)]) for n in range(8)]
        assert {(await call)[0].device for call in retired} == {"device 1"}
        assert fleet.capacity("m") == SLOW.capacity
        with pytest.raises(BadInputError, match="device 1 is the last"):
            fleet.set_serving(1, False)
        fleet.set_serving(0, True)
        resumed = [submit(fleet, "m", [float(n)]) for n in range(8)]
        await asyncio.sleep(1.0)
        assert {(await call)[0].device for call in resumed} == {"device 0"}, "it waits for eight requests again"
        assert [len(inputs) for _, _, inputs in executors[0].log] == [1, 8]

    run_scenario(scenario, STEPS, SLOW, policy=static(8))


def test_retiring_fails_for_an_unknown_device_and_on_a_server_that_stops() -> None:
    async def scenario(fleet: Fleet, _: list[FakeExecutor]) -> None:
        for index in (-1, 2):
            with pytest.raises(NotFoundError, match="there are 2"):
                fleet.set_serving(index, False)
        fleet.shutting_down = True
        assert not fleet.ready
        with pytest.raises(DrainingError):
            fleet.set_serving(0, False)
        assert float((await submit(fleet, "m", [5.0]))[0].output) == 5.0, "calls are admitted until it drains"

    run_scenario(scenario, STEPS, SLOW)


def test_calls_of_a_device_lost_during_a_drain_move_to_the_others() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        lose(executors[1])
        calls = [submit(fleet, "m", [float(n)]) for n in range(6)]
        await fleet.drain()
        assert [float(call.result()[0].output) for call in calls] == [float(n) for n in range(6)]
        with pytest.raises(DrainingError):
            submit(fleet, "m", [1.0])

    run_scenario(scenario, STEPS, SLOW)


def test_calls_keep_their_level_when_their_device_is_lost() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> list[list[Any]]:
        lose(executors[0])
        calls = [submit(fleet, "m", [float(n)], level=2) for n in range(6)]
        calls += [submit(fleet, "m", [float(n)], level=1) for n in (10, 11)]
        await asyncio.gather(*calls)
        return [inputs for *_, inputs in executors[1].log]

    batches = run_scenario(scenario, STEPS, STEPS, policy=greedy(1), levels={"m": Levels(2)})
    order = [inputs[0] for inputs in batches]
    assert sorted(order) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0]
    assert max(order.index(10.0), order.index(11.0)) <= 3, "each device had begun with one of level 2"


def test_a_part_of_the_places_of_all_devices_is_reserved_for_the_first_level() -> None:
    async def scenario(fleet: Fleet, _: list[FakeExecutor]) -> None:
        running = [submit(fleet, "m", [float(n)]) for n in range(2)]
        await asyncio.sleep(0.001)
        waiting = [submit(fleet, "m", [float(n)], level=2) for n in range(6)]
        with pytest.raises(QueueFullError, match="6 of 6 places"):
            submit(fleet, "m", [9.0], level=2)
        waiting += [submit(fleet, "m", [9.0]) for _ in range(2)]
        with pytest.raises(QueueFullError, match="8 of 8 places"):
            submit(fleet, "m", [9.0])
        await asyncio.gather(*running, *waiting)

    run_scenario(scenario, STEPS, STEPS, policy=greedy(1), limits=Limits(8), levels={"m": Levels(2, 0.25)})


def test_the_capacity_counts_waiting_requests_of_all_devices() -> None:
    async def scenario(fleet: Fleet, _: list[FakeExecutor]) -> None:
        running = [submit(fleet, "m", [float(n)]) for n in range(2)]
        await asyncio.sleep(0.001)
        waiting = [submit(fleet, "m", [float(n)]) for n in range(4)]
        with pytest.raises(QueueFullError, match="4 of 4 places"):
            submit(fleet, "m", [9.0])
        with pytest.raises(QueueFullError, match="4 of 4 places"):
            fleet.check_room("m", 1)
        await asyncio.gather(*running, *waiting)

    run_scenario(scenario, STEPS, STEPS, policy=greedy(1), limits=Limits(4))


def test_samples_between_two_stages_start_again_on_another_device() -> None:
    staged = replace(STEPS, stage_service_times=tuple((t / 2, t / 2) for t in STEPS.service_times))

    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        def first_stage(inputs: list[Any]) -> list[Any]:
            lose(executors[0])
            return [x + 1000.0 for x in inputs]

        for dispatcher in fleet.dispatchers:
            dispatcher.policies.set("m", choose("lazy:slo_ms=100", staged))
        calls = [submit(fleet, "m", [7.0])]
        await asyncio.sleep(0.001)
        calls += [submit(fleet, "m", [float(n)]) for n in range(3)]
        executors[0].fault = first_stage
        assert [float((await call)[0].output) for call in calls] == [7.0, 0.0, 1.0, 2.0]
        assert not fleet.serves(fleet.dispatchers[0])

    run_scenario(scenario, staged, staged)


def test_a_retired_device_is_resumed_when_all_others_are_lost() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        fleet.set_serving(0, False)
        lose(executors[1])
        answers = await asyncio.gather(*(submit(fleet, "m", [float(n)]) for n in range(20)))
        assert [answer[0].device for answer in answers] == ["device 0"] * 20
        assert [float(answer[0].output) for answer in answers] == list(range(20))
        assert not fleet.broken.is_set()
        assert fleet.ready
        assert fleet.alive
        assert fleet.serves(fleet.dispatchers[0])
        lose(executors[0])
        with pytest.raises(UnavailableError):
            await submit(fleet, "m", [0.0])
        assert fleet.broken.is_set()

    run_scenario(scenario, STEPS, SLOW)


def test_a_retired_device_serves_the_calls_of_a_lost_one_during_a_drain() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        fleet.set_serving(0, False)
        calls = [submit(fleet, "m", [float(n)]) for n in range(20)]
        lose(executors[1])
        await fleet.drain()
        assert [float((await call)[0].output) for call in calls] == list(range(20))
        assert not fleet.ready

    run_scenario(scenario, STEPS, SLOW)


def test_a_lost_device_counts_against_a_call_only_while_it_serves_it() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        for executor in executors[:3]:
            lose(executor)
        fleet.set_serving(3, False)
        served = submit(fleet, "m", [1.0])  # every device that runs it is lost
        with pytest.raises(UnavailableError):
            await served
        await asyncio.sleep(1.0)
        assert sum(dispatcher.broken.is_set() for dispatcher in fleet.dispatchers) == 2, (
            "it is not run on a third device"
        )
        running = submit(fleet, "m", [2.0] * 8)
        waiting = submit(fleet, "m", [3.0] * 8)  # queued behind it
        answers = await asyncio.gather(running, waiting)
        assert [call.losses for call in seen] == [2, 1, 0]
        assert {answer.device for answer in answers[1]} == {"device 3"}

    seen: list[InferenceCall] = []

    def record_calls(dispatcher: Dispatcher) -> None:
        enqueue = dispatcher.enqueue

        def record(call: InferenceCall) -> None:
            if call not in seen:
                seen.append(call)
            enqueue(call)

        dispatcher.enqueue = record  # type: ignore[method-assign]

    async def recorded(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        for dispatcher in fleet.dispatchers:
            record_calls(dispatcher)
        await scenario(fleet, executors)

    run_scenario(recorded, STEPS, STEPS, STEPS, STEPS)


def test_waiting_requests_are_counted_over_all_devices() -> None:
    async def scenario(fleet: Fleet, _: list[FakeExecutor]) -> None:
        calls = [submit(fleet, "m", [0.0] * 5) for _ in range(4)]
        assert fleet.waiting == fleet.queue_length("m") == 20
        await asyncio.sleep(0.001)
        assert fleet.waiting == fleet.queue_length("m") == 4, "eight are in service on each"
        await asyncio.gather(*calls)
        assert fleet.waiting == 0

    run_scenario(scenario, STEPS, STEPS)


def run_two_models(scenario: Callable[[Fleet, list[FakeExecutor]], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario against a device with models a and b, and one with b alone."""
    loop = virtual_loop()
    executors = [FakeExecutor(STEPS), FakeExecutor(STEPS)]
    choice = chosen(greedy(8))["m"]
    devices: list[dict[str, ModelPolicy]] = [{"a": choice, "b": choice}, {"b": choice}]
    for index, executor in enumerate(executors):
        executor.name = f"device {index}"

    async def main() -> None:
        metrics = Metrics()
        fleet = Fleet(
            [
                Dispatcher(executor, models, metrics, loop.time, UNLIMITED)
                for executor, models in zip(executors, devices, strict=True)
            ]
        )
        task = asyncio.ensure_future(fleet.run())
        try:
            await scenario(fleet, executors)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_call_goes_only_to_devices_that_have_its_model() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        calls = [submit(fleet, "a", [1.0]) for _ in range(6)] + [submit(fleet, "b", [2.0])]
        devices = [answers[0].device for answers in await asyncio.gather(*calls)]
        assert devices == ["device 0"] * 6 + ["device 1"]
        assert fleet.capacity("b") == pytest.approx(2 * fleet.capacity("a"))
        assert [len(fleet.devices_of(model)) for model in fleet.models] == [1, 2]
        with pytest.raises(BadInputError, match="device 0 is the last device that serves a; resume"):
            fleet.set_serving(0, False)
        fleet.set_serving(1, False)
        assert fleet.first_of("b").device == "device 0"

    run_two_models(scenario)


def test_when_the_only_device_of_a_model_is_lost_the_other_models_are_served() -> None:
    async def scenario(fleet: Fleet, executors: list[FakeExecutor]) -> None:
        fleet.set_serving(1, False)
        lose(executors[0])
        lost, moved = submit(fleet, "a", [1.0]), submit(fleet, "b", [2.0])
        with pytest.raises(UnavailableError):
            await lost
        assert (await moved)[0].device == "device 1", "the retired device is resumed"
        assert not fleet.broken.is_set()
        assert (fleet.is_ready("a"), fleet.is_ready("b"), fleet.ready) == (False, True, True)
        with pytest.raises(UnavailableError, match="no device of a works"):
            fleet.check_room("a", 1)
        assert (await submit(fleet, "b", [3.0]))[0].device == "device 1"

    run_two_models(scenario)
