"""Tests of the profile a server starts with: measured once and cached."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from batchwright import Model, Tensor
from policies.files import cache_folder
from policies.profile import Profile
from profiler import cache
from profiler.cache import CacheKey
from profiler.first_profile import FirstProfiles, _key, _profile_model, cold_rounds, first_profile, make_subject
from profiler.preflight import NOTHING_FOUND, Findings
from server.backends.buckets import bucket_sizes
from server.backends.executor import Batch, Completion
from server.config import load_settings
from server.energy.meters import CountingMeter, NoMeter
from server.models.images.codec import emulated_model
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from tests.support.gpu import pretend_to_have_a_gpu
from tests.support.timeline import Timeline

KEY = CacheKey("net", "Some CPU", 4, "fp32")


class KnownExecutor:
    """Completes every batch at once with a service time of one second per input."""

    name = "known"

    def __init__(self) -> None:
        self.batches = 0

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        self.batches += 1
        return completed(batch.inputs, float(len(batch.inputs)))


completed = Timeline().completed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_profile_is_measured_once_and_cached() -> None:
    executor = KnownExecutor()
    subject = make_subject(executor, emulated_model("net", 4), NoMeter())
    first = first_profile(subject, KEY, False, NOTHING_FOUND)
    ran = executor.batches
    assert ran > 0
    assert first.service_times == (1.0, 2.0, 3.0, 4.0)
    assert (first.model, first.device, first.energy_source) == ("net", "Some CPU", "none")
    assert "; fp32, torch " in first.note
    assert first_profile(subject, KEY, False, NOTHING_FOUND) == first
    assert executor.batches == ran


def test_what_was_found_before_models_were_loaded_is_logged_once_measured_and_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    findings = [Findings(("load average 9.00 on 2 cores",), ("a load average of 9.00 on 2 cores",))]
    monkeypatch.setattr("profiler.first_profile.preflight", lambda _: findings.pop())
    caplog.set_level("INFO")
    settings, profiles = (
        load_settings({"models": ["a", "b"], "device": "cpu", "max_batch_size": 4}, None),
        FirstProfiles(),
    )
    assert profiles.cached(settings, "a", 4) is None
    assert caplog.messages == []
    for name in ("a", "b"):
        caplog.clear()
        measured = profiles.cached_or_measured(settings, emulated_model(name, 4), KnownExecutor(), NoMeter())
        assert "; before the measurement: load average 9.00 on 2 cores" in measured.note
        (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        command = f"profile-model {name} --device cpu --max-batch-size 4"
        assert warning == (
            f"{name}: a load average of 9.00 on 2 cores; if the profile is wrong, measure it again: {command}"
        )
        caplog.clear()
        assert FirstProfiles().cached(settings, name, 4) == measured
        (message,) = caplog.messages
        (path,) = (cache_folder() / "profiles").glob(f"{name}-*.json")
        assert re.search(
            rf"profile of 20\d\d-.* UTC is used, {re.escape(str(path))}; delete the file, or run {command}", message
        )


def test_the_command_that_measures_again_has_the_flags_that_change_the_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, sample = tmp_path / "a model.py", tmp_path / "sample.json"
    file.write_text("from batchwright import Model\n")
    sample.write_text("{}")
    flags = {"models": [f"m={file}:M"], "device": "cpu", "optimise": "none", "stages": 2, "sample": [str(sample)]}
    settings = load_settings(flags | {"meter": "cpu"}, None)  # which is for models of other servers
    caplog.set_level("INFO")
    key = _key(settings, "m", 3)
    cache.store_profile(key, Profile("n", (1.0, 2.0, 3.0), model="m", device=key.device, source="measured"))
    FirstProfiles().cached(settings, "m", 3)
    command = f"profile-model 'm={file}:M' --device cpu --max-batch-size 3 --sample {sample} --stages 2 --optimise none"
    assert f"or run {command}, to measure it again" in caplog.text


def test_the_command_that_measures_a_model_of_another_server_again_has_its_meter() -> None:
    spec = "oip:http://127.0.0.1:8001/m"
    (settings,) = load_settings({"models": [f"m={spec}"], "meter": "cpu"}, None).by_device()
    command = f"profile-model m={spec} --meter cpu --max-batch-size 4"
    assert _profile_model(settings, CacheKey("m", settings.device, 4)) == command


def test_stages_are_measured_one_after_the_other() -> None:
    class Staged(KnownExecutor):
        """Stage s of a batch of b takes (s + 1) b seconds, the whole batch 7 b."""

        def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
            if batch.stages is None:
                assert batch.first_stage == 0
                return completed(batch.inputs, 7.0 * len(batch.inputs))
            assert batch.first_stage == 0 or set(batch.inputs) == {f"after {batch.first_stage - 1}"}
            outputs = [f"after {batch.first_stage}"] * len(batch.inputs)
            return completed(outputs, (batch.first_stage + 1.0) * len(batch.inputs))

    subject = make_subject(Staged(), emulated_model("net", 4), NoMeter())
    first = first_profile(subject, KEY, False, NOTHING_FOUND, stages=3)
    assert first.service_times == (7.0, 14.0, 21.0, 28.0)
    assert first.stage_service_times == tuple((b, 2 * b, 3 * b) for b in (1.0, 2.0, 3.0, 4.0))
    assert first.stage_overhead == pytest.approx([6 / 7] * 4)


class Sentences(Model):
    """Its samples have two shapes."""

    inputs: ClassVar = {"ids": Tensor("INT64", [-1])}
    outputs: ClassVar = {"y": Tensor("FP32", [1])}

    def samples(self) -> Sequence[dict[str, Any]]:
        return [{"ids": np.arange(length)} for length in (3, 5, 3)]


@pytest.mark.parametrize(("factor", "kept"), [(1.15, True), (0.85, True), (1.3, False), (0.7, False)], ids=str)
def test_a_model_with_the_service_times_of_the_former_one_keeps_its_profile(factor: float, kept: bool) -> None:
    settings = load_settings({"models": ["net"], "device": "cpu", "max_batch_size": 4}, None)
    before = Profile("before", tuple(factor * b for b in range(1, 5)), model="net", device="cpu")
    executor = KnownExecutor()
    found = FirstProfiles().measured_while_serving(settings, emulated_model("net", 4), executor, before)
    assert (found == before) == kept
    assert found.service_times == (before.service_times if kept else (1.0, 2.0, 3.0, 4.0))
    larger = Profile("before", (1.0, 2.0), model="net", device="cpu")
    found = FirstProfiles().measured_while_serving(settings, emulated_model("net", 4), executor, larger)
    assert found.max_batch_size == 4, "its largest batch is another"


def test_samples_of_one_shape_are_measured_and_the_note_names_it() -> None:
    class OfOneShape(KnownExecutor):
        def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
            assert {len(sample["ids"]) for sample in batch.inputs} == {3}
            return super().run(batch)

    model = Sentences()
    served = ServedModel("net", TensorCodec(model, model.samples()), (), "sentences.py", 4)
    profile = first_profile(make_subject(OfOneShape(), served, NoMeter()), KEY, False, NOTHING_FOUND)
    assert "; samples of shape 3; " in profile.note


def test_a_profile_measured_by_another_process_during_the_wait_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = KnownExecutor()
    subject = make_subject(executor, emulated_model("net", 4), NoMeter())

    @contextmanager
    def after_another(device: str) -> Iterator[None]:
        assert device == KEY.device
        cache.store_profile(
            KEY, Profile("other process", (1.0, 1.5, 2.0, 2.5), model="net", device="Some CPU", source="measured")
        )
        yield

    monkeypatch.setattr(cache, "device_lock", after_another)
    assert first_profile(subject, KEY, False, NOTHING_FOUND).name == "other process"
    assert executor.batches == 0


def test_images_exceed_the_processors_caches_and_other_samples_are_kept() -> None:
    class Copying(KnownExecutor):
        def upload(self, _: str, sample: Any) -> Any:
            return sample.copy()

    subject = make_subject(Copying(), emulated_model("net", 4), NoMeter())
    assert sum(sample.nbytes for sample in subject.samples) > 100e6
    assert len({sample.ctypes.data for sample in subject.samples}) == len(subject.samples)
    assert len(make_subject(KnownExecutor(), emulated_model("net", 4), CountingMeter()).samples) == 16
    assert cold_rounds([{"x": 1}, {"x": 2}]) == 1
    assert cold_rounds([np.zeros(4)]) == 4096


def test_on_a_device_that_pads_only_buckets_are_measured_and_the_profile_is_cut_where_it_stops_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Graphs(KnownExecutor):
        sizes = set[int]()

        def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
            self.sizes.add(len(batch.inputs))
            return completed(batch.inputs, 0.2e-3 + 0.018e-3 * len(batch.inputs))

    pretend_to_have_a_gpu(monkeypatch)
    settings, executor = load_settings({"models": ["resnet18"]}, None), Graphs()
    profile = FirstProfiles().cached_or_measured(settings, emulated_model("resnet18", 128), executor, NoMeter())
    assert executor.sizes == set(bucket_sizes(128))
    assert profile.max_batch_size == 112
    assert profile.service_times[16:20] == (profile.service_times[19],) * 4
    assert FirstProfiles().cached(settings, "resnet18", 128) == profile
    all_sizes = load_settings({"models": ["resnet18"], "max_batch_size": 128}, None)
    cached = FirstProfiles().cached(all_sizes, "resnet18", 128)
    assert cached is not None
    assert cached.max_batch_size == 128
    for optimise in ("none", "eager"):
        others = load_settings({"models": ["resnet18"], "optimise": optimise}, None)
        assert FirstProfiles().cached(others, "resnet18", 128) is None
