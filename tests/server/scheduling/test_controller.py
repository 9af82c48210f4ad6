"""The controller with a device that changes, on a virtual clock: drift, objectives, reduced batch sizes."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf
from typing import Any

import numpy as np
import pytest

from policies.adaptation.objective import FIRST_MARGIN, AgeMargin
from policies.catalog import ModelPolicy, choose, solved_again
from policies.profile import Profile, load_profile
from policies.queue.arrivals import poisson
from policies.rules import smdp_bins
from policies.rules.control_limit import greedy
from policies.rules.smdp_bins import SmdpBins
from policies.types import SpecError
from server.backends.executor import Batch, Completion
from server.energy.meters import CountingMeter, EnergyMeter
from server.errors import OutOfMemoryError
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.levels import Levels
from server.telemetry.metrics import Metrics
from tests.support.fakes import UNLIMITED, FakeExecutor, chosen, run_scenario, submit
from tests.support.virtual_clock import virtual_loop

P4 = load_profile("googlenet-tesla-p4-x10")
AGES = "smdp:slo_p95_ms=60"
SLOWER = replace(
    P4,
    service_times=tuple(1.5 * t for t in P4.service_times),
    energies=tuple(1.5 * e for e in P4.energies or ()),
)


@pytest.fixture(autouse=True)
def loads_of_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve tables for the loads of these tests and the largest one, instead of 49."""
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.3, 0.5, 0.6, 0.98])
    monkeypatch.setattr("policies.objectives.solving._STEP", 3.0)
    monkeypatch.setattr(smdp_bins, "_LOADS", (0.1,))


