"""The rules that close the loop: what they notice, what they do not, and what they refit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.adaptation.drift import DriftDetector
from policies.profile import Profile, load_profile

P4 = load_profile("googlenet-tesla-p4-x10")
SIZES = st.integers(1, P4.max_batch_size)


def scaled(time: float, energy: float) -> Profile:
    energies = tuple(energy * e for e in P4.energies or ())
    return replace(P4, service_times=tuple(time * t for t in P4.service_times), energies=energies)


def feed(evidence: DriftDetector, truth: Profile, sizes: list[int], at: float = 0.0, joules: float = 0.0) -> None:
    """Batches of these sizes, back to back, with a reading of the counter after each."""
    evidence.observe_energy(at, joules)
    for size in sizes:
        at, joules = at + truth.service_time(size), joules + (truth.energy(size) or 0.0)
        evidence.observe_batch(size, truth.service_time(size))
        evidence.observe_energy(at, joules)


@pytest.mark.parametrize("jump", [0.5, 1.5])
def test_a_jump_by_half_is_noticed_within_sixteen_batches_and_refitted_exactly(jump: float) -> None:
    evidence, truth = DriftDetector(P4), scaled(jump, 1.0)
    for size in range(1, 33):  # steady before
        evidence.observe_batch(size, P4.service_time(size))
    for seen in range(1, 17):
        evidence.observe_batch(8, truth.service_time(8))
        if refit := evidence.refit():
            assert seen > 8  # no handful of outliers does that
            assert refit.profile.service_times == pytest.approx(truth.service_times)
            assert [drift.quantity for drift in refit.drifts] == ["service times"]
            assert refit.profile.energies == P4.energies
            return
    pytest.fail("not noticed")


def test_an_hour_of_steady_noise_of_five_per_cent_raises_no_alarm() -> None:
    evidence, noise = DriftDetector(P4), np.random.default_rng(0)
    for factor in noise.normal(1.0, 0.05, 3600 * 30).tolist():  # thirty batches a second
        evidence.observe_batch(8, P4.service_time(8) * factor)
        assert evidence.refit() is None


def test_noisy_services_ask_for_more_evidence_not_for_another_profile() -> None:
    evidence, noise = DriftDetector(P4), np.random.default_rng(0)
    for factor in noise.gamma(25.0, 1 / 25.0, 20_000).tolist():  # 20 per cent
        evidence.observe_batch(8, P4.service_time(8) * factor)
        assert evidence.refit() is None


def test_outliers_raise_no_alarm() -> None:
    evidence = DriftDetector(P4)
    for n in range(1000):
        evidence.observe_batch(8, P4.service_time(8) * (50.0 if n % 10 == 0 else 1.0))
        assert evidence.refit() is None


@settings(deadline=None)
@given(st.lists(SIZES, max_size=60), st.floats(0.96, 1.04), st.floats(0.96, 1.04))
def test_nothing_is_solved_again_without_evidence(sizes: list[int], time: float, energy: float) -> None:
    """Errors below 5 per cent are none; and a straddled edge of a window is none either."""
    evidence = DriftDetector(P4)
    feed(evidence, scaled(time, energy), sizes)
    assert evidence.refit() is None
    assert evidence.profile is P4


@settings(deadline=None)
@given(st.lists(SIZES, min_size=120, max_size=120), st.sampled_from([0.5, 1.5]), st.sampled_from([0.5, 1.5]))
def test_a_refit_from_exact_observations_is_the_truth(sizes: list[int], time: float, energy: float) -> None:
    evidence, truth = DriftDetector(P4), scaled(time, energy)
    feed(evidence, truth, sizes)
    refit = evidence.refit()
    assert refit is not None
    assert refit.profile.service_times == pytest.approx(truth.service_times)
    assert refit.profile.energies == pytest.approx(truth.energies)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=120, max_size=120), st.floats(0.5, 2.0))
def test_what_led_to_a_refit_leads_to_no_second_one(sizes: list[int], time: float) -> None:
    evidence, truth = DriftDetector(P4), scaled(time, time)
    feed(evidence, truth, sizes)
    evidence.refit()
    assert evidence.refit() is None


def test_a_jump_back_is_noticed_too() -> None:
    evidence = DriftDetector(P4)
    feed(evidence, scaled(1.5, 1.5), [8] * 40)
    assert evidence.refit()
    feed(evidence, P4, [8] * 40, at=100.0, joules=1000.0)
    refit = evidence.refit()
    assert refit is not None
    assert refit.profile.service_times == pytest.approx(P4.service_times)


def test_only_what_came_after_the_change_counts() -> None:
    evidence, noise, truth = DriftDetector(P4), np.random.default_rng(3), scaled(1.5, 1.0)
    for factor in noise.normal(1.0, 0.05, 500).tolist():
        evidence.observe_batch(8, P4.service_time(8) * factor)
    for factor in noise.normal(1.0, 0.05, 16).tolist():
        evidence.observe_batch(8, truth.service_time(8) * factor)
    refit = evidence.refit()
    assert refit is not None
    # The error of the mean of 16 is 1.25 per cent; one batch of the past among them would add 2.
    assert refit.profile.service_time(8) == pytest.approx(truth.service_time(8), rel=0.04)


def test_what_no_batch_accounts_for_closes_the_window_that_is_open() -> None:
    evidence = DriftDetector(P4)
    at = joules = 0.0
    for _ in range(200):
        evidence.observe_energy(at, joules)
        for _ in range(10):
            evidence.observe_batch(4, P4.service_time(4))
        joules += 10 * (P4.energy(4) or 0.0) + 1.0  # and the energy of some single stages
        evidence.discard_window()
        at += 1.0
        assert evidence.refit() is None


def test_a_reset_counter_and_one_that_stands_still_say_nothing() -> None:
    evidence = DriftDetector(P4)
    at = 0.0
    for joules in [1e6, *[0.0] * 20, *[5.0] * 20]:  # reset by the driver, then stuck
        at += 1.0
        evidence.observe_energy(at, joules)
        for _ in range(10):
            evidence.observe_batch(4, P4.service_time(4))
        assert evidence.refit() is None


def test_a_counter_that_counts_idling_is_not_held_against_the_batches() -> None:
    evidence, at, joules = DriftDetector(P4, idle_power=50.0), 0.0, 0.0
    for _ in range(400):
        evidence.observe_batch(8, P4.service_time(8))
        at, joules = at + 0.2, joules + 50.0 * 0.2 + (P4.energy(8) or 0.0)
        evidence.observe_energy(at, joules)
        assert evidence.refit() is None


def test_a_drift_says_what_is_off_and_by_how_much() -> None:
    evidence = DriftDetector(P4)
    feed(evidence, scaled(1.5, 1.0), [8] * 14)
    refit = evidence.refit()
    assert refit is not None
    assert str(refit.drifts[0]) == "service times 1.50 times the profile's over 14 batches"
