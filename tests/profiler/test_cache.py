"""Tests of the profile cache: keys, damaged files, and the lock on a device."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from policies.files import write_atomically
from policies.profile import Profile
from profiler import cache
from profiler.cache import CacheKey, device_lock, load_cached_profile, measured_at, sample_settings, slug, store_profile

KEY = CacheKey("net", "Some CPU (TM)", 3, "fp32, 1 threads")
PROFILE = Profile("n", (1.0, 1.5, 2.0), model="net", device="Some CPU (TM)", source="measured")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchwright" / "profiles"


def test_a_stored_profile_is_loaded_again(folder: Path) -> None:
    assert load_cached_profile(KEY) is None
    store_profile(KEY, PROFILE)
    assert load_cached_profile(KEY) == PROFILE
    assert [path.name for path in folder.iterdir()] == [KEY.path.name]
    assert KEY.path.name.startswith("net-some-cpu-tm-b3-")


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"device": "Some GPU"}, {"max_batch_size": 2}, {"settings": "fp32, 2 threads"}]
)
def test_a_different_key_is_a_miss(change: dict[str, object]) -> None:
    store_profile(KEY, PROFILE)
    assert load_cached_profile(replace(KEY, **change)) is None  # type: ignore[arg-type]


def test_different_package_versions_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store_profile(KEY, PROFILE)
    monkeypatch.setattr(cache, "package_versions", lambda names: dict.fromkeys(names, "99"))
    assert load_cached_profile(KEY) is None


def test_a_package_that_the_model_does_not_use_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    key = replace(KEY, packages=("onnxruntime",))
    store_profile(key, PROFILE)
    monkeypatch.setattr(cache, "_version", lambda name: "99" if name.startswith("torch") else "none")
    assert key.path == replace(KEY, packages=("onnxruntime",)).path
    monkeypatch.setattr(cache, "_version", lambda name: "99" if name == "onnxruntime" else "none")
    assert load_cached_profile(key) is None


def test_a_user_without_a_home_has_no_cache_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert load_cached_profile(KEY) is None
    assert not store_profile(KEY, PROFILE)
    assert "no home folder; set HOME or XDG_CACHE_HOME" in caplog.text
    with device_lock("a device"):
        assert "no lock on a device" in caplog.text
    assert measured_at(KEY) == ""


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe", b'{"schema": "batchwright.profile/9"}'])
def test_a_damaged_file_is_ignored(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_bytes(content)
    assert load_cached_profile(KEY) is None
    assert "ignored" in caplog.text


@pytest.mark.parametrize("change", [{"model": "b"}, {"device": "b"}, {"service_times": (1.0,)}])
def test_a_profile_that_does_not_match_its_key_is_ignored(change: dict[str, object]) -> None:
    store_profile(KEY, replace(PROFILE, **change))  # type: ignore[arg-type]
    assert load_cached_profile(KEY) is None


def test_storing_again_replaces_the_profile() -> None:
    store_profile(KEY, PROFILE)
    store_profile(KEY, replace(PROFILE, note="again"))
    found = load_cached_profile(KEY)
    assert found is not None
    assert found.note == "again"


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "batchwright").write_text("a file where a folder should be")
    store_profile(KEY, PROFILE)
    assert "not cached" in caplog.text
    assert load_cached_profile(KEY) is None


def test_without_xdg_cache_home_the_home_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert KEY.path.parent == tmp_path / "home" / ".cache" / "batchwright" / "profiles"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_slugs_are_valid_file_names() -> None:
    assert slug("  NVIDIA H200 / NVL (x2) ") == "nvidia-h200-nvl-x2"


def test_one_process_measures_on_a_device_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = "import sys; from profiler import cache\nwith cache.device_lock('A 100'): print('in', flush=True); input()"
    with cache.device_lock("B 200"), cache.device_lock("A 100"):
        process = subprocess.Popen(
            [sys.executable, "-c", other],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        assert "another process is measuring on A 100; waiting" in process.stderr.readline()
    assert process.stdout.readline() == "in\n", "once this process has released the lock"
    process.kill()
    process.communicate()
    with cache.device_lock("A 100"):
        pass  # the lock ended with the process


def test_a_measurement_runs_without_a_lock_if_its_file_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "batchwright").write_text("a file, no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache.device_lock("A 100"):
        assert "no lock on A 100" in caplog.text


def test_a_sample_of_a_class_is_keyed_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("a")
    first = sample_settings(Path(f"{file}:Mine"))
    file.write_text("b")
    assert first.startswith("sample ")
    assert first != sample_settings(Path(f"{file}:Mine"))
