import json
from pathlib import Path
from typing import Any

import pytest

from policies.profile import fit_affine, fit_isotonic, load_profile, parse_profile, shipped_profiles
from policies.types import SpecError

MINIMAL: dict[str, Any] = {
    "schema": "batchwright.profile/1",
    "name": "x",
    "batch_size": [1, 2, 4],
    "service_time_s": [0.1, 0.2, 0.3],
}


def parsed(**changes: Any) -> Any:
    return parse_profile(json.dumps(MINIMAL | changes), "x.json")


def test_the_p4_profiles_have_the_papers_fits() -> None:
    p4, slow = load_profile("googlenet-tesla-p4"), load_profile("googlenet-tesla-p4-x10")
    for b in range(1, 33):
        assert p4.service_time(b) == pytest.approx((0.3051 * b + 1.0524) / 1e3, rel=1e-9)
        assert p4.energy(b) == pytest.approx((19.899 * b + 19.603) / 1e3, rel=1e-9)
        assert slow.service_time(b) == pytest.approx(10 * p4.service_time(b), rel=1e-9)
        assert slow.energy(b) == pytest.approx(10 * (p4.energy(b) or 0), rel=1e-9)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_loads_and_names_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.note) > 20


def test_sizes_are_interpolated_and_not_extrapolated() -> None:
    assert parsed().service_times == pytest.approx((0.1, 0.2, 0.25, 0.3))


def test_a_profile_is_equal_after_writing_and_reading(tmp_path: Path) -> None:
    profile = parsed(energy_j=[1, 2, 3], stage_service_time_s=[[0.06, 0.04], [0.1, 0.1], [0.2, 0.1]], idle_power_w=7)
    path = tmp_path / "p.json"
    path.write_text(profile.to_json())
    assert load_profile(str(path)) == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, "schema"),
        ({"batch_size": [2, 4, 8]}, "ascend from 1"),
        ({"batch_size": [1, 4, 2]}, "ascend from 1"),
        ({"batch_size": [1, 2]}, "3 values for 2"),
        ({"service_time_s": [0.1, 0.0, 0.3]}, "service_time_s.1: .*greater than or equal to 0.000000001, not 0.0"),
        ({"service_time_s": [0.1, None, 0.3]}, "service_time_s.1"),
        ({"energy_j": [0.1]}, "energy_j has 1 values"),
        ({"energy_j": [0.1, -1, 2]}, "energy_j.1"),
        ({"batchsize": 3}, "batchsize"),
        ({"stage_service_time_s": [[1], [1, 2], [1]]}, "the same number of stages"),
        ({"stage_service_time_s": [[], [], []]}, "stage_service_time_s.0"),
        ({"length": [8, 16]}, "go together"),
        ({"length_service_time_s": [[1], [1], [1]]}, "go together"),
        ({"length": [16, 8], "length_service_time_s": [[1, 2]] * 3}, "length must ascend"),
        ({"length": [0, 8], "length_service_time_s": [[1, 2]] * 3}, "length.0"),
        ({"length": [8, 16], "length_service_time_s": [[1, 2], [1], [1, 2]]}, "1 values for 2 lengths"),
        ({"length": [8, 16], "length_service_time_s": [[1, 2]] * 2}, "2 values for 3 batch sizes"),
    ],
)
def test_a_malformed_file_gives_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parsed(**changes)
    assert "x.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}'])
def test_text_that_is_not_a_profile_is_malformed(text: str) -> None:
    with pytest.raises(SpecError, match="malformed"):
        parse_profile(text, "x.json")


def test_an_unknown_name_lists_the_shipped_profiles() -> None:
    with pytest.raises(SpecError, match="googlenet-tesla-p4"):
        load_profile("no-such-profile")


def test_a_profile_cannot_be_truncated_beyond_its_sizes() -> None:
    assert parsed().truncated(2).service_times == (0.1, 0.2)
    for size in (0, 5):
        with pytest.raises(SpecError, match=r"outside 1\.\.4"):
            parsed().truncated(size)


def test_capacity_is_that_of_the_best_size_not_the_largest() -> None:
    assert parsed(service_time_s=[0.1, 0.1, 10.0]).capacity == pytest.approx(20.0)
    assert parsed(service_time_s=[0.1, 0.1, 10.0]).capacity == pytest.approx(20.0)


