"""Refits of energies: exact from exact observations, and conservative from others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adaptation.energy_refits import EnergyWindow, better_energies, refit_energies
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
    again = refit_energies(refit_energies(OLD, windows([0.1] * 8))[0], windows([0.2] * 8))[0]
    assert again.name == "device (refitted)"
    assert again.note == "a device; energies refitted from 38 batches"
