"""Tests of the closed-loop simulation: drift is detected, and the cost afterwards is close to the oracle's."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from benchmarks.servers.changing_device import W2, changed
from policies.catalog import choose
from policies.profile import Profile, load_profile
from policies.queue.arrivals import Instants, poisson
from research.papers.closed_loop_simulation import (
    DriftingDevice,
    LearningController,
    Phase,
    closed_loop,
    run_drift_trial,
)

P4 = load_profile("googlenet-tesla-p4-x10")
SPEC = "smdp:w2=1"


@pytest.fixture(autouse=True)
def few_tables(few_loads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the tables for multiples of w2 for fewer loads, too: the oracle's have the same loads."""
    monkeypatch.setattr("policies.objectives.solving._STEP", 2.5)


def scaled(time: float, energy: float) -> Profile:
    energies = tuple(energy * e for e in P4.energies or ())
    return replace(P4, service_times=tuple(time * t for t in P4.service_times), energies=energies)


def arrivals(load: float, duration: float) -> Instants:
    return poisson(load * P4.capacity, duration, np.random.default_rng(1))


# At load 0.7 a factor of 1.5 on the service time would exceed the new capacity under every policy, hence 1.4.
@pytest.mark.parametrize(
    ("load", "time", "energy"), [(0.3, 1.5, 1.5), (0.3, 0.5, 0.5), (0.7, 0.5, 0.5), (0.7, 1.4, 1.5), (0.7, 1.0, 1.5)]
)
@pytest.mark.parametrize("w2", [1.0, 16.0])
def test_a_step_is_detected_within_three_seconds_and_then_costs_at_most_three_per_cent_more_than_the_oracle(
    load: float, time: float, energy: float, w2: float
) -> None:
    result = run_drift_trial(P4, Phase(10.0, scaled(time, energy)), w2, arrivals(load, 40.0))
    assert result.detection_time < 3.0
    assert result.settling_time < 3.0
    assert result.learning < 1.03 * result.oracle


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_where_the_old_policy_loses_the_closed_loop_gains_all_but_one_per_cent(load: float) -> None:
    """The change of benchmarks/closed_loop.py, which leaves 10 s to settle."""
    result = run_drift_trial(P4, Phase(20.0, changed(P4)), W2, arrivals(load, 60.0))
    assert result.unchanged > 1.05 * result.oracle
    assert result.learning < 1.01 * result.oracle
    assert result.settling_time < 10.0


def test_a_swap_lowers_the_cost() -> None:
    result = run_drift_trial(P4, Phase(20.0, scaled(0.5, 0.5)), 1.0, arrivals(0.3, 40.0))
    assert result.learning < 0.97 * result.unchanged


def test_no_policy_is_swapped_without_a_change() -> None:
    noise = np.random.default_rng(2)
    device = DriftingDevice([Phase(0.0, P4)], lambda: float(noise.normal(1.0, 0.05)))
    run = closed_loop(choose(SPEC, P4), device, arrivals(0.7, 300.0), LearningController(SPEC, P4))
    assert run.swaps == ()


def test_an_unchanged_profile_is_never_detected() -> None:
    result = run_drift_trial(P4, Phase(5.0, P4), 1.0, arrivals(0.3, 10.0))
    assert result.detection_time == inf
    assert result.learning == result.oracle == result.unchanged


def test_a_step_back_is_detected() -> None:
    device = DriftingDevice([Phase(0.0, P4), Phase(20.0, scaled(1.5, 1.5)), Phase(40.0, P4)])
    run = closed_loop(choose(SPEC, P4), device, arrivals(0.3, 60.0), LearningController(SPEC, P4))
    back = [swap for swap in run.swaps if swap.detected > 40.0]
    assert back[0].detected < 43.0
    assert back[-1].chosen.profile.service_times == pytest.approx(P4.service_times)
    assert back[-1].chosen.profile.energies == pytest.approx(P4.energies)


def test_every_request_is_served_once_in_order_of_arrival() -> None:
    instants = arrivals(0.3, 30.0)
    device = DriftingDevice([Phase(0.0, P4), Phase(10.0, scaled(1.5, 1.5))])
    run = closed_loop(choose(SPEC, P4), device, instants, LearningController(SPEC, P4))
    assert np.array_equal(run.arrivals, instants)
    assert run.responses.min() >= P4.service_time(1) - 1e-9  # differences of instants are rounded
