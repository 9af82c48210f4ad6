"""Requests with the content of files: in turn, whatever the model takes, also in several processes."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from loadgen import processes
from loadgen.client import RunLog
from loadgen.live_run import LoadTarget
from loadgen.progress import Progress
from loadgen.requests.metadata import predict_path
from loadgen.requests.raw_bodies import body_content
from loadgen.schedule import Schedule
from policies.types import SpecError
from tests.support.stub_server import Stub, serving_in_a_thread


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three bodies of one type."""
    for name in "abc":
        (tmp_path / f"{name}.json").write_text(f'{{"inputs": "{name}"}}')
    return sorted(tmp_path.iterdir())


def test_bodies_are_sent_in_turn_with_the_type_of_their_names(files: list[Path]) -> None:
    content = body_content(predict_path("a b"), files)
    assert [*islice(content.bodies, 4)] == [path.read_bytes() for path in (*files, files[0])]
    assert content.headers == {"Content-Type": "application/json"}
    assert content.path == "/predict/a%20b"


def test_files_of_two_types_and_what_cannot_be_read_are_errors(tmp_path: Path, files: list[Path]) -> None:
    (tmp_path / "d.png").write_bytes(b"png")
    with pytest.raises(SpecError, match=r"d\.png' is image/png, and the first one application/json"):
        body_content("/predict", [files[0], tmp_path / "d.png"])
    with pytest.raises(SpecError, match=r"cannot read --body .* \(Is a directory\)"):
        body_content("/predict", [tmp_path])


@pytest.mark.parametrize(("path", "called"), [("", "/predict/tiny"), ("/predict", "/predict")])
def test_several_processes_together_send_each_body_equally_often(path: str, called: str, files: list[Path]) -> None:
    schedule, stub = Schedule(np.linspace(0.0, 0.01, 30), 0.011), Stub()
    with serving_in_a_thread(stub) as url:
        target = LoadTarget(url + path, bodies=files)
        assert not processes.run_load_in_processes(target, schedule, Progress(schedule, "", quiet=True), RunLog(), 2)
    assert Counter(body for _, _, body in stub.calls) == {file.read_bytes(): 10 for file in files}
    assert {path for path, _, _ in stub.calls} == {called}
