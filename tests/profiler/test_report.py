"""Tests of the text report of a profile."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from policies.charts.plots import plot_profile
from policies.profile import Profile
from profiler.energy_plan import full_energy_plan, quick_energy_plan
from profiler.energy_sweep import EnergySweep, with_energy
from profiler.report import profile_table, summary
from tests.support.virtual_device import VirtualDevice

PROFILE = Profile("n", (0.002, 0.003, 0.004), model="net", device="here", cvs=(0.01,) * 3)


def rendered(profile: Profile, sweep: EnergySweep | None = None) -> str:
    text = StringIO()
    console = Console(file=text, width=200)
    console.print(profile_table(profile, (1, 3), sweep))
    console.print("\n".join(summary(profile, sweep)), highlight=False)
    return text.getvalue()


def measured(quick: bool = False) -> tuple[Profile, EnergySweep]:
    known = VirtualDevice(lambda b: 200.0 + 10.0 * b, lambda b: 0.001 + 0.001 * b)
    plan = quick_energy_plan if quick else full_energy_plan
    profile, sweep = with_energy(PROFILE, known.rig(), plan, lambda share: None)
    assert sweep is not None
    return profile, sweep


def test_times_and_their_fits_are_shown_without_energies() -> None:
    text = rendered(PROFILE)
    assert "affine    l(b) = 1 b + 1 ms, within 0.0%" in text
    assert "ζ" not in text


def test_energies_come_with_standard_errors_idle_power_and_the_check() -> None:
    text = rendered(*measured())
    # 110 W above idle for 2 ms, and 210 W in all
    assert "220 ± 0." in text
    assert "420 ± 0." in text
    assert "ζ(b) is above idle; ± is the standard error" in text
    assert "idle      100.0 ± 0.0 W (before 100.0" in text
    assert "load 0.50" in text
    assert "predicted from idle power and batches of 3" in text


def test_a_single_window_shows_no_standard_error() -> None:
    text = rendered(*measured(quick=True))
    row = next(line for line in text.splitlines() if line.startswith("│ 1 "))
    assert "±" not in row
    assert "load 0.50" not in text


@pytest.mark.parametrize("totals", [None, (0.4, 0.5, 0.6)])
def test_energies_of_the_profile_are_shown_without_a_sweep(totals: tuple[float, ...] | None) -> None:
    text = rendered(replace(PROFILE, energies=(0.1, 0.2, 0.3), total_energies=totals))
    assert "affine    ζ(b) = 100 b" in text
    assert ("total" in text) is (totals is not None)


def test_energies_below_the_resolution_of_the_sensor_are_not_fitted() -> None:
    assert "ζ(b) is 0 at some sizes" in rendered(replace(PROFILE, energies=(0.0, 0.2, 0.3)))


def test_marginal_and_total_energies_are_drawn_even_if_a_marginal_energy_is_0(tmp_path: Path) -> None:
    profile = replace(PROFILE, energies=(0.0, 0.2, 0.3), total_energies=(0.4, 0.5, 0.6))
    plot_profile(profile, tmp_path / "three.svg")
    text = (tmp_path / "three.svg").read_text()
    plot_profile(replace(profile, total_energies=profile.energies), tmp_path / "two.svg")
    assert text.count('id="axes_') == 3
    assert (tmp_path / "two.svg").read_text().count('id="axes_') == 2
