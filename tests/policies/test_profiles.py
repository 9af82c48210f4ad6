"""The shipped profiles: metadata, and agreement with their sources."""

import json
from importlib import resources
from typing import Any

import pytest

from policies.profile import fit_affine, load_profile, parse_profile, shipped_profiles

FITS = {  # name: slope and intercept, ms, and largest error of the affine fits in the survey that the tables come from
    "resnet50-a100-trt-fp16": (0.0556, 0.721, 0.03),
    "resnet50-a100-trt-tf32": (0.1247, 0.953, 0.04),
    "resnet50-a30-trt-fp16": (0.1183, 0.740, 0.07),
    "resnet50-a10-trt-fp16": (0.1863, 0.581, 0.06),
    "resnet50-v100-trt-fp16": (0.1466, 2.115, 0.09),
    "resnet50-l4-int8": (0.0681, 0.276, 0.02),
    "resnet50-a100-pcie-int8": (0.0271, 0.470, 0.03),
    "resnet50-t4-fp16": (0.621, 0.676, 0.01),
    "googlenet-p40-int8": (0.1437, 1.520, 0.04),
    "googlenet-h200-prior": (0.0090, 0.21, 0.07),
}
BOARD_POWER = {  # W, at batch sizes 1, 2, 4, 8, 64, 128
    "resnet50-v100-mixed": (120, 109, 132, 153, 274, 285),
    "resnet50-p4-int8": (44, 44, 49, 57, 63, 62),
}


def raw(name: str) -> Any:
    return json.loads((resources.files("policies") / "profiles" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_has_its_name_and_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.model
    assert profile.device
    assert profile.source in {"literature", "modelled", "measured"}
    assert len(profile.note) > 60
    assert profile.capacity > 0.0
    assert parse_profile(profile.to_json(), name) == profile


@pytest.mark.parametrize("name", shipped_profiles())
def test_energies_and_their_source_are_given_together(name: str) -> None:
    profile = load_profile(name)
    assert (profile.energies is None) == (profile.energy_source == "none")
    if profile.energies and profile.total_energies:
        assert all(e <= total for e, total in zip(profile.energies, profile.total_energies, strict=True))


@pytest.mark.parametrize("name", FITS)
def test_the_tables_have_the_fits_of_the_survey(name: str) -> None:
    content = raw(name)
    milliseconds = [1e3 * seconds for seconds in content["service_time_s"]]
    slope, intercept, error = FITS[name]
    found = [slope * b + intercept for b in content["batch_size"]]
    worst = max(abs(f / ms - 1.0) for f, ms in zip(found, milliseconds, strict=True))
    # fits and errors are rounded to two figures there; the priors are two-figure numbers, off by up to 2.5 % more
    assert worst < error + (0.025 if name.endswith("prior") else 0.0075)


def test_the_host_bound_profile_is_not_affine() -> None:
    content = raw("resnet50-a100-eager-amp")
    fit = fit_affine(content["batch_size"], content["service_time_s"])
    assert fit.max_relative_error == pytest.approx(0.19, abs=0.01)


@pytest.mark.parametrize("name", BOARD_POWER)
def test_literature_energies_are_board_power_times_service_time_and_the_note_warns(name: str) -> None:
    profile = load_profile(name)
    assert "board power" in profile.note
    assert profile.energies == profile.total_energies
    for b, watts in zip((1, 2, 4, 8, 64, 128), BOARD_POWER[name], strict=True):
        # six figures are kept
        assert (profile.energy(b) or 0.0) / profile.service_time(b) == pytest.approx(watts, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "slope", "intercept"), [("resnet50-v100-mixed", 41.4, 175), ("resnet50-p4-int8", 37.7, 42)]
)
def test_literature_energies_have_the_surveys_fits(name: str, slope: float, intercept: float) -> None:
    content = raw(name)
    fit = fit_affine(content["batch_size"], [1e3 * joules for joules in content["energy_j"]])
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept), rel=0.005)


def test_the_prior_is_marked_as_modelled() -> None:
    profile = load_profile("googlenet-h200-prior")
    assert (profile.source, profile.energy_source, profile.idle_power) == ("modelled", "modelled", 110.0)
    assert "nothing measured" in profile.note
    assert profile.energies is not None
    assert profile.total_energies is not None
    for b in (1, 8, 32, 64, 256):  # idle power x service time is what lies between the two, in six figures
        above = profile.total_energies[b - 1] - profile.energies[b - 1]
        assert above == pytest.approx(110.0 * profile.service_time(b), rel=1e-4)
