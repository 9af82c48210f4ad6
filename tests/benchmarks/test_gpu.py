"""The computations of benchmarks/gpu.py on fake devices; the measurement itself needs a GPU (make gpu)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

import pytest

from benchmarks.gpu import attempt, find_gpu, main, table
from benchmarks.support.gpu_energy import LOADS, DeviceUnderTest, compare, joules, linearity, readings, sensor
from policies.profile import Profile
from policies.types import SpecError
from profiler.energy import Mean, RunningLoad, Steady, UnmeasuredError
from profiler.energy_plan import full_energy_plan
from profiler.energy_sweep import with_energy
from tests.support.fakes import STEPS, FakeExecutor
from tests.support.virtual_clock import virtual_loop
from tests.support.virtual_device import VirtualDevice

IDLE, WATTS = 100.0, 160.0
PROFILE = replace(STEPS, model="m", idle_power=IDLE)
_T = TypeVar("_T")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = virtual_loop()
    yield loop
    loop.close()


def device(loop: asyncio.AbstractEventLoop) -> DeviceUnderTest:
    """A device that always draws 160 W, measured for ten seconds after one second."""

    async def measure_power(load: RunningLoad) -> Steady:
        await asyncio.sleep(1.0)
        before = load()
        await asyncio.sleep(10.0)
        after = load()
        rate = (after.batches - before.batches) / (after.time - before.time)
        return Steady(Mean(WATTS, 0.0), Mean(rate, 0.0), Mean(WATTS / rate, 0.0))

    return DeviceUnderTest(FakeExecutor(PROFILE), PROFILE, [1.0, 2.0], loop.time, measure_power)


def run(loop: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[_T]]) -> _T:
    async def all_of_it() -> _T:
        return await work()

    return loop.run_until_complete(all_of_it())


def test_joules_per_request_are_the_devices_energy_over_the_requests_answered(loop: asyncio.AbstractEventLoop) -> None:
    cell = run(loop, lambda: joules(device(loop), "greedy", 200.0))
    # three standard deviations of 2000 Poisson arrivals, 45 each
    assert cell["answered_hz"] == pytest.approx(200.0, rel=0.07)
    assert cell["total_mj"] == pytest.approx(1e3 * WATTS / cell["answered_hz"])
    assert cell["marginal_mj"] == pytest.approx(1e3 * (WATTS - IDLE) / cell["answered_hz"])
    assert cell["refused"] == 0
    assert cell["load"] == pytest.approx(200.0 / PROFILE.capacity)
    assert 11.0 < cell["mean_ms"] < cell["p95_ms"] < 40.0


def test_a_waiting_policy_serves_larger_batches_with_longer_response_times(loop: asyncio.AbstractEventLoop) -> None:
    greedy = run(loop, lambda: joules(device(loop), "greedy", 200.0))
    full = run(loop, lambda: joules(device(loop), "static:8", 200.0))
    assert full["mean_batch_size"] == pytest.approx(8.0, rel=0.01)  # the last batch may be smaller
    assert greedy["mean_batch_size"] < 5.0
    assert full["mean_ms"] > greedy["mean_ms"]


def test_no_task_is_left_running(loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(SpecError):
        run(loop, lambda: joules(device(loop), "nonsense", 10.0))
    run(loop, lambda: joules(device(loop), "greedy", 500.0))
    assert asyncio.all_tasks(loop) == set()


@pytest.mark.slow
def test_each_load_compares_greedy_with_both_objectives(loop: asyncio.AbstractEventLoop) -> None:
    cells: list[dict[str, Any]] = []
    run(loop, lambda: compare(device(loop), 1e9, cells.append))
    assert [cell["policy"].partition(":")[0] for cell in cells] == ["greedy", "smdp", "smdp"] * len(LOADS)
    for greedy, tight, loose in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        assert tight["slo_p95_ms"] == pytest.approx(1.5 * greedy["p95_ms"])
        assert loose["slo_p95_ms"] == pytest.approx(3.0 * greedy["p95_ms"])
        assert tight["kept"] is (tight["p95_ms"] <= tight["slo_p95_ms"])
        assert loose["mean_batch_size"] >= greedy["mean_batch_size"]
        assert loose["marginal_over_greedy"] == pytest.approx(loose["marginal_mj"] / greedy["marginal_mj"])


def test_no_cell_is_started_after_the_end_of_the_time(loop: asyncio.AbstractEventLoop) -> None:
    cells: list[dict[str, Any]] = []
    run(loop, lambda: compare(device(loop), 5.0, cells.append))  # the first cell ends after 11 s
    assert [cell["policy"] for cell in cells] == ["greedy"]


def test_linearity_is_the_largest_distance_from_the_line_of_best_fit() -> None:
    assert linearity([(0.0, 100.0), (0.5, 200.0), (1.0, 300.0)]) == pytest.approx(0.0, abs=1e-12)
    # the line of best fit is constant, 110
    assert linearity([(0.0, 100.0), (0.5, 130.0), (1.0, 100.0)]) == pytest.approx(20.0 / 110.0)


def test_sensor_and_readings_are_computed_from_the_sweep() -> None:
    known = VirtualDevice(lambda b: 200.0 + 10.0 * b, lambda b: 0.001 + 0.001 * b)
    profile = Profile("n", tuple(known.service_time(b) for b in range(1, 5)))
    profile, sweep = with_energy(profile, known.rig(), full_energy_plan, lambda share: None)
    assert sweep is not None
    found = sensor(sweep, profile, known)
    assert (found["step_s"], found["batch_size"]) == (0.1, 4)
    assert found["idle_power_w"]["before"] == asdict(sweep.before)
    assert [load for load, _ in found["power_w_by_load"]] == pytest.approx([0.0, 0.2, 0.5, 0.8, 1.0], rel=1e-3)
    assert found["off_the_line"] < 1e-3
    assert abs(found["duty_cycle_error"]) < 1e-3
    rows = readings(sweep, profile)
    assert [row["batch_size"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["total_mj"] == pytest.approx(420.0, rel=1e-3)
    part = {"sensor": found, "energy": rows, "profile": {"service_time_s": profile.service_times, "note": "how"}}
    text = table({"device": "GPU", "date": "today", "versions": {}, "tests": "1 passed", "models": {"net": part}})
    assert "| 1 | 2.000 | 500 | 210 | 220.0 |" in text
    assert "a step every 100 ms" in text


def test_the_table_contains_the_parts_that_were_measured(loop: asyncio.AbstractEventLoop) -> None:
    cells: list[dict[str, Any]] = [{"policy": "smdp", "load": 0.2, "failed": "no such bound"}]
    run(loop, lambda: compare(device(loop), 12.0, cells.append))
    models = {"a": {"joules": cells}, "b": {"failed": "out of memory"}}
    text = table({"device": "GPU", "date": "today", "versions": {}, "tests": "1 passed", "models": models})
    assert "| 0.20 | - | smdp | no such bound |" in text
    assert "| greedy | - |" in text
    assert "failed: out of memory" in text


def test_failures_are_recorded_beside_the_measured_parts() -> None:
    def fail() -> None:
        raise UnmeasuredError("the meter stood still")

    part: dict[str, Any] = {"profile": {}}
    attempt(part, fail)
    attempt(part, fail)
    assert part == {"profile": {}, "failed": "the meter stood still; the meter stood still"}


def test_without_a_gpu_it_prints_a_message_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    if find_gpu() is not None:
        pytest.skip("this machine has a GPU: use make gpu")
    main()
    assert "nothing to measure" in capsys.readouterr().out
