"""Tests of measuring energy by batch size, on a virtual clock, with devices of known power."""

import logging
from dataclasses import replace
from itertools import count
from math import inf, log2

import pytest

from policies.profile import Profile, parse_profile
from profiler.conditions import Conditions
from profiler.energy import Mean, UnmeasuredError, Windows
from profiler.energy_plan import EnergyPlan, full_energy_plan, quick_energy_plan
from profiler.energy_sweep import EnergySweep, LoadPoint, sweep_energies, watts, with_energy
from server.energy.meters import CountingMeter, NoMeter
from tests.support.virtual_device import VirtualDevice

SIZES = 32
# Both edges of a window of 4 s are detected up to 0.5 ms late: an error of 0.03 %, of marginal energy up to twice that.
EXACT = 1e-3


def power(b: int) -> float:
    return 180.0 + 50.0 * log2(b)


def service_time(b: int) -> float:
    return 0.0011 + 0.0003 * b


def device(**changes: object) -> VirtualDevice:
    made = VirtualDevice(power, service_time)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def profile_of(known: VirtualDevice, sizes: int = SIZES) -> Profile:
    return Profile("n", tuple(known.service_time(b) for b in range(1, sizes + 1)), source="measured", note="times")


def ignore(share: float) -> None:
    pass


@pytest.mark.parametrize("handover", [0.0, 0.0004], ids=["no gap", "a gap between batches"])
def test_known_energies_are_measured_for_every_size(handover: float) -> None:
    known = device(handover=handover)
    found, _ = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    sizes = range(1, SIZES + 1)
    assert found.idle_power == pytest.approx(100.0, rel=EXACT)
    # the power is linear in log b, which cubic interpolation reproduces exactly
    assert found.total_energies == pytest.approx([power(b) * service_time(b) for b in sizes], rel=EXACT)
    assert found.energies == pytest.approx([(power(b) - 100.0) * service_time(b) for b in sizes], rel=2 * EXACT)
    assert found.energy_source == "nvml"


def test_a_device_that_cools_slowly_is_measured_after_its_power_has_fallen() -> None:
    known = device(cooling=12.0)
    known.draw(300.0)
    known.rest()
    for plan in (quick_energy_plan, lambda times: full_energy_plan(times).within(60.0)):
        assert sweep_energies(known.rig(), plan([0.001] * 8), ignore).idle.value == pytest.approx(100.0, rel=EXACT)


def test_a_step_of_the_service_time_is_a_step_of_the_energy_at_sizes_that_were_not_measured() -> None:
    known = device(service_time=lambda b: 0.002 if b < 7 else 0.003)
    assert 7 not in full_energy_plan([0.001] * SIZES).sizes
    found, _ = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    assert found.total_energies is not None
    assert found.total_energies[6] == pytest.approx(power(7) * 0.003, rel=EXACT)


def test_power_between_sizes_stays_between_its_neighbours() -> None:
    known = device(power=lambda b: 200.0 if b < 8 else 500.0)
    found = sweep_energies(known.rig(), full_energy_plan(profile_of(known).service_times), ignore)
    assert all(200.0 * (1 - EXACT) <= p <= 500.0 * (1 + EXACT) for p in found.powers(profile_of(known).service_times))


def test_the_quick_plan_measures_four_sizes_after_idle_power_has_settled() -> None:
    known = device()
    found, swept = with_energy(profile_of(known), known.rig(), quick_energy_plan, ignore)
    assert known.time.now < 20.0
    assert [size for size, _ in sorted(known.visited)] == [1, 4, 12, 32]
    # windows of 0.4 s, with an error of one poll at both edges
    assert found.total_energies == pytest.approx([power(b) * service_time(b) for b in range(1, 33)], rel=0.005)
    assert "single windows have no standard error" in found.note
    assert swept is not None
    assert swept.part_loads == ()


def test_each_pass_visits_all_sizes_in_random_order() -> None:
    known, plan = device(), full_energy_plan([0.001] * 8)
    sweep_energies(known.rig(), plan, ignore)
    orders = [[size for size, share in known.visited if share == 1.0][i * 6 : i * 6 + 6] for i in range(3)]
    assert [sorted(order) for order in orders] == [[1, 2, 3, 4, 6, 8]] * 3
    assert orders[0] != orders[1]
    assert [share for _, share in known.visited[18:]] == [0.2, 0.5, 0.8]
    assert known.time.now == pytest.approx(plan.duration, rel=0.02)


def test_half_the_difference_of_idle_power_before_and_after_is_its_error() -> None:
    found = EnergySweep(full_energy_plan([0.001]), (), Mean(100.0, 0.5), Mean(110.0, 0.5))
    assert found.idle == Mean(105.0, 5.0)
    assert replace(found, after=Mean(100.0, 1.2)).idle.standard_error == pytest.approx(0.65)
    assert replace(found, before=Mean(100.0, inf)).idle == Mean(105.0, 5.0)


