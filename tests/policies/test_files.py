"""Input files: every error is one line. Output files: written atomically."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policies import files
from policies.files import MAX_BYTES, check_writable, open_atomically, read_text, write_atomically
from policies.objectives.table import load_table
from policies.profile import load_profile
from policies.types import SpecError

Load = Callable[[str], Any]
PROFILE = {"schema": "batchwright.profile/1", "name": "x", "batch_size": [1, 2, 4], "service_time_s": [0.1, 0.2, 0.3]}
ROW = {"arrival_rate_hz": 100.0, "load": 0.1, "w2": 1.0, "batch_size": [0, 1, 2]}
POLICY = {"schema": "batchwright.policy/1", "profile": "p", "w1": 1.0, "w2": 1.0, "max_batch_size": 2, "rows": [ROW]}
BOTH: list[Load] = [load_profile, load_table]


def rejection(load: Load, path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load(str(path))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 2000
    return text


def row(**changes: Any) -> dict[str, Any]:
    return {"rows": [ROW | changes]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "batchwright.policy/1"}, "schema"),
        ({"note\n": 1}, "Extra inputs"),
        ({"batch_size": [1, 2, 5000]}, "4096, not 5000"),
        ({"batch_size": list(range(1, 5000))}, "at most 4096"),
        ({"batch_size": [1, 2, 2]}, "ascend"),
        ({"batch_size": [1, 2, 2.5]}, "batch_size.2"),
        ({"batch_size": []}, "at least 1"),
        ({"service_time_s": [0.1, 0.2]}, "2 values for 3"),
        ({"service_time_s": [0.1, float("nan"), 0.3]}, "service_time_s.1"),
        ({"service_time_s": [0.1, float("inf"), 0.3]}, "service_time_s.1"),
        ({"service_time_s": [0.1, -0.2, 0.3]}, "not -0.2"),
        ({"service_time_s": [0.1, 0, 0.3]}, "service_time_s.1"),
        ({"service_time_s": [0.1, 5e-324, 0.3]}, "service_time_s.1"),
        ({"service_time_s": [0.1, 1e300, 0.3]}, "service_time_s.1"),
        ({"energy_j": [0.1, float("-inf"), 0.3]}, "energy_j.1"),
        ({"service_time_cv": [0.1, -1, 0.3]}, "service_time_cv.1"),
        ({"idle_power_w": -1}, "idle_power_w"),
        ({"name": ""}, "name"),
    ],
)
def test_an_invalid_profile_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE | changes))
    assert message in rejection(load_profile, path)


@pytest.mark.parametrize("missing", ["schema", "name", "batch_size", "service_time_s"])
def test_a_profile_without_a_required_key_is_rejected(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({key: value for key, value in PROFILE.items() if key != missing}))
    assert f"{missing}: Field required" in rejection(load_profile, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "batchwright.profile/1"}, "schema"),
        ({"maximum": 3}, "maximum"),
        ({"max_batch_size": 5000}, "4096, not 5000"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"rows": []}, "rows"),
        ({"rows": [ROW, ROW]}, "ascend"),
        ({"rows": [ROW, ROW | {"arrival_rate_hz": 1.0}]}, "ascend"),
        ({"w2": float("nan")}, "w2"),
        ({"w1": -1}, "w1"),
        ({"bound": {"slo_p95_ms": float("nan")}}, "bound"),
        ({"bound": {"slo_p95_ms": -5.0}}, "bound"),
        (row(arrival_rate_hz=0), "arrival_rate_hz"),
        (row(arrival_rate_hz=5e-324), "arrival_rate_hz"),
        (row(arrival_rate_hz=float("inf")), "arrival_rate_hz"),
        (row(extra=1), "extra"),
        (row(batch_size=[0, 1, 3]), "action 3"),
        (row(batch_size=[0, 1, -1]), "batch_size.2"),
        (row(batch_size=[0, 1, 99999]), "batch_size.2"),
        (row(batch_size=[0]), "at least 2"),
        (row(mix={"probability": -0.1, "batch_size": [0, 1]}), "probability"),
        (row(mix={"probability": 1.1, "batch_size": [0, 1]}), "probability"),
        (row(mix={"probability": float("nan"), "batch_size": [0, 1]}), "probability"),
        (row(mix={"probability": 0.5}), "give either batch_size or max_age_ms"),
        (row(max_age_ms=[0, 1]), "give either batch_size or max_age_ms"),
        (row(mix={"probability": 0.5, "max_age_ms": [0, 1]}), "both tables of a mix"),
        (row(batch_size=None, max_age_ms=[0, -1]), "max_age_ms.1"),
        (row(batch_size=None, max_age_ms=[0, float("inf")]), "max_age_ms.1"),
        (row(batch_size=None, max_age_ms=[0, float("nan")]), "max_age_ms.1"),
        (row(batch_size=None, max_age_ms=[]), "at least 2"),
        (row(batch_size=None, max_age_ms=[0, "soon"]), "max_age_ms.1"),
        (row(batch_size=None, max_age_ms=[0, 1], mix={"probability": 2, "max_age_ms": [0, 1]}), "probability"),
    ],
)
def test_an_invalid_policy_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(POLICY | changes))
    assert message in rejection(load_table, path)


@pytest.mark.parametrize("load", BOTH)
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe\x80" * 1000, b"[" * 100_000, b'{"a":' * 100_000, b"null", b"1e999", b'"\\ud800"'],
    ids=["empty", "binary", "nested lists", "nested objects", "null", "huge", "surrogate"],
)
def test_arbitrary_content_is_rejected(load: Load, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    assert "malformed" in rejection(load, path)


@pytest.mark.parametrize("load", BOTH)
def test_folders_devices_and_huge_files_are_rejected(load: Load, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(500 * 2**20)
    assert "larger than 32 MiB" in rejection(load, large)
    assert "larger than 32 MiB" in rejection(load, Path("/dev/zero"))
    assert "directory" in rejection(load, tmp_path)
    with pytest.raises(SpecError, match="null"):
        load("a\0b.json")


def test_a_file_of_the_maximum_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    path = tmp_path / "x"
    path.write_text("0123456789")
    assert read_text(path) == "0123456789"
    assert MAX_BYTES > 10


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_atomically(path, "old")
    program = f"""
