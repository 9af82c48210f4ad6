"""Refits: exact from exact observations, and conservative from others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adaptation.refitting import (
    EnergyWindow,
    Observation,
    after_change,
    better_energies,
    refit_energies,
    refit_service_times,
)
from policies.profile import Profile

SIZES = range(1, 9)
OLD = Profile(
    "device",
    tuple(0.004 + 0.001 * b for b in SIZES),
    note="a device",
    energies=tuple(0.05 + 0.01 * b for b in SIZES),
    total_energies=tuple(0.15 + 0.03 * b for b in SIZES),
    stage_service_times=tuple((0.002, 0.002 + 0.001 * b) for b in SIZES),
)
MIXES = ({1: 10}, {8: 5}, {4: 6, 2: 3}, {3: 8}, {7: 4, 1: 2})


def windows(zeta: list[float], idle: float = 0.0, mixes: tuple[dict[int, int], ...] = MIXES) -> list[EnergyWindow]:
    lengths = np.linspace(0.5, 1.5, len(mixes)).tolist()
    spent = [sum(n * zeta[size - 1] for size, n in mix.items()) for mix in mixes]
    return [EnergyWindow(m, t, idle * t + e) for m, t, e in zip(mixes, lengths, spent, strict=True)]


@given(st.lists(st.floats(0.8, 1.5), min_size=8, max_size=8))
def test_two_exact_observations_of_every_size_are_reproduced(factors: list[float]) -> None:
    truth = [f * t for f, t in zip(factors, OLD.service_times, strict=True)]
    fitted = refit_service_times(OLD, [Observation(b, truth[b - 1]) for b in SIZES for _ in range(2)])
    assert fitted.service_times == pytest.approx(truth)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.1, 10.0)), min_size=1, max_size=30))
def test_refitted_times_lie_within_what_was_observed(seen: list[tuple[int, float]]) -> None:
    fitted = refit_service_times(OLD, [Observation(b, f * OLD.service_time(b)) for b, f in seen])
    factors = np.array(fitted.service_times) / np.array(OLD.service_times)
    assert min(f for _, f in seen) * (1 - 1e-9) <= factors.min()
    assert factors.max() <= max(f for _, f in seen) * (1 + 1e-9)


def test_sizes_without_observations_get_the_mean_of_all() -> None:
    fitted = refit_service_times(OLD, [Observation(4, 1.5 * OLD.service_time(4))] * 5)
    assert fitted.service_times == pytest.approx([1.5 * t for t in OLD.service_times])


def test_a_noisy_size_is_shrunk_towards_the_others() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.2, 200).tolist()
    seen = [Observation(4, f * OLD.service_time(4)) for f in noise] + [Observation(8, 1.4 * OLD.service_time(8))]
    assert refit_service_times(OLD, seen).service_time(8) < 1.1 * OLD.service_time(8)


def test_an_outlier_is_clipped_at_twice_the_median() -> None:
    seen = [Observation(4, OLD.service_time(4))] * 9 + [Observation(4, 1000.0)]
    assert refit_service_times(OLD, seen).service_time(4) == pytest.approx(1.1 * OLD.service_time(4))


@given(st.integers(0, 200), st.integers(8, 200), st.sampled_from([0.5, 1.5]))
def test_the_change_point_is_found_exactly(before: int, since: int, jump: float) -> None:
    seen = [Observation(4, f * OLD.service_time(4)) for f in [1.0] * before + [jump] * since]
    assert len(after_change(OLD, seen)) == since


def test_noise_has_no_change_point() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.05, 200).tolist()
    seen = [Observation(4, f * OLD.service_time(4)) for f in noise]
    assert after_change(OLD, seen) == seen


def test_stage_times_are_scaled_with_the_service_time() -> None:
    fitted = refit_service_times(OLD, [Observation(4, 1.5 * OLD.service_time(4))] * 5)
    assert fitted.stage_service_times is not None
    assert fitted.stage_service_times[3] == pytest.approx((0.003, 0.009))


@given(st.floats(0.1, 10.0))
def test_energies_that_grew_by_one_factor_are_scaled(factor: float) -> None:
    """For energies of any shape; the affine fit does not replace them."""
    old = replace(OLD, energies=(0.05, 0.09, 0.08, 0.12, 0.2, 0.2, 0.21, 0.4))
    truth = [factor * e for e in old.energies or ()]
    fitted, _ = refit_energies(old, windows(truth))
    assert fitted.energies == pytest.approx(truth)


@given(st.floats(0.0, 1.0), st.floats(0.001, 0.1), st.floats(0.0, 100.0))
def test_energies_of_another_shape_are_fitted_with_the_idle_power(once: float, each: float, idle: float) -> None:
    truth = [once + each * b for b in SIZES]
    fitted, found = refit_energies(OLD, windows(truth, idle), idle_power=idle)
    assert found == pytest.approx(idle)
    # Where a scale leaves no more than 1 per cent (root mean square over the windows), it is taken.
    spent = [w.energy for w in windows(truth, idle)]
    told = [w.energy for w in windows(list(fitted.energies or ()), idle)]
    assert np.linalg.norm(np.subtract(told, spent)) <= 0.011 * np.linalg.norm(spent)


def test_an_idle_power_that_changed_is_found() -> None:
    truth = [0.1 + 0.01 * b for b in SIZES]
    fitted, idle = refit_energies(OLD, windows(truth, 3.0), idle_power=1.0)
    assert idle == pytest.approx(3.0)
    assert fitted.energies == pytest.approx(truth)


def test_equal_windows_determine_the_scale_only() -> None:
    truth = [0.2 + 0.01 * b for b in SIZES]
    fitted, _ = refit_energies(OLD, windows(truth, mixes=({4: 10}, {4: 20}, {4: 12}, {4: 9})))
    assert fitted.energies == pytest.approx([e * 0.24 / 0.09 for e in OLD.energies or ()])


def test_a_later_fit_describes_the_largest_change_of_a_size() -> None:
    truth = [0.09 + 0.005 * b for b in SIZES]  # 0.095 instead of 0.06 with one request
    found = better_energies(OLD, windows(truth))
    assert found is not None
    fitted, _, drift = found
    assert fitted.energies == pytest.approx(truth)
    assert str(drift) == "energies of single batch sizes up to 58 % different over 38 batches"


def test_a_later_fit_within_five_per_cent_is_not_better() -> None:
    assert better_energies(OLD, windows([1.04 * e for e in OLD.energies or ()])) is None


@pytest.mark.parametrize(("noise", "is_better"), [(0.01, True), (0.5, False)])
def test_a_later_fit_is_better_if_the_error_falls_to_a_quarter(noise: float, is_better: bool) -> None:
    seen = [
        replace(window, energy=window.energy * (1.0 + noise * (-1) ** i))
        for i, window in enumerate(windows([1.2 * e for e in OLD.energies or ()], mixes=({4: 10},) * 8))
    ]
    assert (better_energies(OLD, seen) is not None) == is_better


def test_total_energies_keep_the_idle_energy() -> None:
    fitted, _ = refit_energies(OLD, windows([2 * e for e in OLD.energies or ()]))
    assert fitted.total_energies == pytest.approx([0.2 + 0.04 * b for b in SIZES])


def test_name_and_note_mention_a_refit_once() -> None:
    seen = [Observation(4, 0.01)] * 5
    again = refit_service_times(refit_energies(refit_service_times(OLD, seen), windows([0.1] * 8))[0], seen[:3])
    assert again.name == "device (refitted)"
    assert again.note == "a device; energies refitted from 38 batches; service times refitted from 3 batches"
