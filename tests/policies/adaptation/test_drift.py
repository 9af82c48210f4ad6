"""Detection of drift, false alarms, and refits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adaptation.drift import DriftDetector
from policies.profile import Profile, load_profile

P4 = load_profile("googlenet-tesla-p4-x10")
SIZES = st.integers(1, P4.max_batch_size)


def scaled(time: float, energy: float) -> Profile:
    energies = tuple(energy * e for e in P4.energies or ())
    return replace(P4, service_times=tuple(time * t for t in P4.service_times), energies=energies)


def feed(detector: DriftDetector, truth: Profile, sizes: list[int], at: float = 0.0, joules: float = 0.0) -> None:
    """Observe batches of these sizes, back to back, with a reading of the counter after each."""
    detector.observe_energy(at, joules)
    for size in sizes:
        at, joules = at + truth.service_time(size), joules + (truth.energy(size) or 0.0)
        detector.observe_batch(size, truth.service_time(size))
        detector.observe_energy(at, joules)


@pytest.mark.parametrize("jump", [0.5, 1.5])
def test_a_change_by_half_is_detected_within_sixteen_batches_and_refitted_exactly(jump: float) -> None:
    detector, truth = DriftDetector(P4), scaled(jump, 1.0)
    for size in range(1, 33):  # steady before
        detector.observe_batch(size, P4.service_time(size))
    for seen in range(1, 17):
        detector.observe_batch(8, truth.service_time(8))
        if refit := detector.refit():
            assert seen > 8  # a few outliers cause no alarm
            assert refit.profile.service_times == pytest.approx(truth.service_times)
            assert [drift.quantity for drift in refit.drifts] == ["service times"]
            assert refit.profile.energies == P4.energies
            return
    pytest.fail("no drift detected")


def test_an_hour_of_noise_of_five_per_cent_raises_no_alarm() -> None:
    detector, noise = DriftDetector(P4), np.random.default_rng(0)
    for factor in noise.normal(1.0, 0.05, 3600 * 10).tolist():  # ten batches a second
        detector.observe_batch(8, P4.service_time(8) * factor)
        assert detector.refit() is None


def test_noisy_service_times_raise_the_threshold() -> None:
    detector, noise = DriftDetector(P4), np.random.default_rng(0)
    for factor in noise.gamma(25.0, 1 / 25.0, 20_000).tolist():  # 20 per cent
        detector.observe_batch(8, P4.service_time(8) * factor)
        assert detector.refit() is None


def test_outliers_raise_no_alarm() -> None:
    detector = DriftDetector(P4)
    for n in range(1000):
        detector.observe_batch(8, P4.service_time(8) * (50.0 if n % 20 == 0 else 1.0))
        assert detector.refit() is None


@given(st.lists(SIZES, max_size=60), st.floats(0.96, 1.04), st.floats(0.96, 1.04))
def test_small_errors_cause_no_refit(sizes: list[int], time: float, energy: float) -> None:
    """Errors below 5 per cent and batches at the edge of an energy window are no drift."""
    detector = DriftDetector(P4)
    feed(detector, scaled(time, energy), sizes)
    assert detector.refit() is None
    assert detector.profile is P4


@given(st.lists(SIZES, min_size=120, max_size=120), st.sampled_from([0.5, 1.5]), st.sampled_from([0.5, 1.5]))
def test_a_refit_from_exact_observations_is_exact(sizes: list[int], time: float, energy: float) -> None:
    detector, truth = DriftDetector(P4), scaled(time, energy)
    feed(detector, truth, sizes)
    refit = detector.refit()
    assert refit is not None
    assert refit.profile.service_times == pytest.approx(truth.service_times)
    assert refit.profile.energies == pytest.approx(truth.energies)


def with_fixed_energy(factor: float) -> Profile:
    """The profile with another energy beyond that of the requests, which is the same for all sizes."""
    assert P4.energies is not None
    more = (factor - 1.0) * (2.0 * P4.energies[0] - P4.energies[1])
    return replace(P4, energies=tuple(energy + more for energy in P4.energies))


def refits(detector: DriftDetector, truth: Profile, sizes: list[int], noise: float = 0.0) -> list[Profile]:
    """The profiles of all refits while batches of these sizes are observed, with noise of each batch's energy."""
    rng, at, joules, found = np.random.default_rng(0), 0.0, 0.0, []
    detector.observe_energy(at, joules)
    for size in sizes:
        at, joules = at + truth.service_time(size), joules + (truth.energy(size) or 0.0) * rng.normal(1.0, noise)
        detector.observe_batch(size, truth.service_time(size))
        detector.observe_energy(at, joules)
        if refit := detector.refit():
            found.append(refit.profile)
    return found