import os, signal
from pathlib import Path
from policies import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(Path({str(path)!r}), "new" * 100000)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert path.read_text() == "old"
    write_atomically(path, "newer")
    assert path.read_text() == "newer"


def test_an_error_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_atomically(path, "old")
    with pytest.raises(KeyboardInterrupt), open_atomically(path) as file:  # noqa: PT012  (an interrupt in the block)
        file.write("new" * 100000)
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "policy.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_the_rights_are_those_of_a_new_file_or_of_the_old_one(tmp_path: Path) -> None:
    path, before = tmp_path / "policy.json", os.umask(0o027)
    try:
        write_atomically(path, "new")
        assert os.stat(path).st_mode & 0o777 == 0o640
        path.chmod(0o664)
        write_atomically(path, "newer")
        assert os.stat(path).st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_the_file_to_which_a_command_prints_has_all_of_its_output(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from policies.files import write_atomically as w; "
        "w(Path('/dev/stdout'), 'file, '); print('printed')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], check=True, stdout=out, cwd=Path(__file__).parents[2])
    assert (tmp_path / "out").read_text() == "file, printed\n"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(path)
    write_atomically(path, "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)
    assert path.is_fifo()


def test_a_check_leaves_no_file_and_does_not_change_one(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    (tmp_path / "old").write_text("text")
    check_writable(tmp_path / "old")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("path", "kind"), [("/", IsADirectoryError), ("/nowhere/x", FileNotFoundError), (f"/tmp/{'x' * 300}", OSError)]
)
def test_a_path_that_cannot_be_written_is_found_before(path: str, kind: type[OSError]) -> None:
    with pytest.raises(kind) as caught:
        check_writable(Path(path))
    assert caught.value.strerror


def test_a_loop_of_symbolic_links_is_found_before(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="Too many levels"):
        check_writable(tmp_path / "loop")