def test_the_error_of_the_power_propagates_to_the_energy() -> None:
    points = (LoadPoint(1, Mean(300.0, 3.0), Mean(500.0, 0.0)),)
    (reading,) = EnergySweep(full_energy_plan([0.002]), points, Mean(100.0, 1.0), Mean(100.0, 1.0)).batch_energies(
        [0.002]
    )
    assert (reading.total.value, reading.total.standard_error) == pytest.approx((0.6, 0.006))
    assert reading.marginal.value == pytest.approx(0.4)
    assert reading.marginal.standard_error == pytest.approx(0.002 * (9.0 + 0.5) ** 0.5)  # sqrt(1/2) W of idle power


def test_steady_batches_that_are_faster_than_among_others_have_the_energy_that_was_measured() -> None:
    points = (LoadPoint(1, Mean(300.0, 0.0), Mean(625.0, 0.0)),)
    found = EnergySweep(full_energy_plan([0.002]), points, Mean(100.0, 0.0), Mean(100.0, 0.0))
    (reading,) = found.batch_energies([0.002])
    assert reading.marginal.value == pytest.approx((300.0 - 100.0) / 625.0)
    profile = found.apply_to(Profile("n", (0.002,), note="times"), VirtualDevice(power, service_time))
    assert "steady batches of 1 take 20% less time than l(1)" in profile.note
    steady = replace(found, points=(replace(points[0], rate=Mean(500.0, 0.0)),))
    assert "steady" not in steady.apply_to(profile_of(device(), 1), VirtualDevice(power, service_time)).note


def test_marginal_energy_is_never_negative() -> None:
    known = device(power=lambda b: 99.0 + b)
    found, _ = with_energy(profile_of(known, 4), known.rig(), full_energy_plan, ignore)
    assert found.energies is not None
    assert found.energies[0] == pytest.approx(0.0, abs=1e-4)
    assert min(found.energies) >= 0.0


def test_the_duty_cycle_check_passes_if_gaps_draw_idle_power(caplog: pytest.LogCaptureFixture) -> None:
    known = device()
    found, swept = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    assert swept is not None
    checks = swept.checks(found.service_times)
    assert [load for load, _ in checks] == pytest.approx([0.2, 0.5, 0.8], rel=EXACT)
    assert all(abs(check.error) < 2 * EXACT for _, check in checks)
    assert caplog.text == ""


def test_a_device_that_draws_more_than_idle_power_in_gaps_gives_one_warning_with_the_largest_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = device(resting=140.0)
    found, _ = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    (warning,) = caplog.messages
    # at load 0.2 and b = 16 the prediction is 100 + 0.2 x 280 W; the gaps add four fifths of 40 W
    assert warning.startswith("at load 0.20 the device draws 188.0 W, +20.5 % from the sum")
    assert "power against idle plus batches of 16: +20.5% at load 0.20" in found.note
    assert "energies are above the 140.0 W drawn in gaps between batches" in found.note


def test_batches_are_charged_above_the_power_between_batches_if_it_is_not_idle_power() -> None:
    known = device(resting=140.0)
    found, swept = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    assert swept is not None
    assert swept.active_idle(found.service_times) == pytest.approx(140.0, rel=EXACT)
    assert swept.idle.value == pytest.approx(100.0, rel=EXACT)
    assert found.idle_power == pytest.approx(140.0, rel=EXACT)
    sizes = range(1, SIZES + 1)
    assert found.energies == pytest.approx([(power(b) - 140.0) * service_time(b) for b in sizes], rel=4 * EXACT)
    # so that the power at any load is idle power plus the batches' energies
    assert found.energies is not None
    at_half = 140.0 + 0.5 * found.energies[15] / found.service_times[15]
    assert at_half == pytest.approx(0.5 * power(16) + 0.5 * 140.0, rel=2 * EXACT)


def test_clocks_and_throttling_are_read_in_every_window(caplog: pytest.LogCaptureFixture) -> None:
    known, plan = device(), full_energy_plan([0.001] * 4)
    clocks = count(1980, -5)
    rig = known.rig()

    def read() -> Conditions | None:
        return Conditions(next(clocks), 3201, 60, 0x4 if known.visited else 0x1)

    rig = replace(rig, instruments=replace(rig.instruments, conditions=read))
    found, swept = with_energy(profile_of(known, 4), rig, lambda times: plan, ignore)
    assert swept is not None
    assert [len(point.conditions) for point in swept.points] == [2 * plan.passes] * 4  # both edges of each window
    assert len({each.clock for each in swept.conditions}) == len(swept.conditions) == 30
    assert "MHz, 60 °C, throttled by the power cap at 30 of 30 readings" in found.note
    assert any("throttled by the power cap" in message for message in caplog.messages)


