"""Service times by batch size and length, as an executor tells them."""

import asyncio
from pathlib import Path

import pytest

from policies.profile import parse_profile
from profiler.cache import Key, load
from profiler.first import first_profile, subject_of
from profiler.lengths import rungs
from server.backends.executor import Batch, Completion
from server.energy.meters import NoMeter
from server.models.model import ServedModel
from server.models.text import TextSample
from server.models.text_codec import TextCodec
from tests.profiler.test_first import completed


class Known:
    """A batch of b, the longest of length n, takes 2 + b n seconds."""

    name = "known"

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        return completed(batch.inputs, 2.0 + len(batch.inputs) * max(map(self._length, batch.inputs)))

    @staticmethod
    def _length(text: TextSample) -> int:
        assert text.ignore_eos == bool(text.max_new_tokens), "it must not end before its time"
        return text.max_new_tokens or len(text.tokens)


@pytest.mark.parametrize("generates", [True, False])
def test_a_text_models_first_profile_tells_times_by_length(
    generates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    codec = TextCodec(259, 40, 40 if generates else 0, 0, None)
    model: ServedModel = ServedModel("m", codec, (), "random", 6)
    key = Key("m", "Some CPU", 6, "fp32")
    profile = first_profile(subject_of(Known(), model, NoMeter()), 6, key, tunes_by_size=False)
    assert profile.lengths == (1, 4, 16, 20, 40)
    for size in range(1, 7):
        assert profile.service_time(size) == 2.0 + size * 20, "the middle one"
        assert profile.service_time(size, 16) == pytest.approx(2.0 + size * 16)
        assert profile.service_time(size, 30) == pytest.approx(2.0 + size * 30), "between two that were measured"
    said = "20 generated tokens after a prompt of 16" if generates else "20 tokens"
    assert f"service_time_s is of texts of {said}" in profile.note
    assert load(key) == profile == parse_profile(profile.to_json(), "its own")


def test_measuring_by_length_which_takes_longest_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model: ServedModel = ServedModel("m", TextCodec(259, 40, 0, 0, None), (), "random", 6)
    with caplog.at_level("INFO", "batchwright.profiler"):
        first_profile(subject_of(Known(), model, NoMeter()), 6, Key("m", "Some CPU", 6, "fp32"), tunes_by_size=False)
    assert [line for line in caplog.messages if "by length" in line and "100 per cent done" in line]


def test_sizes_go_up_in_octaves_to_the_largest() -> None:
    assert rungs(1) == (1,)
    assert rungs(8) == (1, 2, 4, 8)
    assert rungs(12) == (1, 2, 4, 8, 12)
