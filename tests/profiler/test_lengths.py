"""Tests of service times by batch size and length."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from batchwright import Model, Tensor
from policies.profile import parse_profile
from profiler.cache import CacheKey, load_cached_profile
from profiler.first_profile import first_profile, make_subject
from profiler.lengths import power_of_two_sizes
from profiler.preflight import NOTHING_FOUND
from server.backends.executor import Batch, Completion
from server.energy.meters import NoMeter
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from tests.support.timeline import Timeline

completed = Timeline().completed


class Known:
    """A batch of b, the longest of length n, takes 2 + b n seconds."""

    name = "known"

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        return completed(batch.inputs, 2.0 + len(batch.inputs) * max(map(self._length, batch.inputs)))

    @staticmethod
    def _length(sample: Any) -> int:
        return len(sample["x"])


class Padded(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"y": Tensor("FP32")}
    lengths = [4, 10, 40]


def test_the_profile_of_a_padded_model_has_times_by_its_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model: ServedModel = ServedModel("m", TensorCodec(Padded()), (), "m.py", 6)
    key = CacheKey("m", "Some CPU", 6, "fp32")
    profile = first_profile(make_subject(Known(), model, NoMeter()), key, False, NOTHING_FOUND)
    assert profile.lengths == (4, 10, 40)
    for size in range(1, 7):
        assert profile.service_time(size) == 2.0 + size * 10, "the middle length"
        assert profile.service_time(size, 25) == pytest.approx(2.0 + size * 25), "between two measured lengths"
        assert profile.min_service_time(size) == profile.service_time(size, 4)
        assert profile.max_service_time(size) == profile.service_time(size, 40)
    assert "service_time_s is of samples of length 10" in profile.note
    assert load_cached_profile(key) == profile == parse_profile(profile.to_json(), "its own")


def test_measuring_by_length_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model: ServedModel = ServedModel("m", TensorCodec(Padded()), (), "m.py", 6)
    with caplog.at_level("INFO", "batchwright.profiler"):
        key = CacheKey("m", "Some CPU", 6, "fp32")
        first_profile(make_subject(Known(), model, NoMeter()), key, False, NOTHING_FOUND)
    assert [line for line in caplog.messages if "by length" in line and "100 % done" in line]


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert power_of_two_sizes(1) == (1,)
    assert power_of_two_sizes(8) == (1, 2, 4, 8)
    assert power_of_two_sizes(12) == (1, 2, 4, 8, 12)