def test_energies_that_a_first_refit_could_only_scale_are_fitted_again_to_more_windows() -> None:
    truth = with_fixed_energy(4.0)
    sizes = np.random.default_rng(1).integers(6, 12, 1000).tolist()
    first, *others = refits(DriftDetector(P4), truth, sizes)
    assert np.array(first.energies) / np.array(P4.energies) == pytest.approx(1.4, abs=0.1)  # a scale
    assert len(others) == 1
    assert others[0].energies == pytest.approx(truth.energies)


def test_overdue_fits_are_made_once_to_all_windows_since_the_refit() -> None:
    detector, truth = DriftDetector(P4), with_fixed_energy(4.0)
    sizes = np.random.default_rng(1).integers(6, 12, 400).tolist()
    assert len(refits(detector, truth, sizes[:24])) == 1
    detector.discard_window()
    feed(detector, truth, sizes[24:], at=100.0, joules=1000.0)
    refit = detector.refit()
    assert refit is not None
    assert refit.profile.energies == pytest.approx(truth.energies)
    assert refit.drifts[0].batches > 300
    assert detector.refit() is None


@pytest.mark.parametrize(("sizes", "noise"), [([8], 0.0), ([8], 0.05), (list(range(4, 12)), 0.05)])
def test_a_true_scale_stays_a_scale_and_more_windows_correct_it(sizes: list[int], noise: float) -> None:
    drawn = np.random.default_rng(1).choice(sizes, 2000).tolist()
    found = refits(DriftDetector(P4), scaled(1.0, 1.5), drawn, noise)
    assert len(found) <= 2
    factors = np.array(found[-1].energies) / np.array(P4.energies)
    assert factors == pytest.approx(factors[0])
    assert factors[0] == pytest.approx(1.5, rel=0.02)


@given(st.lists(SIZES, min_size=120, max_size=120), st.floats(0.5, 2.0))
def test_observations_are_used_for_one_refit_only(sizes: list[int], time: float) -> None:
    detector, truth = DriftDetector(P4), scaled(time, time)
    feed(detector, truth, sizes)
    detector.refit()
    assert detector.refit() is None


def test_a_change_back_is_detected() -> None:
    detector = DriftDetector(P4)
    feed(detector, scaled(1.5, 1.5), [8] * 40)
    assert detector.refit()
    feed(detector, P4, [8] * 40, at=100.0, joules=1000.0)
    refit = detector.refit()
    assert refit is not None
    assert refit.profile.service_times == pytest.approx(P4.service_times)


def test_only_observations_after_the_change_are_used() -> None:
    detector, noise, truth = DriftDetector(P4), np.random.default_rng(3), scaled(1.5, 1.0)
    for factor in noise.normal(1.0, 0.05, 500).tolist():
        detector.observe_batch(8, P4.service_time(8) * factor)
    for factor in noise.normal(1.0, 0.05, 16).tolist():
        detector.observe_batch(8, truth.service_time(8) * factor)
    refit = detector.refit()
    assert refit is not None
    # The error of the mean of 16 is 1.25 per cent; one earlier batch among them would add 2.
    assert refit.profile.service_time(8) == pytest.approx(truth.service_time(8), rel=0.04)


def test_energy_of_other_work_discards_the_open_window() -> None:
    detector = DriftDetector(P4)
    at = joules = 0.0
    for _ in range(200):
        detector.observe_energy(at, joules)
        for _ in range(10):
            detector.observe_batch(4, P4.service_time(4))
        joules += 10 * (P4.energy(4) or 0.0) + 1.0  # including the energy of some single stages
        detector.discard_window()
        at += 1.0
        assert detector.refit() is None