def test_the_affine_fit_recovers_a_line_and_reports_the_error_of_other_data() -> None:
    sizes = [1, 2, 4, 8]
    line = fit_affine(sizes, [3 * b + 2 for b in sizes])
    assert (line.slope, line.intercept) == pytest.approx((3, 2))
    assert line.max_relative_error < 1e-12
    assert line.at(16) == pytest.approx(50)
    assert fit_affine(sizes, [1, 1, 1, 8]).max_relative_error > 0.2


def test_the_isotonic_fit_pools_decreasing_values() -> None:
    fit = fit_isotonic([1.0, 3.0, 2.9, 4.0])
    assert list(fit.values) == sorted(fit.values)
    # the pair pools at its mean weighted by 1 / y^2: (3/9 + 2.9/8.41) / (1/9 + 1/8.41)
    assert fit.values[1] == pytest.approx(fit.values[2]) == pytest.approx(2.9483, abs=1e-4)


STAGED = {"stage_service_time_s": [[0.06, 0.04], [0.1, 0.12], [0.2, 0.14]]}


def test_stage_times_are_interpolated_truncated_and_summed() -> None:
    profile = parsed(**STAGED)
    assert profile.stages == 2
    assert profile.stage_service_times[2] == pytest.approx((0.15, 0.13))
    assert profile.truncated(2).stage_service_times == ((0.06, 0.04), (0.1, 0.12))
    assert profile.span(2) == pytest.approx(0.22)
    assert [profile.span(4, 0, 1), profile.span(4, 1), profile.span(4, 1, 9), profile.span(4, 1, 1)] == pytest.approx(
        [0.2, 0.14, 0.14, 0.0]
    )


def test_a_whole_batch_has_no_stage_overhead() -> None:
    profile = parsed(**STAGED)
    assert profile.stage_overhead == pytest.approx((1.0, 1.1, 1.12, 0.34 / 0.3))
    assert profile.launch_time(2) == 0.2
    assert profile.launch_time(2, 0, 2) == 0.2
    assert profile.launch_time(2, 0, 1) == pytest.approx(0.1)


def test_a_profile_without_stages_has_one_and_can_be_split_into_equal_ones() -> None:
    profile = parsed()
    assert (profile.stages, profile.span(2), profile.stage_overhead) == (1, 0.2, (1.0, 1.0, 1.0, 1.0))
    four = profile.in_stages(4)
    assert (four.stages, four.span(2, 1, 3), four.service_times) == (4, pytest.approx(0.1), profile.service_times)
    with pytest.raises(SpecError, match="0 stages"):
        profile.in_stages(0)


LENGTHS = {"length": [10, 20, 40], "length_service_time_s": [[0.1, 0.2, 0.3], [0.2, 0.3, 0.5], [0.4, 0.7, 1.3]]}


def test_times_by_length_are_interpolated_by_size_and_written() -> None:
    profile = parsed(**LENGTHS)
    assert profile.lengths == (10, 20, 40)
    assert profile.length_service_times is not None
    assert profile.length_service_times[2] == pytest.approx((0.3, 0.5, 0.9))
    assert parse_profile(profile.to_json(), "again") == profile
    assert profile.truncated(2).length_service_times == ((0.1, 0.2, 0.3), (0.2, 0.3, 0.5))


@pytest.mark.parametrize(
    ("length", "expected"), [(None, 0.2), (1, 0.2), (10, 0.2), (15, 0.25), (20, 0.3), (30, 0.4), (40, 0.5), (60, 0.7)]
)
def test_a_service_time_by_length_is_linear_above_the_least_length(length: float | None, expected: float) -> None:
    assert parsed(**LENGTHS).service_time(2, length) == pytest.approx(expected)


def test_a_length_has_no_effect_without_lengths() -> None:
    assert parsed().service_time(2, 1000) == parsed().service_time(2)


def test_the_least_and_the_greatest_service_time_are_those_of_the_ends_of_the_lengths() -> None:
    profile = parsed(**LENGTHS)
    assert (profile.min_service_time(2), profile.max_service_time(2)) == pytest.approx((0.2, 0.5))
    assert parsed().min_service_time(2) == parsed().max_service_time(2) == parsed().service_time(2)


@pytest.mark.parametrize("generates", [True, False])
def test_a_key_of_earlier_versions_is_ignored(generates: bool) -> None:
    profile = parsed(**LENGTHS, generates=generates)
    assert profile == parsed(**LENGTHS)
    assert "generates" not in profile.to_json()
