"""Tests of requests to text models: lengths of generated texts and of prompts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import processes
from loadgen.client import RunLog
from loadgen.live_run import LoadTarget
from loadgen.requests.texts import PROMPT, SAMPLE
from loadgen.schedule import Schedule, make_schedule
from loadgen.sizes import draw_request_lengths, whole_tokens
from tests.loadgen.test_cli import Shell, shell
from tests.loadgen.test_live_run import quiet
from tests.support.stub_server import METADATA, Stub, busy, serving_in_a_thread

__all__ = ["shell"]
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
BOUNDS = {"weights": "random", "max_tokens": 64, "vocabulary": 5, "pad_token_id": 2}
CLASSIFIER = METADATA | {"inputs": [IDS], "parameters": BOUNDS}
GENERATOR = METADATA | {
    "inputs": [IDS, {"name": "max_new_tokens", "datatype": "INT32", "shape": [-1]}],
    "parameters": BOUNDS | {"max_new_tokens": 32},
}
LOAD = ["--rate", "400", "--duration", "0.1", "--seed", "7"]


def drawn(words: str, scale: float = 1.0) -> list[int]:
    instants = make_schedule("poisson", 400.0, 0.1, 7).instants
    return [int(length) for length in whole_tokens(scale * draw_request_lengths(words, "poisson", len(instants), 7))]


def bodies(stub: Stub) -> list[Any]:
    return [json.loads(body) for _, _, body in stub.calls]


def requested_tokens(stub: Stub) -> list[int]:
    return [body["parameters"]["max_new_tokens"] for body in bodies(stub)]


def test_scaled_lengths_are_rounded_up_to_at_least_one_token() -> None:
    assert whole_tokens(np.array([0.2, 1.0, 3.0000000001, 2.5, 0.06 * 50])).tolist() == [1, 1, 3, 3, 3]


def test_a_generator_is_asked_for_the_lengths_of_the_simulation(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=GENERATOR)) as url:
        content = shell.report(url, *LOAD, "--sizes", "uniform:1:60", "--size-scale", "0.5")
    expected = drawn("uniform:1:60", 0.5)
    assert len(set(expected)) > 10
    assert sorted(requested_tokens(stub)) == sorted(expected)
    assert all(body["parameters"]["ignore_eos"] for body in bodies(stub))
    assert {len(body["inputs"][0]["data"]) for body in bodies(stub)} == {PROMPT}
    assert {path for path, _, _ in stub.calls} == {"/v2/models/tiny/infer"}
    assert content["mean_batch_size"] == pytest.approx(2.0)


def test_a_classifier_gets_prompts_of_the_drawn_lengths_without_padding(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=CLASSIFIER)) as url:
        content = shell.report(url, *LOAD, "--sizes", "uniform:1:64")
    tensors = [body["inputs"][0] for body in bodies(stub)]
    assert sorted(len(tensor["data"]) for tensor in tensors) == sorted(drawn("uniform:1:64"))
    assert all(tensor["shape"] == [1, len(tensor["data"])] for tensor in tensors)
    assert {token for tensor in tensors for token in tensor["data"]} == {0, 1, 3, 4}  # 2 pads
    assert {path for path, _, _ in stub.calls} == {"/v2/models/tiny/infer"}
    assert content["mean_batch_size"] == pytest.approx(2.0)


@pytest.mark.parametrize("metadata", [GENERATOR, CLASSIFIER])
def test_without_sizes_a_text_model_always_gets_the_same_text(shell: Shell, metadata: Any) -> None:
    with serving_in_a_thread(stub := Stub([busy], metadata=metadata)) as url:
        content = shell.report(url, *LOAD)
    assert all(body == {"text": SAMPLE} for body in bodies(stub))
    assert content["errors"] == {"503": 1}
    assert content["ok"] == len(stub.calls) - 1


@pytest.mark.usefixtures("forked_workers")
def test_several_processes_send_the_lengths_of_the_schedule() -> None:
    lengths, log, stub = list(range(1, 33)), RunLog(), Stub(metadata=GENERATOR)
    timetable = Schedule(np.linspace(0.0, 0.03, 32), 0.031)
    with serving_in_a_thread(stub) as url:
        processes.run_load_in_processes(LoadTarget(url, lengths=lengths), timetable, quiet(timetable), log, 3)
    assert sorted(requested_tokens(stub)) == lengths


def test_each_policy_of_a_comparison_gets_the_same_lengths(shell: Shell) -> None:
    with serving_in_a_thread(stub := Stub(metadata=GENERATOR)) as url:
        shell.report(url, *LOAD, "--sizes", "uniform:1:30", "--compare", "greedy", "--compare", "static:8")
    expected, sent = drawn("uniform:1:30"), requested_tokens(stub)
    half = len(expected)
    assert sorted(sent[:half]) == sorted(sent[half:]) == sorted(expected)


def test_the_rows_of_a_trace_keep_their_lengths(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,Tokens\n0,30\n0.3,50\n0.1,41\n0.2,20\n")
    with serving_in_a_thread(stub := Stub(metadata=GENERATOR)) as url:
        shell.report(url, "--arrivals", f"trace:{path}", "--sizes", "trace:Tokens", "--size-scale", "0.1")
    assert requested_tokens(stub) == [3, 5, 2, 5]


@pytest.mark.parametrize(
    ("metadata", "arguments", "message"),
    [
        (METADATA, ["--sizes", "uniform:1:2"], "has samples of one size; leave out --sizes"),
        (GENERATOR, ["--sizes", "uniform:40:50"], r"has \d\d tokens, the limit of tiny is 32; lower --size-scale"),
        (CLASSIFIER, ["--sizes", "uniform:70:80"], r"has \d\d tokens, the limit of tiny is 64; lower --size-scale"),
        (GENERATOR, ["--pixels"], "not UINT8 .*leave out --pixels"),
        (GENERATOR, ["--pixels", "--sizes", "uniform:1:2"], "--sizes excludes --image and --pixels"),
        (GENERATOR, ["--size-scale", "2"], "are for --sizes"),
        (GENERATOR, ["--sizes", "uniform:1:2", "--size-scale", "0"], "--size-scale is 0; give a number above 0"),
        (GENERATOR, ["--sizes", "uniform:1:2", "--bin-error", "0.1"], "--bin-error is for --simulate"),
        (GENERATOR, ["--sizes", "uniform:2:1"], "2 is above 1"),
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
def test_in_several_processes_a_length_above_the_limit_is_the_same_error(shell: Shell) -> None:
    with serving_in_a_thread(Stub(metadata=GENERATOR)) as url:
        code, _, err = shell.run(url, *LOAD, "--sizes", "uniform:40:50", "--processes", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert "the limit of tiny is 32" in err