class Inline(Executor):
    """Runs each job at once, in the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (as a pool does)
            done.set_exception(error)
        return done


class ChangingExecutor(FakeExecutor):
    """Serves by one profile, then by another, and counts the energy of the batches."""

    def __init__(self, before: Profile, after: Profile, at: float) -> None:
        super().__init__(before)
        self.meter = CountingMeter()
        self.assumed = P4
        self._after, self._at = after, at

    def slow_down(self) -> None:
        """Serve by the second profile from now on."""
        self._at = asyncio.get_running_loop().time()

    async def run_to_end(self, batch: Batch) -> Completion:
        if asyncio.get_running_loop().time() >= self._at:
            self._profile = self._after
        self.meter.add(self._profile.energy(len(batch.inputs)) or 0.0)
        return await super().run_to_end(batch)


LINES = Profile("lines", (0.05, 0.06), lengths=(1, 1000), length_service_times=((0.001, 1.0), (0.0011, 1.1)))
SLOWER_LINES = replace(LINES, length_service_times=((0.0005, 0.5), (0.001, 1.0)))


class PaddingExecutor(ChangingExecutor):
    """Serves a batch in the time of its longest input by profiles with lengths; the inputs are lengths."""

    def __init__(self, before: Profile, after: Profile, at: float) -> None:
        super().__init__(before, after, at)
        self.assumed = LINES

    async def serve(self, batch: Batch) -> Completion:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(self._profile.service_time(len(batch.inputs), max(batch.inputs)))
        return Completion(list(batch.inputs), start, loop.time())


@dataclass(frozen=True)
class Seen:
    """Policy and metrics after a run."""

    chosen: ModelPolicy
    metrics: str
    responses: list[float]

    def changes(self, reason: str) -> float:
        line = f'batchwright_policy_changes_total{{model="m",reason="{reason}"}} '
        return float(next((rest for rest in self.metrics.split("\n") if rest.startswith(line)), f"{line}0").split()[-1])


def begun(spec: str, executor: ChangingExecutor) -> ModelPolicy:
    return choose(spec, executor.assumed, margin_share=FIRST_MARGIN)


def serve(
    executor: ChangingExecutor,
    spec: str,
    rate: float,
    swap: str | None = None,
    meter: EnergyMeter | None = None,
    overhead: float = 0.0,
    duration: float = 30.0,
    lengths: Sequence[float] = (),
) -> Seen:
    """Serve Poisson arrivals with a controller.

    Args:
        executor: the device.
        spec: the policy.
        rate: 1/s.
        swap: a policy that an operator sets after 5 s.
        meter: energy counter; None: that of the device.
        overhead: time that HTTP adds to each response, s.
        duration: s.
        lengths: of the requests, which are repeated; empty where they do not differ.
    """
    loop = virtual_loop()
    instants = poisson(rate, duration, np.random.default_rng(3)).tolist()
    responses: list[float] = []

    async def main() -> Seen:
        metrics = Metrics()
        dispatcher = Dispatcher(executor, {"m": begun(spec, executor)}, metrics, loop.time, UNLIMITED)
        controller = Controller(dispatcher, metrics, meter or executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.policies.on_batch_size_reduced = (
            controller.served,
            controller.batch_size_reduced,
        )
        task = asyncio.ensure_future(dispatcher.run())
        answers = []

        async def call(number: int) -> None:
            began = loop.time()
            length = lengths[number % len(lengths)] if lengths else 0.0
            await submit(dispatcher, "m", [length], lengths=[length] if lengths else ())
            await asyncio.sleep(overhead)
            response = loop.time() - began
            responses.append(response)
            metrics.call_completed("m", dispatcher.device, response, 1, response)

        for number, instant in enumerate(instants):
            await asyncio.sleep(instant - loop.time())
            if swap is not None and instant > 5.0 and dispatcher.chosen["m"].spec != swap:
                dispatcher.policies.set("m", begun(swap, executor))
            answers.append(asyncio.ensure_future(call(number)))
            await asyncio.sleep(0)
        await dispatcher.drain()
        await asyncio.gather(*answers)
        task.cancel()
        return Seen(dispatcher.chosen["m"], metrics.render().decode(), responses)

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_policy_is_solved_again_for_a_device_that_slows_down(load: float) -> None:
    seen = serve(ChangingExecutor(P4, SLOWER, 10.0), "smdp:w2=16", load * P4.capacity)
    assert seen.changes("drift") >= 1
    assert seen.chosen.profile.service_times == pytest.approx(SLOWER.service_times, rel=0.02)
    assert seen.chosen.profile.energies == pytest.approx(SLOWER.energies, rel=0.05)
    assert seen.chosen.table is not None
    assert seen.chosen.table.rows[-1].arrival_rate == pytest.approx(0.98 * SLOWER.capacity, rel=0.02)
    assert seen.chosen.spec == "smdp:w2=16"


def test_the_policy_stays_for_a_device_that_does_not_change() -> None:
    seen = serve(ChangingExecutor(P4, P4, inf), "smdp:w2=16", 0.5 * P4.capacity, duration=20.0)
    assert seen.changes("drift") == 0
    assert seen.chosen.profile is P4


def test_a_policy_set_by_an_operator_is_adapted_to_the_device() -> None:
    seen = serve(
        ChangingExecutor(P4, SLOWER, 6.0), "smdp:w2=16", 0.3 * P4.capacity, swap="rate-matching", duration=20.0
    )
    assert seen.chosen.name == "rate-matching"
    assert seen.changes("drift") >= 1
    assert seen.chosen.profile.service_times == pytest.approx(SLOWER.service_times, rel=0.02)


def test_a_missed_objective_reduces_the_weight_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1, 0.3])
    # the bound is met by the profile; the device takes 1.5 times as long, so that it needs a faster policy
    bound, rate = 90.0, 0.3 * P4.capacity
    seen = serve(ChangingExecutor(SLOWER, SLOWER, 0.0), f"smdp:slo_p95_ms={bound:g},policy_form=batch-size", rate)
    assert seen.changes("drift") >= 1
    assert seen.changes("objective") >= 1
    before, after = choose(f"smdp:slo_p95_ms={bound:g},policy_form=batch-size", P4).table, seen.chosen.table
    assert before is not None
    assert after is not None
    assert after.rows[1].w2 < before.rows[1].w2, "at load 0.3"


def at_most(size: int) -> Callable[[list[Any]], list[Any]]:
    """A fault: larger batches run out of memory."""

    def fault(outputs: list[Any]) -> list[Any]:
        if len(outputs) > size:
            raise OutOfMemoryError
        return outputs

    return fault


@pytest.mark.slow
def test_maximum_ages_are_solved_for_a_smaller_bound_until_the_percentile_is_kept_over_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.5])
    few = P4.truncated(8)
    bound, overhead, rate = 60.0, 0.005, 0.5 * few.capacity
    executor = ChangingExecutor(few, few, inf)
    executor.assumed = few
    seen = serve(executor, f"smdp:slo_p95_ms={bound:g}", rate, overhead=overhead, duration=60.0)
    assert 1 <= seen.changes("objective") <= 15
    assert seen.chosen.margin == pytest.approx(overhead, abs=0.003)
    assert f'batchwright_objective_margin_seconds{{device="fake",model="m"}} {seen.chosen.margin}' in seen.metrics
    late = np.mean(np.array(seen.responses[2000:]) > bound / 1e3)
    assert 0.02 < late < 0.07, "5 per cent may be late"


@pytest.mark.parametrize(("spec", "swap", "duration"), [(AGES, None, 0.5), ("greedy", AGES, 5.5)])
def test_a_policy_with_a_percentile_begins_with_that_of_half_of_its_bound(
    monkeypatch: pytest.MonkeyPatch, spec: str, swap: str | None, duration: float
) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    few = P4.truncated(8)
    executor = ChangingExecutor(few, few, inf)
    executor.assumed = few
    seen = serve(executor, spec, 0.1 * few.capacity, swap=swap, duration=duration)
    assert seen.changes("objective") == 0
    assert seen.chosen.margin == pytest.approx(seen.chosen.slo / 2)


def test_a_policy_that_is_set_again_for_the_same_model_begins_with_the_margin_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    few, other, asked = P4.truncated(8), SLOWER.truncated(8), list[float | None]()
    executor = FakeExecutor(few)

    def spied(
        chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None
    ) -> ModelPolicy:
        asked.append(arrival_rate)
        return solved_again(chosen, profile, factor, margin, arrival_rate)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[float]:
        controller = Controller(dispatcher, Metrics(), CountingMeter(), Inline(), spied)
        monkeypatch.setattr(dispatcher.queue, "arrival_rate", lambda model: 50.0)
        seen = list[float]()
        for profile, spec, answers in ((few, AGES, 200), (few, "greedy", 1), (few, AGES, 1), (other, AGES, 1)):
            dispatcher.policies.set("m", choose(spec, profile, margin_share=FIRST_MARGIN))
            for _answer in range(answers):
                controller.served("m", 1, few.service_time(1))
                controller.answered("m", 0.02, 1)
                await asyncio.sleep(0.001)
            seen.append(dispatcher.chosen["m"].margin)
        return seen

    first, greedy, again, of_other = run_scenario(scenario, {"m": choose("greedy", few)}, executor)
    assert 0.0 < first < 0.03
    assert (greedy, again) == (0.0, first)
    assert of_other == choose(AGES, other, margin_share=FIRST_MARGIN).margin, "another model was loaded"
    assert len(asked) > 1
    assert asked == [pytest.approx(50.0)] * len(asked), "the rate is known also after the policy was set again"


@pytest.mark.parametrize("pause", [0.0, 1000.0])
def test_maximum_ages_are_solved_for_the_rate_that_arrives(monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    few = P4.truncated(8)
    executor = FakeExecutor(few)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[bool]:
        controller = Controller(dispatcher, Metrics(), CountingMeter(), Inline())
        dispatcher.policies.set("m", solved_again(choose(AGES, few), few, margin=0.03, arrival_rate=1.0))
        noisy = cycle([0.1, 0.7, 0.7])  # of the capacity; the first one is solved
        monkeypatch.setattr(dispatcher.queue, "arrival_rate", lambda model: next(noisy) * few.capacity)
        controller.served("m", 1, few.service_time(1))
        await asyncio.sleep(pause)
        controller.served("m", 1, few.service_time(1))
        unsolved = []
        for _second in range(12):
            await asyncio.sleep(1.0)
            controller.served("m", 1, few.service_time(1))
            unsolved.append(dispatcher.chosen["m"].unsolved_rate(0.5 * few.capacity))
        return unsolved

    seen = run_scenario(scenario, {"m": choose("greedy", few)}, executor)
    assert seen[0]
    assert not seen[-1], "its mean is known, although it is noisy"


def test_maximum_ages_are_solved_at_all_loads_when_the_sizes_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    asked, executor = list[tuple[int, float | None]](), FakeExecutor(LINES)

    def spied(
        chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None
    ) -> ModelPolicy:
        asked.append((len(chosen.solved_sizes), arrival_rate))
        return solved_again(chosen, profile, factor, margin, arrival_rate)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> ModelPolicy:
        controller = Controller(dispatcher, Metrics(), CountingMeter(), Inline(), spied)
        for n in range(256):
            dispatcher.chosen["m"].arriving("m", 0.1 + 0.001 * n)
        controller.served("m", 1, 0.2, 200.0)
        await asyncio.sleep(0.1)
        return dispatcher.chosen["m"]

    before = choose("smdp:slo_p95_ms=2500", LINES, margin_share=FIRST_MARGIN)
    after = run_scenario(scenario, {"m": before}, executor)
    assert asked == [(256, None)]
    assert before.table is not None
    assert after.table is not None
    assert after.table.rows != before.table.rows


def test_a_failed_solution_for_a_rate_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    few, asked = P4.truncated(8), list[float | None]()
    executor = FakeExecutor(few)

    def fails(
        chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None
    ) -> ModelPolicy:
        asked.append(arrival_rate)
        raise SpecError("it cannot be solved")

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        controller = Controller(dispatcher, Metrics(), CountingMeter(), Inline(), fails)
        dispatcher.policies.set("m", solved_again(choose(AGES, few), few, margin=0.03, arrival_rate=1.0))
        monkeypatch.setattr(dispatcher.queue, "arrival_rate", lambda model: 0.5 * few.capacity)
        for _second in range(60):
            controller.served("m", 1, few.service_time(1))
            await asyncio.sleep(1.0)

    run_scenario(scenario, {"m": choose("greedy", few)}, executor)
    assert asked == [pytest.approx(0.5 * few.capacity)]


@pytest.mark.slow
def test_without_overhead_maximum_ages_become_nearly_as_solved_for_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.5])
    few = P4.truncated(8)
    executor = ChangingExecutor(few, few, inf)
    executor.assumed = few
    seen = serve(executor, AGES, 0.5 * few.capacity)
    assert seen.chosen.margin < 0.004


@pytest.mark.parametrize(("share_of_fixed_energy", "shrinks"), [(0.0, False), (1.0, True)])
def test_a_margin_shrinks_only_where_larger_batches_save(
    monkeypatch: pytest.MonkeyPatch, share_of_fixed_energy: float, shrinks: bool
) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.5])
    few = P4.truncated(4)
    energies = tuple(0.02 * b + 0.02 * share_of_fixed_energy for b in range(1, 5))
    few = replace(few, energies=energies)
    executor = ChangingExecutor(few, few, inf)
    executor.assumed = few
    seen = serve(executor, AGES, 0.5 * few.capacity)
    assert (seen.chosen.margin < seen.chosen.slo / 2) == shrinks
    assert (seen.changes("objective") > 0) == shrinks


def test_a_margin_does_not_shrink_while_the_rows_in_use_are_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.1])
    few = P4.truncated(8)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> list[float]:
        controller = Controller(dispatcher, Metrics(), CountingMeter(), Inline())
        dispatcher.policies.set("m", solved_again(choose(AGES, few), few, margin=0.03, arrival_rate=1.0))
        seen = []
        for load in (0.5, 0.01):
            monkeypatch.setattr(dispatcher.queue, "arrival_rate", lambda model, load=load: load * few.capacity)
            for _answer in range(200):
                controller.served("m", 1, few.service_time(1))
                controller.answered("m", 0.02, 1)
                await asyncio.sleep(0.001)
            seen.append(dispatcher.chosen["m"].margin)
        return seen

    unsolved, solved = run_scenario(scenario, {"m": choose("greedy", few)}, FakeExecutor(few))
    assert unsolved == 0.03
    assert solved < 0.03


@pytest.mark.parametrize("adapted", [False, True])
def test_a_margin_is_kept_when_an_operator_sets_the_policy_and_when_the_memory_is_too_small(
    monkeypatch: pytest.MonkeyPatch, adapted: bool
) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.5])
    few = P4.truncated(8)
    executor = ChangingExecutor(few, few, inf)
    executor.assumed = few
    solved = replace(choose(AGES, few), margin=0.012)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> ModelPolicy:
        controller = Controller(dispatcher, Metrics(), executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.policies.on_batch_size_reduced = (
            controller.served,
            controller.batch_size_reduced,
        )
        dispatcher.policies.set("m", solved)
        if adapted:
            await submit(dispatcher, "m", [0.0])
        controller._monitored["m"].margins[0.5, 0.9] = AgeMargin(0.5, 0.9, 0.1)  # of another bound
        executor.fault = at_most(4)
        await submit(dispatcher, "m", [float(n) for n in range(8)])
        await asyncio.sleep(1.0)
        monitored = controller._state("m")
        assert isinstance(monitored.objective, AgeMargin)
        assert monitored.objective.margin == 0.012
        assert (0.5, 0.9) in monitored.margins
        return dispatcher.chosen["m"]

    chosen = run_scenario(scenario, {"m": choose("greedy", few)}, executor)
    assert (chosen.spec, chosen.profile.max_batch_size) == (AGES, 4)
    assert chosen.margin == pytest.approx(0.012)


@pytest.mark.parametrize("slower", [P4, SLOWER])
def test_after_out_of_memory_the_policy_is_solved_again_and_drift_is_still_detected(slower: Profile) -> None:
    executor = ChangingExecutor(P4, slower, 10.0)
    executor.fault = at_most(12)
    seen = serve(executor, "smdp:w2=16", 0.6 * P4.capacity, duration=20.0)
    assert seen.changes("memory") >= 1
    assert (seen.changes("drift") >= 1) == (slower is SLOWER)
    assert seen.chosen.spec == "smdp:w2=16"
    assert seen.chosen.table is not None
    assert max(max(row.batch_size) for row in seen.chosen.table.rows) == seen.chosen.profile.max_batch_size <= 12
    assert max(len(entry[2]) for entry in executor.log[-50:]) <= 12


def test_greedy_service_stays_if_the_policy_needs_larger_batches_than_fit() -> None:
    executor = ChangingExecutor(P4, P4, inf)
    executor.fault = at_most(12)
    seen = serve(executor, "static:16", 0.3 * P4.capacity, duration=10.0)
    assert seen.chosen.spec == "greedy"
    assert seen.chosen.profile.max_batch_size == 8
    assert 'batchwright_policy_info{device="fake",model="m",policy="greedy",spec="greedy"} 1.0' in seen.metrics


def test_a_policy_set_since_the_last_batch_is_the_one_solved_for_the_reduced_batch_size() -> None:
    executor = ChangingExecutor(P4, P4, inf)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        controller = Controller(dispatcher, Metrics(), executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.policies.on_batch_size_reduced = (
            controller.served,
            controller.batch_size_reduced,
        )
        await submit(dispatcher, "m", [0.0])
        dispatcher.policies.set("m", choose("timeout:1", P4))
        executor.fault = at_most(12)
        await submit(dispatcher, "m", [float(n) for n in range(20)])
        await asyncio.sleep(1.0)
        assert dispatcher.chosen["m"].spec == "timeout:1"
        assert dispatcher.chosen["m"].profile.max_batch_size == 10

    run_scenario(scenario, {"m": choose("timeout:7", P4)}, executor)


class Board:
    """Energy counter of a board: the batches' energy above idle, and the idle power all the time."""

    source, resolution, scope, about = "nvml", 0.1, "board", "synthetic"

    def __init__(self, batches: CountingMeter, idle: float) -> None:
        self._batches, self._idle = batches, idle

    def read(self) -> float | None:
        now = asyncio.get_running_loop().time()
        return (self._batches.read() or 0.0) + self._idle * now


