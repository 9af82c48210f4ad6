"""Stage B of benchmarks/gpu.py: plans, and what is computed from a sweep of a device of known power."""

from dataclasses import asdict, replace

import pytest

from benchmarks.support.gpu_energy import energy_plan, linearity, readings, repeatability, sensor, service_time_plan
from benchmarks.support.gpu_tables import report
from policies.profile import Profile
from profiler.energy_plan import full_energy_plan
from profiler.energy_sweep import with_energy
from server.backends.buckets import bucket_sizes
from tests.support.virtual_device import VirtualDevice


def test_service_times_are_measured_at_every_bucket_within_their_time() -> None:
    plan = service_time_plan(128, 40.0)
    assert plan.sizes == bucket_sizes(128)
    assert len(plan.sizes) == 36
    assert plan.max_time == 40.0


def test_the_plans_of_cudnn_for_all_buckets_of_two_models_fit_its_cache() -> None:
    """GoogLeNet has 49 distinct convolutions, ResNet-50 has 23; cuDNN's cache in torch holds 10,000 plans a thread."""
    assert (49 + 23) * len(bucket_sizes(128)) < 10_000
    assert (49 + 23) * 204 > 10_000  # which every size up to 204 would not


def test_energies_take_eight_sizes_in_two_passes_with_15_s_of_idle() -> None:
    plan = energy_plan([0.001] * 128, 200.0)
    assert plan.sizes == (1, 2, 4, 8, 16, 32, 64, 128)
    assert (plan.passes, plan.idle.settle) == (2, 15.0)
    assert plan.shares
    assert plan.duration <= 200.0


def test_repeatability_is_the_difference_between_the_passes_above_idle() -> None:
    known = VirtualDevice(lambda b: 200.0, lambda b: 0.001)
    profile = Profile("n", (0.001, 0.001))
    _, sweep = with_energy(profile, known.rig(), full_energy_plan, lambda share: None)
    assert sweep is not None
    points = tuple(replace(point, passes=(200.0, 206.0, 204.0)) for point in sweep.points)
    assert repeatability(replace(sweep, points=points), profile)[1] == pytest.approx(0.06, abs=1e-3)


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
    assert found["active_idle_w"] == pytest.approx(100.0, rel=1e-3)
    assert max(repeatability(sweep, profile).values()) < 2e-3
    results = {"sensor": found, "energy": rows, "profile": {"service_time_s": profile.service_times, "note": "how"}}
    results["repeatability"] = {"1": 0.012}
    parts = {"profile:net": {"results": results}, "profile:other": {"failed": "out of memory\nlog"}}
    text = report({"B": {"device": "GPU", "date": "today", "versions": {}, "parts": parts}})
    assert "| 1 | 2.000 | 500 | 210 | 220.0 |" in text
    assert "| 1.2% |" in text
    assert "failed: out of memory\n" in text
    assert "a step every 100 ms" in text
