from math import exp

import numpy as np
import pytest

from policies.queue.monitor import ForgettingMonitor, NoMonitor, PerModelMonitor, inherit_rates
from policies.types import BatchKey

A, B = BatchKey("a"), BatchKey("b")


def test_the_estimate_of_a_steady_stream_is_its_rate() -> None:
    monitor = ForgettingMonitor(1.0)
    for n in range(1000):
        monitor.arrive(A, n * 0.01)
    # exp(-10) of the weight has yet to come, and the newest arrival is not counted: half a gap, 0.5 per cent
    assert monitor.rates(9.99)[A] == pytest.approx(100.0, rel=0.006)


def test_the_estimate_at_the_first_arrival_is_zero() -> None:
    monitor = ForgettingMonitor(2.0)
    monitor.arrive(A, 7.0)
    assert monitor.rates(7.0) == monitor.mean_rates(7.0) == {A: 0.0}


def test_the_estimate_of_poisson_arrivals_is_unbiased_with_the_predicted_noise() -> None:
    rng = np.random.default_rng(1)
    monitor, rates = ForgettingMonitor(0.5), []
    for at in np.cumsum(rng.exponential(1 / 200, 40_000)):
        monitor.arrive(A, float(at))
        rates.append(monitor.rates(float(at))[A])
    settled = np.array(rates[1000:])
    # relative standard deviation of one reading is 1 / sqrt(2 lambda T) = 0.0707; 195 s hold 195 independent ones
    assert settled.mean() == pytest.approx(200, rel=4 * 0.0707 / np.sqrt(195))
    assert settled.std() / 200 == pytest.approx(0.0707, rel=0.25)


def test_the_rate_decays_without_arrivals() -> None:
    monitor = ForgettingMonitor(2.0)
    for n in range(2000):
        monitor.arrive(A, n * 0.01)
    now = 19.99
    assert monitor.rates(now + 2.0)[A] / monitor.rates(now)[A] == pytest.approx(exp(-1), rel=1e-3)
    assert monitor.rates(now + 3600.0)[A] < 1e-300


def test_a_single_arrival_after_a_gap_is_not_counted_and_the_next_one_is() -> None:
    monitor = ForgettingMonitor(2.0)
    monitor.arrive(A, 0.0)
    monitor.arrive(A, 3600.0)
    assert monitor.rates(3600.0)[A] < 1e-300
    monitor.arrive(A, 3600.0)
    assert monitor.rates(3600.0)[A] == pytest.approx(0.5)


@pytest.mark.parametrize("seconds", [1.0, 30.0, 300.0])
def test_the_mean_rate_of_a_stationary_stream_is_its_rate_early_and_late(seconds: float) -> None:
    monitor = ForgettingMonitor(0.02)
    for at in np.cumsum(np.random.default_rng(2).exponential(1 / 200, round(200 * seconds))):
        monitor.arrive(A, float(at))
    # relative standard deviation 1 / sqrt(arrivals) early, 1 / sqrt(2 lambda T) late; four of them
    counted = min(200 * seconds, 2 * 200 * 60.0)
    assert monitor.mean_rates(float(at))[A] == pytest.approx(200, rel=4 / np.sqrt(counted))


def test_the_mean_rate_averages_bursts_and_decays_over_minutes() -> None:
    monitor = ForgettingMonitor(0.02)
    for second in range(300):
        for n in range(100):
            monitor.arrive(A, second + 0.001 * n)
    assert monitor.rates(299.099)[A] > 900
    # the sawtooth of 100 at once, once a second, over a minute: 100 / 60 high after each, so low before
    assert monitor.mean_rates(299.099)[A] == pytest.approx(100, abs=2)
    assert monitor.mean_rates(300.0)[A] == pytest.approx(100, abs=2)
    assert monitor.mean_rates(299.099 + 60.0)[A] / monitor.mean_rates(299.099)[A] == pytest.approx(exp(-1), rel=0.01)


def test_two_simultaneous_first_arrivals_give_a_finite_mean_rate() -> None:
    monitor = ForgettingMonitor(0.02)
    monitor.arrive(A, 7.0)
    monitor.arrive(A, 7.0)
    assert monitor.mean_rates(7.0)[A] == pytest.approx(1 / 0.02, rel=1e-3)


def test_a_new_monitor_inherits_the_rates_and_has_its_own_time_constants() -> None:
    before, steady = ForgettingMonitor(1.0), ForgettingMonitor(8.0)
    for n in range(1000):
        for monitor in (before, steady):
            monitor.arrive(A, 0.05 * n)
    after = inherit_rates(before, ForgettingMonitor(8.0))
    assert after.rates(49.95) == pytest.approx(before.rates(49.95))
    assert after.mean_rates(49.95) == pytest.approx(before.mean_rates(49.95))
    assert after.rates(57.95)[A] == pytest.approx(before.rates(49.95)[A] * exp(-1.0))
    for n in range(1000, 1200):
        after.arrive(A, 0.05 * n)
        steady.arrive(A, 0.05 * n)
    # the steady one began low by exp(-50 / 8), 0.2 per cent; a gap is 0.05 / 8, 0.6 per cent of the time constant
    assert after.rates(59.95)[A] == pytest.approx(steady.rates(59.95)[A], rel=0.03)
    assert after.mean_rates(59.95)[A] == pytest.approx(20.0, rel=0.03)
    assert before.rates(59.95)[A] == pytest.approx(20.0 * exp(-10.0), rel=0.03), "the original is unchanged"


def test_a_monitor_of_another_type_starts_without_rates() -> None:
    before, wanted = ForgettingMonitor(1.0), NoMonitor()
    before.arrive(A, 0.5)
    assert inherit_rates(before, wanted) is wanted
    assert inherit_rates(wanted, before) is before


def test_kinds_are_measured_separately() -> None:
    monitor = ForgettingMonitor(1.0)
    for n in range(300):
        monitor.arrive(A, n * 0.01)
        if n % 3 == 0:
            monitor.arrive(B, n * 0.01)
    rates = monitor.rates(2.99)
    assert rates[A] / rates[B] == pytest.approx(3.0, rel=0.05)


def test_each_model_has_the_monitor_of_its_policy() -> None:
    monitor = PerModelMonitor({"a": ForgettingMonitor(1.0), "b": NoMonitor()})
    monitor.arrive(A, 0.5)
    monitor.arrive(B, 0.5)
    assert set(monitor.rates(1.5)) == {A}
    assert set(monitor.mean_rates(1.5)) == {A}


def test_the_number_of_kinds_measured_at_once_is_bounded() -> None:
    monitor = ForgettingMonitor(1.0)
    for index in range(1000):
        monitor.arrive(BatchKey("m", 0, str(index)), index * 0.01)
        monitor.arrive(BatchKey("m", 0, "frequent"), index * 0.01)
    rates = monitor.rates(10.0)
    assert len(rates) <= 256
    assert BatchKey("m", 0, "frequent") in rates, "those that arrived last are kept"
    assert BatchKey("m", 0, "0") not in rates