class BrokenMeter(Board):
    def read(self) -> float | None:
        raise RuntimeError("gone")


@pytest.mark.parametrize("idle", [None, 45.0])
def test_idle_power_is_no_drift(idle: float | None) -> None:
    executor = ChangingExecutor(P4, P4, inf)
    executor.assumed = replace(P4, idle_power=idle)
    seen = serve(executor, "smdp:w2=16", 0.3 * P4.capacity, meter=Board(executor.meter, 45.0), duration=20.0)
    assert seen.changes("drift") == 0


def test_a_failing_sensor_is_logged_once_and_drift_of_service_times_is_still_detected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = ChangingExecutor(P4, SLOWER, 6.0)
    executor.assumed = replace(P4, idle_power=0.0)
    seen = serve(executor, "smdp:w2=16", 0.3 * P4.capacity, meter=BrokenMeter(executor.meter, 0.0), duration=20.0)
    assert seen.changes("drift") >= 1
    assert seen.chosen.profile.energies == P4.energies
    assert [record.message for record in caplog.records].count(
        "the energy counter cannot be read; it is not read again"
    ) == 1


def poisoned(outputs: list[Any]) -> list[Any]:
    if any(output < 0 for output in outputs):
        raise ValueError("a poisoned sample")
    return outputs


def test_recovered_batches_are_no_drift_of_energies() -> None:
    executor = ChangingExecutor(P4, P4, inf)
    executor.fault = poisoned
    loop = virtual_loop()
    instants = poisson(0.6 * P4.capacity, 20.0, np.random.default_rng(3)).tolist()

    async def main() -> tuple[Seen, float]:
        metrics = Metrics()
        dispatcher = Dispatcher(executor, {"m": choose("smdp:w2=16", P4)}, metrics, loop.time, UNLIMITED)
        controller = Controller(dispatcher, metrics, executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.accounting.on_unprofiled_work = (
            controller.served,
            controller.unprofiled_work,
        )
        task, answers = asyncio.ensure_future(dispatcher.run()), []
        for index, instant in enumerate(instants):
            await asyncio.sleep(instant - loop.time())
            answers.append(submit(dispatcher, "m", [-1.0 if index % 100 == 0 else 1.0]))  # in about one batch of ten
        await dispatcher.drain()
        results = await asyncio.gather(*answers, return_exceptions=True)
        task.cancel()
        assert sum(isinstance(result, Exception) for result in results) == len(instants[::100])
        predicted = sum(
            float(line.split()[-1])
            for line in metrics.render().decode().splitlines()
            if line.startswith("batchwright_energy_joules_total")
        )
        return Seen(dispatcher.chosen["m"], metrics.render().decode(), []), (executor.meter.read() or 0.0) / predicted

    try:
        seen, ratio = loop.run_until_complete(main())
    finally:
        loop.close()
    assert ratio > 1.05, "the failed attempts took energy, too, so the counter is above the profile's energies"
    assert seen.changes("drift") == 0
    assert seen.chosen.profile is P4


def test_recovered_batches_are_reported() -> None:
    executor = ChangingExecutor(P4, P4, inf)
    executor.fault = poisoned
    reported: list[int] = []

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        dispatcher.accounting.on_served = lambda model, size, *_: reported.append(size)
        await asyncio.gather(*(submit(dispatcher, "m", [x]) for x in (1.0, 1.0, -1.0, 1.0)), return_exceptions=True)
        await asyncio.sleep(1.0)

    run_scenario(scenario, {"m": choose("static:4", P4)}, executor)
    assert reported == [2, 1], "the halves that succeeded, each with its own size"


def test_a_reading_is_discarded_if_a_batch_failed_meanwhile() -> None:
    executor = ChangingExecutor(P4, P4, inf)
    reading: Future[float] = Future()

    class Pending(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
            return reading

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        controller = Controller(dispatcher, Metrics(), executor.meter, Pending())
        drift = controller._monitored["m"].drift
        await asyncio.sleep(1.0)
        controller.served("m", 1, P4.service_times[0])
        controller.unprofiled_work("m")
        reading.set_result(5.0)
        await asyncio.sleep(0.1)
        assert drift._reading is None

    run_scenario(scenario, {"m": choose("greedy", P4)}, executor)


def test_larger_batches_are_tried_again_with_exponential_backoff(caplog: pytest.LogCaptureFixture) -> None:
    executor = ChangingExecutor(P4, SLOWER, inf)
    largest, tried = [12], list[tuple[float, int]]()

    def fault(outputs: list[Any]) -> list[Any]:
        if len(outputs) > largest[0]:
            tried.append((asyncio.get_running_loop().time(), len(outputs)))
            raise OutOfMemoryError
        return outputs

    executor.fault = fault

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        loop = asyncio.get_running_loop()
        controller = Controller(dispatcher, Metrics(), executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.policies.on_batch_size_reduced = (
            controller.served,
            controller.batch_size_reduced,
        )

        async def burst() -> int:
            answers = await submit(dispatcher, "m", [1.0] * 64)
            assert len(answers) == 64
            return max(answer.batch_size for answer in answers)

        while loop.time() < 4000.0:
            await burst()
            await asyncio.sleep(10.0 if loop.time() < 2200.0 else 100.0)
        times = [at for at, _ in tried if at > 1.0]
        assert times == pytest.approx([300.0, 900.0, 2100.0], abs=25.0), (
            "300 s after the first failure, then 600 and 1200"
        )
        largest[0], size = 100, 0
        while loop.time() < 8000.0:
            size = await burst()
            await asyncio.sleep(100.0)
        assert size == 32, "all sizes fit again"
        assert dispatcher.chosen["m"].profile.max_batch_size == 32
        assert dispatcher.chosen["m"].spec == "smdp:w2=0"
        executor.slow_down()
        while loop.time() < 9000.0:
            await burst()
            await asyncio.sleep(10.0)
        assert dispatcher.chosen["m"].profile.service_times == pytest.approx(SLOWER.service_times, rel=0.1), "drift"
        await asyncio.sleep(4000.0)  # longer than the next retry, which has nothing left to try
        assert not controller._reduced
        largest[0] = 12
        await burst()
        assert controller._reduced["m"].wait == 300.0, "the backoff starts again"
        controller.served("m", 32, 1.0)  # launched before the maximum was reduced
        assert "the controller failed" not in caplog.text

    run_scenario(scenario, {"m": choose("smdp:w2=0", P4)}, executor)


def test_larger_batches_of_a_model_that_was_replaced_are_not_tried() -> None:
    executor = ChangingExecutor(P4, P4, inf)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        controller = Controller(dispatcher, Metrics(), executor.meter, Inline())
        dispatcher.accounting.on_served, dispatcher.policies.on_batch_size_reduced = (
            controller.served,
            controller.batch_size_reduced,
        )
        executor.fault = at_most(12)
        await submit(dispatcher, "m", [1.0] * 20)
        await asyncio.sleep(1.0)
        small = choose("smdp:w2=0", P4.truncated(4))
        dispatcher.policies.switch("m", "m#2", small)
        await asyncio.sleep(1000.0)
        assert dispatcher.chosen["m"].profile is small.profile
        assert not controller._reduced

    run_scenario(scenario, {"m": choose("smdp:w2=0", P4)}, executor)


def test_a_policy_set_while_another_one_is_solved_stays() -> None:
    executor = ChangingExecutor(P4, P4, inf)
    solving = OnDemand()

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        controller = Controller(dispatcher, Metrics(), executor.meter, solving)
        dispatcher.policies.on_batch_size_reduced = controller.batch_size_reduced
        executor.fault = at_most(12)
        await submit(dispatcher, "m", [1.0] * 20)
        assert len(solving.jobs) == 1
        dispatcher.policies.set("m", choose("timeout:1", dispatcher.chosen["m"].profile))
        solving.run()
        await asyncio.sleep(1.0)
        assert dispatcher.chosen["m"].spec == "timeout:1"

    run_scenario(scenario, {"m": choose("smdp:w2=0", P4)}, executor)


class OnDemand(Inline):
    """Runs its jobs when `run` is called."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.jobs.append((Future(), lambda: fn(*args, **kwargs)))
        return self.jobs[-1][0]

    def run(self) -> None:
        for future, job in self.jobs:
            future.set_result(job())


def test_batches_that_a_standby_launch_follows_count_with_the_time_to_it() -> None:
    times: list[float] = []

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        executor.handover = 0.002
        dispatcher.accounting.on_served = lambda model, size, seconds, *_: times.append(seconds)
        await asyncio.gather(*(submit(dispatcher, "m", [float(n)]) for n in range(3)))
        await asyncio.sleep(0.1)

    run_scenario(scenario, chosen(greedy(1)))
    assert times == pytest.approx([0.013, 0.013, 0.011])


def test_bins_are_decided_together_once_sizes_are_known() -> None:
    lengths = np.random.default_rng(0).uniform(10, 50, 600).tolist()
    seen = serve(PaddingExecutor(LINES, LINES, inf), "smdp-bins:2", 20.0, lengths=lengths)
    assert seen.changes("sizes") == 1
    assert len(seen.chosen.solved_sizes) >= 256
    assert isinstance(getattr(seen.chosen.policy, "inner", None), SmdpBins)


def test_the_bins_are_solved_again_when_the_sizes_change() -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.uniform(10, 50, 300).tolist(), *rng.uniform(50, 200, 2000).tolist()]
    seen = serve(PaddingExecutor(LINES, LINES, inf), "smdp-bins:2", 25.0, lengths=lengths, duration=60.0)
    assert seen.changes("sizes") >= 2
    assert np.mean(seen.chosen.solved_sizes) > 0.06


def test_the_cost_of_padded_batches_is_learned_and_their_sizes_follow() -> None:
    lengths = np.random.default_rng(0).uniform(10, 200, 1000).tolist()
    executor = PaddingExecutor(SLOWER_LINES, SLOWER_LINES, inf)
    seen = serve(executor, "multi-bin:2,inner=greedy", 8.0, lengths=lengths, duration=60.0)
    assert seen.changes("drift") >= 1
    for length in (100, 200):
        truth = SLOWER_LINES.service_time(2, length)
        assert seen.chosen.profile.service_time(2, length) == pytest.approx(truth, rel=0.25)
    assert seen.chosen.bins is not None
    assert 0.02 < seen.chosen.bins.edges[0] < 0.08, "in the times of the learned profile, half of those at the start"


def test_sizes_are_solved_for_although_only_single_stages_run() -> None:
    loop = virtual_loop()
    executor, metrics = ChangingExecutor(P4, P4, inf), Metrics()

    async def main() -> ModelPolicy:
        chosen = {"m": choose("smdp-bins:2", P4.truncated(2))}
        dispatcher = Dispatcher(executor, chosen, metrics, loop.time, UNLIMITED)
        controller = Controller(dispatcher, metrics, executor.meter, Inline())
        for n in range(256):
            chosen["m"].arriving("m", 0.01 + 0.0001 * n)
        controller.unprofiled_work("m")
        await asyncio.sleep(0.1)
        return dispatcher.chosen["m"]

    try:
        assert len(loop.run_until_complete(main()).solved_sizes) == 256
    finally:
        loop.close()


def test_a_failed_solution_leaves_the_policy_and_does_not_fix_the_sizes() -> None:
    loop = virtual_loop()
    executor, metrics, asked = ChangingExecutor(P4, P4, inf), Metrics(), []

    def fails(
        chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None
    ) -> ModelPolicy:
        asked.append(len(chosen.solved_sizes))
        raise SpecError("it cannot be solved")

    async def main() -> ModelPolicy:
        chosen = {"m": choose("smdp-bins:2", P4.truncated(2))}
        dispatcher = Dispatcher(executor, chosen, metrics, loop.time, UNLIMITED)
        controller = Controller(dispatcher, metrics, executor.meter, Inline(), fails)
        for n in range(512):
            chosen["m"].arriving("m", 0.01 + 0.0001 * n)
            if n in (255, 511):
                controller.unprofiled_work("m")
                await asyncio.sleep(0.1)
        return dispatcher.chosen["m"]

    try:
        assert not loop.run_until_complete(main()).solved_sizes
        assert asked == [256, 512]
    finally:
        loop.close()


def test_a_solution_that_failed_is_tried_again() -> None:
    loop = virtual_loop()
    executor, metrics, asked = ChangingExecutor(P4, P4, inf), Metrics(), list[float]()

    def fails_once(
        chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None
    ) -> ModelPolicy:
        asked.append(loop.time())
        if len(asked) == 1:
            raise RuntimeError("the process that solves was killed")
        return replace(chosen, profile=profile)

    async def main() -> Profile:
        dispatcher = Dispatcher(executor, {"m": choose("smdp:w2=1", P4)}, metrics, loop.time, UNLIMITED)
        controller = Controller(dispatcher, metrics, executor.meter, Inline(), fails_once)
        for _ in range(300):
            controller.served("m", 1, 1.5 * P4.service_time(1))
            await asyncio.sleep(0.5)
        return dispatcher.chosen["m"].profile

    try:
        assert loop.run_until_complete(main()).service_time(1) == pytest.approx(1.5 * P4.service_time(1))
        assert len(asked) == 2
        assert asked[1] - asked[0] == pytest.approx(60.0)
    finally:
        loop.close()


def test_tables_for_levels_are_solved_once_their_shares_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.rules.by_level._LOADS", (0.5,))
    loop, small = virtual_loop(), P4.truncated(4)
    executor = ChangingExecutor(small, small, inf)
    chosen = choose("smdp", small, {"priority_weights": "8:1"})

    async def main() -> tuple[ModelPolicy, str]:
        metrics, levels = Metrics(), {"m": Levels(2)}
        dispatcher = Dispatcher(executor, {"m": chosen}, metrics, loop.time, UNLIMITED, levels=levels)
        controller = Controller(dispatcher, metrics, executor.meter, Inline())
        dispatcher.accounting.on_served = controller.served
        task = asyncio.ensure_future(dispatcher.run())
        answers = []
        for number in range(700):
            answers.append(submit(dispatcher, "m", [0.0], level=1 if number % 5 == 0 else 2))
            await asyncio.sleep(0.002)
        await asyncio.gather(*answers)
        task.cancel()
        return dispatcher.chosen["m"], metrics.render().decode()

    try:
        found, metrics = loop.run_until_complete(main())
    finally:
        loop.close()
    assert found.solved_shares[0] == pytest.approx(0.2, abs=0.01)
    assert 'batchwright_policy_changes_total{model="m",reason="levels"} 1.0' in metrics
