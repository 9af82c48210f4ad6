"""Service times learned from batches: consistent, in bounded steps, by size and length, and without flips in noise."""

from collections.abc import Callable
from dataclasses import replace
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.adaptation.drift import DriftDetector
from policies.adaptation.learned_times import LearnedTimes, ServedBatch
from policies.profile import Profile

SIZES = range(1, 17)
LENGTHS = (8, 32, 64, 128, 256)
PROFILE = Profile("device", tuple(0.01 + 0.004 * b for b in SIZES))
PADDED = replace(
    PROFILE,
    lengths=LENGTHS,
    length_service_times=tuple(tuple(0.01 + 0.00006 * b * length for length in LENGTHS) for b in SIZES),
)


def learn(learned: LearnedTimes, truth: Callable[[int], float], sizes: list[int], cv: float, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for size in sizes:
        noise = rng.gamma(cv**-2, cv**2) if cv else 1.0
        learned.observe(ServedBatch(size, truth(size) * noise))


@settings(max_examples=25)
@given(st.floats(0.4, 2.5), st.floats(-0.15, 0.15), st.floats(0.01, 0.4), st.integers(0, 100))
def test_a_profile_of_wrong_level_and_shape_is_corrected(level: float, trend: float, cv: float, seed: int) -> None:
    def truth(size: int) -> float:
        return level * PROFILE.service_time(size) * (1.0 + trend * log2(size))

    learned = LearnedTimes(PROFILE)
    learn(learned, truth, np.random.default_rng(seed).integers(1, 17, 1500).tolist(), cv, seed)
    found = learned.update()
    assert found.service_times == pytest.approx([truth(b) for b in SIZES], rel=0.02 + 0.4 * cv)
    assert learned.cv == pytest.approx(cv, abs=0.01 + 0.3 * cv)
    assert list(found.service_times) == sorted(found.service_times)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-3, 1e3)), min_size=9, max_size=60))
def test_one_batch_changes_its_size_by_a_bounded_factor(seen: list[tuple[int, float]]) -> None:
    learned = LearnedTimes(PROFILE)
    for size, factor in seen[:8]:
        learned.observe(ServedBatch(size, factor * PROFILE.service_time(size)))
    before = np.array(learned.update().service_times)
    for size, factor in seen[8:]:
        learned.observe(ServedBatch(size, factor * PROFILE.service_time(size)))
        after = np.array(learned.update().service_times)
        assert np.isfinite(after).all()
        assert (after > 0.0).all()
        assert after[size - 1] <= 5.0 * before[size - 1]
        before = after


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.1, 0.4])
def test_noise_causes_few_changes_at_first_and_hardly_any_later(cv: float) -> None:
    late = []
    for seed in range(5):
        detector, rng = DriftDetector(PROFILE), np.random.default_rng(seed)
        changes = []
        for number in range(12_000):  # ten minutes of twenty batches a second
            size = int(rng.integers(1, 9))
            detector.observe_batch(size, 2.0 * PROFILE.service_time(size) * rng.gamma(cv**-2, cv**2))
            if detector.refit():
                changes.append(number)
        assert 1 <= len(changes) <= 6
        late.append(sum(number > 1200 for number in changes))
    assert max(late) <= 2


def test_the_cost_by_size_and_longest_request_is_learned_together() -> None:
    def truth(size: int, length: float) -> float:
        return 0.005 + 0.0001 * size * length

    learned, rng = LearnedTimes(PADDED), np.random.default_rng(0)
    for _ in range(1500):
        size, length = int(rng.integers(1, 17)), float(np.clip(rng.lognormal(4.0, 0.8), 8, 256))
        learned.observe(ServedBatch(size, truth(size, length) * rng.gamma(25.0, 1 / 25.0), length))
    found = learned.update()
    for size in (1, 2, 4, 8, 16):
        for length in (32, 64, 128, 256):
            assert found.service_time(size, length) == pytest.approx(truth(size, length), rel=0.12)
    rows = np.array(found.length_service_times)
    assert (np.diff(rows, axis=0) >= 0.0).all()
    assert (np.diff(rows, axis=1) >= 0.0).all()


def test_a_batching_gain_of_the_profile_that_is_not_there_is_unlearned_beyond_the_sizes_that_are_served() -> None:
    profile = Profile("device", tuple(0.025 * b**0.85 for b in SIZES))
    learned, rng = LearnedTimes(profile), np.random.default_rng(0)
    for _ in range(400):
        size = int(rng.integers(1, 5))
        learned.observe(ServedBatch(size, 0.029 * size * rng.gamma(25.0, 1 / 25.0)))
    found = learned.update()
    assert found.service_time(4) > 3.8 * found.service_time(1)
    assert found.service_time(8) > 1.1 * profile.service_time(8) / profile.service_time(1) * found.service_time(1)


def test_a_model_without_batches_has_no_change() -> None:
    assert LearnedTimes(PROFILE).change() is None


def test_a_model_that_cannot_batch_is_learned_too() -> None:
    learned = LearnedTimes(PROFILE.truncated(1))
    learn(learned, lambda _: 2.0 * PROFILE.service_time(1), [1] * 20, 0.0)
    found = learned.change()
    assert found is not None
    assert found[0] == pytest.approx(2.0)


def test_more_lengths_than_the_grid_has_are_learned() -> None:
    lengths = tuple(range(8, 8 * 41, 8))
    rows = tuple(tuple(0.01 + 0.00006 * b * length for length in lengths) for b in SIZES)
    learned, rng = LearnedTimes(replace(PROFILE, lengths=lengths, length_service_times=rows)), np.random.default_rng(0)
    for _ in range(400):
        size, length = int(rng.integers(1, 17)), float(rng.integers(8, 320))
        learned.observe(ServedBatch(size, 2.0 * (0.01 + 0.00006 * size * length), length))
    found = learned.update()
    assert found.service_time(4, 100) == pytest.approx(2.0 * (0.01 + 0.00006 * 400), rel=0.02)
    assert len(learned._prior) == 5 * 8
