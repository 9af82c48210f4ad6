"""Tests of requests of given lengths, sent to a model whose inputs are padded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import processes
from loadgen.client import JSON_LENGTH, RunLog
from loadgen.live_run import LoadTarget
from loadgen.schedule import Schedule, make_schedule
from loadgen.sizes import draw_request_lengths, whole_lengths
from tests.loadgen.test_cli import Shell, shell
from tests.loadgen.test_live_run import quiet
from tests.support.stub_server import METADATA, Stub, serving_in_a_thread

__all__ = ["shell"]
PADDED = METADATA | {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
    "parameters": {"weights": "model.py", "max_length": 64},
}
LOAD = ["--rate", "400", "--duration", "0.1", "--seed", "7"]


def drawn(words: str, scale: float = 1.0) -> list[int]:
    instants = make_schedule("poisson", 400.0, 0.1, 7).instants
    return [int(length) for length in whole_lengths(scale * draw_request_lengths(words, "poisson", len(instants), 7))]


def sent_lengths(stub: Stub) -> list[int]:
    lengths = []
    for path, headers, body in stub.calls:
        assert path == "/v2/models/tiny/infer"
        document = int(headers[JSON_LENGTH])
        (tensor,) = json.loads(body[:document])["inputs"]
        _, length = tensor["shape"]
        assert len(body) - document == 4 * length
        lengths.append(length)
    return lengths


def test_scaled_lengths_are_rounded_up_to_at_least_one() -> None:
    assert whole_lengths(np.array([0.2, 1.0, 3.0000000001, 2.5, 0.06 * 50])).tolist() == [1, 1, 3, 3, 3]


def test_samples_have_the_lengths_of_the_simulation(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=PADDED)) as url:
        content = shell.report(url, *LOAD, "--sizes", "uniform:1:60", "--size-scale", "0.5")
    expected = drawn("uniform:1:60", 0.5)
    assert len(set(expected)) > 10
    assert sorted(sent_lengths(stub)) == sorted(expected)
    assert content["mean_batch_size"] == pytest.approx(2.0)


def test_without_sizes_all_samples_have_half_the_largest_length(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=PADDED)) as url:
        shell.report(url, *LOAD)
    assert set(sent_lengths(stub)) == {32}


@pytest.mark.usefixtures("forked_workers")
def test_several_processes_send_the_lengths_of_the_schedule() -> None:
    lengths, log, stub = list(range(1, 33)), RunLog(), Stub(metadata=PADDED)
    timetable = Schedule(np.linspace(0.0, 0.03, 32), 0.031)
    with serving_in_a_thread(stub) as url:
        processes.run_load_in_processes(LoadTarget(url, lengths=lengths), timetable, quiet(timetable), log, 3)
    assert sorted(sent_lengths(stub)) == lengths


def test_each_policy_of_a_comparison_gets_the_same_lengths(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=PADDED)) as url:
        shell.report(url, *LOAD, "--sizes", "uniform:1:30", "--compare", "greedy", "--compare", "static:8")
    expected, sent = drawn("uniform:1:30"), sent_lengths(stub)
    half = len(expected)
    assert sorted(sent[:half]) == sorted(sent[half:]) == sorted(expected)


def test_the_rows_of_a_trace_keep_their_lengths(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,Width\n0,30\n0.3,50\n0.1,41\n0.2,20\n")
    with serving_in_a_thread(stub := Stub(metadata=PADDED)) as url:
        shell.report(url, "--arrivals", f"trace:{path}", "--sizes", "trace:Width", "--size-scale", "0.1")
    assert sent_lengths(stub) == [3, 5, 2, 5]


@pytest.mark.parametrize(
    ("metadata", "arguments", "message"),
    [
        (METADATA, ["--sizes", "uniform:1:2"], "has samples of one size; leave out --sizes"),
        (PADDED, ["--sizes", "uniform:70:80"], r"has \d\d, the longest sample of tiny is 64; lower --size-scale"),
        (PADDED, ["--pixels"], "not UINT8 .*leave out --pixels"),
        (PADDED, ["--pixels", "--sizes", "uniform:1:2"], "--sizes excludes --image and --pixels"),
        (PADDED, ["--size-scale", "2"], "are for --sizes"),
        (PADDED, ["--sizes", "uniform:1:2", "--size-scale", "0"], "--size-scale is 0; give a number above 0"),
        (PADDED, ["--sizes", "uniform:1:2", "--bin-error", "0.1"], "--bin-error is for --simulate"),
        (PADDED, ["--sizes", "uniform:2:1"], "2 is above 1"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_no_request_is_sent(
    shell: Shell, metadata: Any, arguments: list[str], message: str
) -> None:
    with serving_in_a_thread(stub := Stub(metadata=metadata)) as url:
        code, out, err = shell.run(url, *LOAD, *arguments)
    assert (code, out, stub.calls) == (2, "", [])
    assert re.search(message, err), err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("forked_workers")
def test_in_several_processes_a_length_above_the_largest_is_the_same_error(shell: Shell) -> None:
    with serving_in_a_thread(Stub(metadata=PADDED)) as url:
        code, _, err = shell.run(url, *LOAD, "--sizes", "uniform:70:80", "--processes", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert "the longest sample of tiny is 64" in err