def test_windows_of_a_reset_or_constant_counter_are_dropped() -> None:
    detector = DriftDetector(P4)
    at = 0.0
    for joules in [1e6, *[0.0] * 20, *[5.0] * 20]:  # reset by the driver, then stuck
        at += 1.0
        detector.observe_energy(at, joules)
        for _ in range(10):
            detector.observe_batch(4, P4.service_time(4))
        assert detector.refit() is None


def test_idle_power_in_the_counter_is_no_drift() -> None:
    detector, at, joules = DriftDetector(P4, idle_power=50.0), 0.0, 0.0
    for _ in range(400):
        detector.observe_batch(8, P4.service_time(8))
        at, joules = at + 0.2, joules + 50.0 * 0.2 + (P4.energy(8) or 0.0)
        detector.observe_energy(at, joules)
        assert detector.refit() is None


def test_a_drift_describes_quantity_and_ratio() -> None:
    detector = DriftDetector(P4)
    feed(detector, scaled(1.5, 1.0), [8] * 16)
    refit = detector.refit()
    assert refit is not None
    assert str(refit.drifts[0]) == "service times 1.50 times the profile's over 16 batches"


def test_a_small_lasting_change_is_adopted_after_an_alarm() -> None:
    detector = DriftDetector(P4)
    feed(detector, P4, [8] * 40)
    feed(detector, scaled(1.13, 1.0), [8] * 60)
    assert detector.refit() is None
    for _ in range(200):
        detector.observe_batch(8, 1.13 * P4.service_time(8))
        if refit := detector.refit():
            assert refit.profile.service_time(8) == pytest.approx(1.13 * P4.service_time(8), rel=0.02)
            return
    pytest.fail("never adopted")


def test_disturbances_that_pass_change_the_profile_a_few_times_only() -> None:
    detector, noise, slow = DriftDetector(P4), np.random.default_rng(0), False
    refits = 0
    for factor in noise.gamma(64.0, 1 / 64.0, 20_000).tolist():
        slow = noise.random() < (0.975 if slow else 0.002)  # for 40 batches, after 500 at full speed
        detector.observe_batch(8, P4.service_time(8) * factor * (1.6 if slow else 1.0))
        refits += detector.refit() is not None
    assert 2 <= refits <= 8  # 42 without the higher threshold


def test_a_lasting_change_is_found_within_seconds_after_disturbances() -> None:
    detector = DriftDetector(P4)
    for _ in range(10):
        feed(detector, scaled(1.6, 1.0), [8] * 40)
        detector.refit()
        feed(detector, P4, [8] * 400)
        detector.refit()
    seen = 0
    while detector.refit() is None:
        detector.observe_batch(8, 1.5 * P4.service_time(8))
        seen += 1
    assert seen < 400
    assert detector.profile.service_time(8) == pytest.approx(1.5 * P4.service_time(8), rel=0.05)


@pytest.mark.parametrize("factor", [0.2, 20.0])
def test_a_large_change_is_found_within_five_batches_also_after_disturbances(factor: float) -> None:
    detector = DriftDetector(P4)
    for _ in range(5):
        feed(detector, scaled(1.6, 1.0), [8] * 100)
        detector.refit()
        feed(detector, P4, [8] * 400)
        detector.refit()
    seen = 0
    while detector.refit() is None:
        detector.observe_batch(8, factor * P4.service_time(8))
        seen += 1
    assert seen == 5
    assert detector.profile.service_time(8) == pytest.approx(factor * P4.service_time(8), rel=0.1)


def test_the_latest_ratio_follows_a_change_before_it_is_learned() -> None:
    detector = DriftDetector(P4)
    for _ in range(100):
        detector.observe_batch(8, P4.service_time(8))
    assert detector.latest_ratio == pytest.approx(1.0)
    for factor in (2.0, 1.0, 2.0, 2.0):
        detector.observe_batch(8, factor * P4.service_time(8))
    assert detector.refit() is None
    assert detector.latest_ratio == pytest.approx(2.0)


def test_the_latest_ratio_is_one_while_few_batches_are_known() -> None:
    detector = DriftDetector(P4)
    for _ in range(4):
        detector.observe_batch(8, 2.0 * P4.service_time(8))
    assert detector.latest_ratio == 1.0
