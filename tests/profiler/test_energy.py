"""Tests of measuring energy between ticks, on a virtual clock, with devices of known power."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, inf, isinf, sqrt
from threading import Event, Semaphore

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.energy import (
    Instruments,
    LoadProgress,
    Mean,
    UnmeasuredError,
    Windows,
    duty_cycle,
    feed_batches,
    idle_power,
    marginal,
    mean,
    steady_power,
    tick,
)
from server.energy.meters import EnergyMeter, NoMeter
from server.energy.nvml_meters import nvml_meter
from tests.support.recorded_board import RecordedBoard, VirtualTime

POLL = 5e-4  # s, as in profiler.energy
STEP = 0.1  # s


@dataclass
class TickingMeter:
    """A counter that steps every 100 ms, at instants shifted by `phase`, of a device that always draws `power` W."""

    time: VirtualTime
    power: float = 300.0
    phase: float = 0.0
    source: str = "nvml"
    resolution: float = STEP
    scope: str = "board"
    about: str = "a fake counter"

    def read(self) -> float | None:
        return self.power * STEP * floor((self.time.now + self.phase) / STEP)


@dataclass
class BackToBack:
    """A load of back-to-back batches of `service_time` s."""

    time: VirtualTime
    service_time: float
    began: float = 0.0

    def __call__(self) -> LoadProgress:
        batches = floor((self.time.now - self.began) / self.service_time)
        return LoadProgress(batches, self.began + batches * self.service_time)


def instruments(time: VirtualTime, meter: EnergyMeter | None = None) -> Instruments:
    return Instruments(meter or TickingMeter(time), time, time.sleep)


@given(phase=st.floats(0.0, STEP), length=st.floats(0.5, 5.0))
def test_power_is_exact_to_the_poll_interval_for_any_window(phase: float, length: float) -> None:
    time = VirtualTime()
    found = steady_power(
        instruments(time, TickingMeter(time, phase=phase)),
        BackToBack(time, 0.01),
        Windows(settle=0.37, length=length, repeats=1),
    )
    # each edge is detected up to one poll after its tick; an error of a whole tick would be 0.1 / length
    assert found.power.value == pytest.approx(300.0, rel=POLL / length + 1e-9)


def test_readings_at_arbitrary_instants_are_off_by_up_to_a_tick() -> None:
    time = VirtualTime()
    meter = TickingMeter(time, phase=0.05)
    before = meter.read()
    time.sleep(0.54)
    after = meter.read()
    assert before is not None
    assert after is not None
    assert abs((after - before) / 0.54 / 300.0 - 1.0) > 0.05


def test_the_load_runs_through_both_edges() -> None:
    time = VirtualTime()
    load = BackToBack(time, 0.002)
    first = tick(instruments(time), load)
    second = tick(instruments(time), load)
    assert first.progress is not None
    assert second.progress is not None
    assert second.time - first.time == pytest.approx(STEP, abs=POLL)
    # all batches between two consecutive ticks are counted
    assert second.progress.batches - first.progress.batches == pytest.approx(STEP / 0.002, abs=1)


@pytest.mark.parametrize("service_time", [0.0003, 0.0117, 0.7, 1.9])
def test_energy_per_batch_is_power_times_service_time_even_with_few_batches_per_window(service_time: float) -> None:
    time = VirtualTime()
    found = steady_power(instruments(time), BackToBack(time, service_time), Windows(length=2.0, repeats=3))
    assert found.rate.value == pytest.approx(1.0 / service_time, rel=1e-6)
    assert found.energy.value == pytest.approx(300.0 * service_time, rel=POLL / 2.0)


def test_the_standard_error_is_that_of_the_mean_over_the_windows() -> None:
    time = VirtualTime()
    rng = np.random.default_rng(5)
    watts = iter(rng.normal(300.0, 6.0, 1000))

    class Wavering(TickingMeter):
        """Draws a different power in each second; the windows are a second long."""

        joules = 0.0
        then = 0.0
        now = 300.0
        seconds = 0

        def read(self) -> float | None:
            while self.then + STEP <= self.time.now + 1e-9:
                self.then += STEP
                if floor(self.then + 1e-9) > self.seconds:
                    self.seconds, self.now = floor(self.then + 1e-9), float(next(watts))
                self.joules += self.now * STEP
            return self.joules

    plan = Windows(settle=0.95, length=0.95, repeats=100)
    found = steady_power(instruments(time, Wavering(time)), BackToBack(time, 0.01), plan)
    # a standard deviation from 100 draws is off by 7 %; 20 % is three times that
    assert found.power.standard_error == pytest.approx(6.0 / sqrt(100), rel=0.2)
    assert found.energy.standard_error == pytest.approx(0.01 * found.power.standard_error, rel=0.1)
    assert abs(found.power.value - 300.0) < 4 * found.power.standard_error


def test_means_and_their_errors() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.standard_error) == pytest.approx((2.0, 1.0 / sqrt(3)))
    assert mean([5.0]).value == 5.0
    assert isinf(mean([5.0]).standard_error)


def test_idle_power_needs_no_load() -> None:
    time = VirtualTime()
    found = idle_power(instruments(time, TickingMeter(time, power=110.0)), Windows(settle=20.0))
    assert found.value == pytest.approx(110.0, rel=POLL / 4.0)
    assert found.standard_error < 0.01
    assert 32.0 < time.now < 33.0, "settled for 20 s, then three windows of 4 s"


def test_recorded_nvml_readings_give_the_known_power() -> None:
    time = VirtualTime()
    meter = nvml_meter(RecordedBoard("steps", time), time, time.sleep)
    time.now = 2.05
    found = steady_power(instruments(time, meter), BackToBack(time, 0.004), Windows(0.1, 1.0, 3))
    assert found.power.value == pytest.approx(400.0, rel=2 * POLL)
    assert found.energy.value == pytest.approx(1.6, rel=2 * POLL)


def test_a_meter_without_a_reading_or_with_a_constant_one_raises() -> None:
    time = VirtualTime()
    with pytest.raises(UnmeasuredError, match="has no reading: not looked for"):
        tick(instruments(time, NoMeter("not looked for")))
    with pytest.raises(UnmeasuredError, match="did not change for 10 s"):
        tick(instruments(time, TickingMeter(time, power=0.0)))


def test_a_hung_load_raises() -> None:
    time = VirtualTime()
    with pytest.raises(UnmeasuredError, match="no batch was completed"):
        steady_power(instruments(time), BackToBack(time, 1e9), Windows())


def test_marginal_energy_is_above_idle_and_never_negative() -> None:
    found = marginal(Mean(3.0, 0.3), Mean(100.0, 20.0), 0.02)
    assert found.value == pytest.approx(1.0)
    assert found.standard_error == pytest.approx(0.5)  # sqrt(0.3^2 + (0.02 * 20)^2)
    assert marginal(Mean(1.0, 0.1), Mean(100.0, 0.0), 0.02).value == 0.0


@pytest.mark.parametrize(
    ("measured", "error", "passed"),
    [(220.0, 0.0, True), (230.0, 1 / 22, True), (240.0, 1 / 11, False), (200, -0.1, False)],
)
def test_the_duty_cycle_check_interpolates_between_idle_and_busy_power(
    measured: float, error: float, passed: bool
) -> None:
    check = duty_cycle(idle=100.0, busy=400.0, load=0.4, measured=measured)
    assert check.predicted == pytest.approx(220.0)
    assert check.error == pytest.approx(error, abs=0.01)
    assert check.passed is passed


def test_batches_run_back_to_back_until_the_context_ends() -> None:
    completed = Semaphore(0)

    def run(on_batch: Callable[[], bool]) -> None:
        while on_batch():
            completed.release()

    with feed_batches(run, lambda: 7.0) as load:
        for _ in range(3):
            assert completed.acquire(timeout=5)
        assert load().batches >= 2  # the third may not be counted yet
        assert load().time == 7.0
    left = load().batches
    assert load().batches == left


def test_an_exception_of_a_batch_is_raised_when_the_progress_is_read() -> None:
    failed = Event()

    def run(_: Callable[[], bool]) -> None:
        failed.set()
        raise RuntimeError("out of memory")

    with feed_batches(run, lambda: 0.0) as load:
        assert failed.wait(5)
    with pytest.raises(RuntimeError, match="out of memory"):
        load()


def test_infinite_errors_stay_infinite() -> None:
    assert marginal(Mean(1.0, inf), Mean(0.0, 0.0), 0.1).standard_error == inf