def test_the_powers_of_the_passes_are_kept() -> None:
    known = device()
    swept = sweep_energies(known.rig(), full_energy_plan([0.001] * 2), ignore)
    assert swept.points[1].passes == pytest.approx([power(2)] * 3, rel=EXACT)


def test_the_check_runs_at_a_size_with_many_batches_per_window() -> None:
    assert full_energy_plan([0.001 * b for b in range(1, 33)]).checked == 16
    assert full_energy_plan([0.03 * b for b in range(1, 33)]).checked == 3
    assert full_energy_plan([1.0] * 32).checked == 1


def test_the_note_describes_the_energy_measurement() -> None:
    known = device()
    found, _ = with_energy(profile_of(known), known.rig(), full_energy_plan, ignore)
    for text in (
        "times; energy by a counter of known power: power of batches back to back, 3 windows of 4 s at each of 10",
        "standard error of the total at most 0.",
        "idle power before and after 100.",
    ):
        assert text in found.note
    assert parse_profile(found.to_json(), "written") == found


def test_a_failing_sensor_leaves_the_profile_without_energies_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    known = device(fails_at=60.0)
    profile = profile_of(known)
    assert with_energy(profile, known.rig(), full_energy_plan, ignore) == (profile, None)
    assert "has no energy, its measurement failed: the meter has no reading" in caplog.text
    with pytest.raises(UnmeasuredError):
        sweep_energies(known.rig(), full_energy_plan(profile.service_times), ignore)


@pytest.mark.parametrize("meter", [NoMeter(), CountingMeter()])
def test_without_a_sensor_nothing_runs(meter: NoMeter | CountingMeter, caplog: pytest.LogCaptureFixture) -> None:
    known = device()
    rig = replace(known.rig(), instruments=replace(known.rig().instruments, meter=meter))
    with caplog.at_level(logging.INFO):
        assert with_energy(profile_of(known), rig, full_energy_plan, ignore) == (profile_of(known), None)
    assert (known.visited, known.time.now, caplog.text) == ([], 0.0, "")


def test_progress_increases_to_one() -> None:
    known, shares = device(), list[float]()
    sweep_energies(known.rig(), full_energy_plan([0.001] * 4), shares.append)
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 3, 4, 5)),
        (64, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
        (100, (1, 2, 3, 4, 8, 16, 32, 64, 100)),
        (256, (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_about_twelve_sizes_are_measured(largest: int, sizes: tuple[int, ...]) -> None:
    assert full_energy_plan([0.001] * largest).sizes == sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 64, 4096])
def test_a_quick_plan_has_the_smallest_and_the_largest_size(largest: int) -> None:
    sizes = quick_energy_plan([0.001] * largest).sizes
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert len(sizes) == min(4, largest)


def test_a_plan_is_shortened_by_windows_then_passes_then_sizes_and_never_by_the_settling_of_idle_power() -> None:
    plan = full_energy_plan([0.001] * 64)
    assert 280.0 < plan.duration < 400.0
    assert plan.within(1e9) == plan
    for seconds in (250.0, 170.0, 100.0, 80.0):
        shorter = plan.within(seconds)
        assert seconds - 12.0 < shorter.duration <= seconds + 1e-9
        assert shorter.idle.settle == 15.0
        assert shorter.visit.length >= 1.0
        assert {1, 64, plan.checked} <= set(shorter.sizes)
    assert plan.within(250.0).sizes == plan.within(170.0).sizes == plan.sizes
    assert plan.within(250.0).passes == 3
    assert len(plan.within(80.0).sizes) < len(plan.sizes)


def test_the_least_plan_measures_three_sizes_twice() -> None:
    least = full_energy_plan([0.001] * 64).within(1.0)
    assert (least.sizes, least.passes, least.idle.settle) == ((1, 16, 64), 2, 15.0)
    assert isinstance(least, EnergyPlan)


def test_windows_are_longer_for_slow_batches() -> None:
    known = device(service_time=lambda b: 2.0)
    plan = EnergyPlan((1,), 1, Windows(0.0, 0.5, 1), 0.0, Windows(0.0, 0.5, 1))
    found = sweep_energies(known.rig(), plan, ignore)
    assert known.time.now > 8.0
    assert found.points[0].rate.value == pytest.approx(0.5, rel=EXACT)


def test_power_is_formatted_with_its_standard_error() -> None:
    assert watts(Mean(112.34, 0.56)) == "112.3 ± 0.6 W"
    assert watts(Mean(112.34, inf)) == "112.3 W"
