"""The policies of stage C of benchmarks/gpu.py on a fake device and a virtual clock."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from batchwright.analysis import simulate
from benchmarks.support import gpu_policies
from benchmarks.support.gpu_policies import LOADS, TIMEOUT, DeviceUnderTest, compare, joules, predicted
from policies.profile import Profile
from policies.results import SimulationResult
from policies.types import SpecError
from profiler.energy import Mean, RunningLoad, Steady
from tests.support.fakes import STEPS, FakeExecutor
from tests.support.virtual_clock import virtual_loop

IDLE, WATTS = 100.0, 160.0
PROFILE = replace(STEPS, model="m", idle_power=IDLE)
_T = TypeVar("_T")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = virtual_loop()
    yield loop
    loop.close()


def device(loop: asyncio.AbstractEventLoop, seconds: float = 4.0) -> DeviceUnderTest:
    """A device that always draws 160 W, measured for these seconds after one second."""

    async def measure_power(load: RunningLoad) -> Steady:
        await asyncio.sleep(1.0)
        before = load()
        await asyncio.sleep(seconds)
        after = load()
        rate = (after.batches - before.batches) / (after.time - before.time)
        return Steady(Mean(WATTS, 0.0), Mean(rate, 0.0), Mean(WATTS / rate, 0.0))

    return DeviceUnderTest(FakeExecutor(PROFILE), PROFILE, [1.0, 2.0], loop.time, measure_power, virtual_instants)


@contextmanager
def virtual_instants(instants: Sequence[float], elapsed: Callable[[], float]) -> Iterator[asyncio.Semaphore]:
    """As precise_instants, by the timers of a virtual loop."""
    due = asyncio.Semaphore(0)

    async def release() -> None:
        for instant in instants:
            await asyncio.sleep(max(0.0, instant - elapsed()))
            due.release()

    task = asyncio.get_running_loop().create_task(release())
    try:
        yield due
    finally:
        task.cancel()


def run(loop: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[_T]]) -> _T:
    async def all_of_it() -> _T:
        return await work()

    return loop.run_until_complete(all_of_it())


def test_joules_per_request_are_the_devices_energy_over_the_requests_answered(loop: asyncio.AbstractEventLoop) -> None:
    cell = run(loop, lambda: joules(device(loop, 10.0), "greedy", 200.0))
    # three standard deviations of 2000 Poisson arrivals, 45 each
    assert cell["answered_hz"] == pytest.approx(200.0, rel=0.07)
    assert cell["total_mj"] == pytest.approx(1e3 * WATTS / cell["answered_hz"])
    assert cell["marginal_mj"] == pytest.approx(1e3 * (WATTS - IDLE) / cell["answered_hz"])
    assert cell["refused"] == 0
    assert cell["load"] == pytest.approx(200.0 / PROFILE.capacity)
    assert 11.0 < cell["mean_ms"] < cell["p95_ms"] < 40.0


def test_a_waiting_policy_serves_larger_batches_with_longer_response_times(loop: asyncio.AbstractEventLoop) -> None:
    greedy, full = (run(loop, partial(joules, device(loop, 10.0), name, 200.0)) for name in ("greedy", "static:8"))
    assert full["mean_batch_size"] == pytest.approx(8.0, rel=0.01)  # the last batch may be smaller
    assert greedy["mean_batch_size"] < 5.0
    assert full["mean_ms"] > greedy["mean_ms"]


def test_no_task_is_left_running(loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(SpecError):
        run(loop, lambda: joules(device(loop), "nonsense", 10.0))
    run(loop, lambda: joules(device(loop), "greedy", 500.0))
    loop.run_until_complete(asyncio.sleep(0))  # cancelled tasks end
    assert asyncio.all_tasks(loop) == set()


def test_each_load_compares_greedy_with_both_objectives(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fewer(profile: Profile, spec: str, arrival_rate: float, requests: int) -> SimulationResult:
        return simulate(profile, spec, arrival_rate=arrival_rate, requests=requests // 5)

    monkeypatch.setattr(gpu_policies, "simulate", fewer)
    monkeypatch.setattr(gpu_policies, "LOADS", LOADS[1:2])
    monkeypatch.setattr("policies.solving.default_loads", lambda: list(LOADS[1:2]))
    cells: list[dict[str, Any]] = []
    run(loop, lambda: compare(device(loop), 1e9, cells.append))
    assert [cell["policy"].partition(":")[0] for cell in cells] == ["greedy", "timeout", "smdp", "smdp"]
    for greedy, timeout, tight, loose in zip(*(cells[first::4] for first in range(4)), strict=True):
        assert timeout["policy"] == TIMEOUT
        assert greedy["predicted_ms"] == pytest.approx(greedy["mean_ms"], rel=0.1)
        assert tight["slo_p95_ms"] == pytest.approx(1.5 * greedy["p95_ms"])
        assert loose["slo_p95_ms"] == pytest.approx(3.0 * greedy["p95_ms"])
        assert tight["kept"] is (tight["p95_ms"] <= tight["slo_p95_ms"])
        assert loose["mean_batch_size"] >= greedy["mean_batch_size"]
        assert loose["marginal_over_greedy"] == pytest.approx(loose["marginal_mj"] / greedy["marginal_mj"])


def test_no_cell_is_started_after_the_end_of_the_time(loop: asyncio.AbstractEventLoop) -> None:
    cells: list[dict[str, Any]] = []
    run(loop, lambda: compare(device(loop), 3.0, cells.append))  # the first cell ends after 5 s
    assert [cell["policy"] for cell in cells] == ["greedy"]


def test_a_cell_in_which_the_process_used_a_whole_processor_is_marked(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 9.6])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    wall = iter([0.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    cell = run(loop, lambda: joules(device(loop), "greedy", 200.0))
    assert (cell["processors"], cell["cpu_bound"]) == (0.96, True)


def test_the_prediction_has_idle_power_and_the_energies_above_it() -> None:
    profile = replace(PROFILE, energies=tuple(60.0 * seconds for seconds in PROFILE.service_times))
    found = predicted(profile, "greedy", 0.5 * profile.capacity)
    assert IDLE < found["predicted_w"] < WATTS
    assert "predicted_w" not in predicted(replace(PROFILE, energies=None), "greedy", 10.0)
