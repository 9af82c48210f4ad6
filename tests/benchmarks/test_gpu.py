"""The stages of benchmarks/gpu.py and their records; the measurement itself needs a GPU (make gpu)."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import MODELS, STAGES, find_gpu, next_stage, parts_of, profile_of, run_stage
from benchmarks.support.gpu_parts import Part, is_done, read_record, run_parts, write_record
from policies.types import SpecError

A, B = Part("a", 1.0), Part("b", 3.0)


def script(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", f"from benchmarks.support.gpu_parts import emit\n{text}"]


def run(record: dict[str, Any], scripts: dict[str, str], seconds: float = 60.0, repeat: bool = False) -> list[str]:
    """Run parts with these scripts; return the names of those that ran."""
    ran: list[str] = []

    def command(part: Part, limit: float) -> list[str]:
        ran.append(part.name)
        return script(scripts[part.name])

    parts = [Part(name, 1.0) for name in scripts]
    run_parts(record, parts, command, time.monotonic() + seconds, lambda: None, repeat)
    return ran


def test_results_of_all_parts_are_kept_although_one_fails_and_one_crashes() -> None:
    record: dict[str, Any] = {}
    crash = "import os, signal; emit('x', 3); os.kill(os.getpid(), signal.SIGSEGV)"
    run(record, {"a": "emit('x', [1]); emit('x', [1, 2])", "b": "emit('x', 2); 1 / 0", "c": crash, "d": "emit('y', 4)"})
    parts = record["parts"]
    assert [parts[name]["results"] for name in "abcd"] == [{"x": [1, 2]}, {"x": 2}, {"x": 3}, {"y": 4}]
    assert [parts[name]["done"] for name in "abcd"] == [True, False, False, True]
    assert "ended with code 1" in parts["b"]["failed"]
    assert "ZeroDivisionError" in parts["b"]["failed"]
    assert "ended with code -11" in parts["c"]["failed"]


def test_a_part_that_hangs_is_stopped_with_what_it_started_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.support.gpu_parts._GRACE", 0.0)
    record: dict[str, Any] = {}
    child = (
        "import subprocess, sys; emit('x', 1); subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    run(record, {"a": child, "b": "emit('y', 2)"}, seconds=8.0)
    assert record["parts"]["a"]["results"] == {"x": 1}
    assert "was stopped after" in record["parts"]["a"]["failed"]
    assert record["parts"]["b"]["done"]


def test_a_run_goes_on_where_the_record_ends_and_repeats_a_failed_part_once() -> None:
    record: dict[str, Any] = {}
    scripts = {"a": "emit('x', 1)", "b": "1 / 0"}
    assert run(record, scripts) == ["a", "b"]
    assert run(record, scripts) == ["b"]
    assert is_done(record, [A, B])
    assert run(record, scripts) == []
    assert run(record, scripts, repeat=True) == ["b"]
    scripts["b"] = "emit('x', 2)"
    run(record, scripts, repeat=True)
    assert record["parts"]["b"]["done"]
    assert "failed" not in record["parts"]["b"]


def test_without_time_a_part_is_not_started_and_is_left_for_the_next_run() -> None:
    record: dict[str, Any] = {}
    assert run(record, {"a": "emit('x', 1)"}, seconds=0.0) == []
    assert record["parts"]["a"] == {"failed": "no time was left for it"}
    assert not is_done(record, [A])


def test_time_is_divided_by_weight_among_the_parts_that_are_left() -> None:
    limits: list[float] = []

    def command(part: Part, limit: float) -> list[str]:
        limits.append(limit)
        return script("")

    run_parts({}, [A, B], command, time.monotonic() + 410.0, lambda: None)
    assert limits[0] == pytest.approx(100.0, rel=0.02)
    assert limits[1] > 350.0  # the first ended early


def test_the_records_are_at_most_eight_files_and_the_next_stage_follows_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {"schema": "batchwright.profile/1", "name": "n", "batch_size": [1], "service_time_s": [0.001]}
    monkeypatch.setattr(gpu, "python", lambda *arguments: script(f"emit('profile', {profile!r})"))
    arguments = argparse.Namespace(models=MODELS, max_batch_size=4, rehearse=True)
    for stage in STAGES:
        assert next_stage(tmp_path) == stage
        assert run_stage(stage, tmp_path, arguments, "GPU", time.monotonic() + 60.0, repeat=False)
    assert next_stage(tmp_path) is None
    assert next_stage(tmp_path, ["resnet18"]) == "A"
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [
        "googlenet.profile.json", "report.md", "resnet50.profile.json", "stage-a.json", "stage-b.json", "stage-c.json"
    ]  # fmt: skip
    assert profile_of("resnet50", tmp_path).service_times == (0.001,)


def test_without_a_profile_the_message_names_the_stage_that_measures_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="run stage B first: make gpu STAGE=B"):
        profile_of("resnet50", tmp_path)


def test_a_folder_without_records_gets_those_of_earlier_runs(tmp_path: Path) -> None:
    earlier, folder = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    folder.mkdir()
    write_record(earlier / "stage-a.json", {"parts": {"tests": {"done": True}}})
    gpu._continue_from(earlier, folder)
    assert read_record(folder / "stage-a.json")["parts"]["tests"]["done"]
    write_record(earlier / "stage-a.json", {})
    gpu._continue_from(earlier, folder)
    assert read_record(folder / "stage-a.json")["parts"]


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "stage-a.json").write_text('{"parts": ')
    assert read_record(tmp_path / "stage-a.json") == {}
    assert next_stage(tmp_path) == "A"


def test_every_part_of_every_stage_can_be_run_by_name() -> None:
    kinds = {part.name.partition(":")[0] for stage in STAGES for part in parts_of(stage, ["m"])}
    assert kinds == {"tests", "uploads", "kernels", "profile", "policies", "http"}


def test_without_a_gpu_it_prints_a_message_and_succeeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_gpu() is not None:
        pytest.skip("this machine has a GPU: use make gpu")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert "nothing to measure; NVIDIA's driver has no GPU" in capsys.readouterr().out
