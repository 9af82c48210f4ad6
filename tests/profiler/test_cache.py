"""The profile cache: what finds a profile again, and what does not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from policies.files import write_atomically
from policies.profile import Profile
from profiler import cache
from profiler.cache import Key, load, slug, store

KEY = Key("net", "Some CPU (TM)", 3, "fp32, 1 threads")
PROFILE = Profile("n", (1.0, 1.5, 2.0), model="net", device="Some CPU (TM)", source="measured")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchwright" / "profiles"


def test_what_is_stored_is_found_again(folder: Path) -> None:
    assert load(KEY) is None
    store(KEY, PROFILE)
    assert load(KEY) == PROFILE
    assert [path.name for path in folder.iterdir()] == [KEY.path.name]
    assert KEY.path.name.startswith("net-some-cpu-tm-b3-")


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"device": "Some GPU"}, {"max_batch_size": 2}, {"settings": "fp32, 2 threads"}]
)
def test_another_key_is_another_profile(change: dict[str, object]) -> None:
    store(KEY, PROFILE)
    assert load(replace(KEY, **change)) is None  # type: ignore[arg-type]


def test_other_versions_are_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    store(KEY, PROFILE)
    monkeypatch.setattr(cache, "versions", lambda: {"torch": "99"})
    assert load(KEY) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b"\xff\xfe", b'{"schema": "batchwright.profile/9"}'])
def test_a_damaged_file_is_passed_over(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_bytes(content)
    assert load(KEY) is None
    assert "ignored" in caplog.text


@pytest.mark.parametrize("change", [{"model": "b"}, {"device": "b"}, {"service_times": (1.0,)}])
def test_a_profile_of_something_else_under_that_name_is_passed_over(change: dict[str, object]) -> None:
    store(KEY, replace(PROFILE, **change))  # type: ignore[arg-type]
    assert load(KEY) is None


def test_storing_again_replaces() -> None:
    store(KEY, PROFILE)
    store(KEY, replace(PROFILE, note="again"))
    found = load(KEY)
    assert found is not None
    assert found.note == "again"


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "batchwright").write_text("a file where a folder should be")
    store(KEY, PROFILE)
    assert "not kept" in caplog.text
    assert load(KEY) is None


def test_without_the_variable_the_home_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_slugs_are_fit_for_file_names() -> None:
    assert slug("  NVIDIA H200 / NVL (x2) ") == "nvidia-h200-nvl-x2"


def test_one_process_measures_on_a_device_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = "import sys; from profiler import cache\nwith cache.exclusive('A 100'): print('in', flush=True); input()"
    with cache.exclusive("B 200"), cache.exclusive("A 100"):
        process = subprocess.Popen(
            [sys.executable, "-c", other],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        assert "another process measures on A 100; waiting" in process.stderr.readline()
    assert process.stdout.readline() == "in\n", "as soon as this one has finished"
    process.kill()
    process.communicate()
    with cache.exclusive("A 100"):
        pass  # the lock ended with the process


def test_without_a_place_for_the_lock_the_measurement_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "batchwright").write_text("a file, no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache.exclusive("A 100"):
        assert "no lock on A 100" in caplog.text
