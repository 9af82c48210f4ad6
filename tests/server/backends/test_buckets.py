"""Buckets, profiles that are padded to them, and the largest batch that is worth its time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.profile import Profile
from server.backends.buckets import bucket_sizes, earned_batch_size, padded, pads_to_buckets
from server.models.sources import source_of
from tests.support.gpu import pretend_to_have_a_gpu


def test_there_are_20_buckets_up_to_128_and_12_up_to_32() -> None:
    assert bucket_sizes(128) == (1, 2, 3, 4, 6, 8, 12, *range(16, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
    assert bucket_sizes(32) == bucket_sizes(128)[:12]


@given(st.integers(1, 4096))
def test_buckets_ascend_to_the_largest_batch_by_a_half_and_above_16_by_a_quarter(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(
        above <= (1.25 if below >= 16 else 1.5) * below or above == below + 1 for below, above in pairwise(sizes)
    )
    assert len(sizes) <= 41


def test_a_padded_profile_has_the_values_of_the_bucket_of_each_size() -> None:
    times = tuple(float(b) for b in range(1, 23))
    profile = padded(Profile("p", times, cvs=times, energies=times, total_energies=times, cpu_times=times))
    expected = (1.0, 2.0, 3.0, 4.0, *[6.0] * 2, *[8.0] * 2, *[12.0] * 4, *[16.0] * 4, *[20.0] * 4, *[22.0] * 2)
    assert (
        profile.service_times
        == profile.cvs
        == profile.energies
        == profile.total_energies
        == profile.cpu_times
        == expected
    )
    assert padded(profile) == profile
    assert padded(Profile("p", times)).energies is None


def affine(fixed: float, each: float, largest: int = 128) -> Profile:
    return Profile("p", tuple(fixed + each * b for b in range(1, largest + 1)))


def test_the_largest_batch_is_the_one_above_which_throughput_gains_less_than_two_percent() -> None:
    profile = affine(0.2e-3, 0.018e-3)
    earned = earned_batch_size(profile)
    throughput = [b / t for b, t in enumerate(profile.service_times, 1)]
    assert throughput[-1] <= 1.02 * throughput[earned - 1]
    below = max(size for size in bucket_sizes(128) if size < earned)
    assert throughput[-1] > 1.02 * throughput[below - 1]


def test_a_device_without_a_gain_from_batching_serves_single_requests() -> None:
    assert earned_batch_size(affine(1e-6, 1e-3)) == 1


def test_a_dip_of_throughput_between_buckets_does_not_end_the_search() -> None:
    times = [0.2e-3 + 0.018e-3 * b for b in range(1, 129)]
    times[20 - 1] *= 1.2  # as where the tiles of a network wrap over the processors
    assert earned_batch_size(Profile("p", tuple(times))) == earned_batch_size(affine(0.2e-3, 0.018e-3))


@pytest.mark.parametrize(
    ("spec", "stages", "optimise", "pads"),
    [
        ("resnet18", None, "auto", True),
        ("resnet18", 1, "eager", True),
        ("resnet18", None, "none", False),
        ("resnet18", 2, "auto", False),
        ("oip:http://127.0.0.1:1/m", None, "auto", False),
    ],
)
def test_whole_networks_of_images_are_padded_on_cuda(
    spec: str, stages: int | None, optimise: str, pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not pads_to_buckets("cpu", source_of(spec), stages, optimise)
    assert not pads_to_buckets("emulated:googlenet-tesla-p4", source_of(spec), stages, optimise)
    pretend_to_have_a_gpu(monkeypatch)
    assert pads_to_buckets("auto", source_of(spec), stages, optimise) == pads
