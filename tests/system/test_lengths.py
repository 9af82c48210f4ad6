"""A model whose samples differ in length, in a server process: measured by length, padded, and served in bins."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.harness import Server, run_json, serving
from tests.support.http_client import fetch

MODEL = """
import time

import numpy as np

from batchwright import Model, Tensor


class Sum(Model):
    inputs = {"x": Tensor("FP32", [-1], pad=0.0)}
    outputs = {"sum": Tensor("FP32"), "padded": Tensor("INT64")}
    lengths = [4, 64]

    def run(self, x):
        time.sleep(1e-4 * x.shape[1])
        return {"sum": x.sum(axis=1), "padded": np.full(len(x), x.shape[1])}
"""
SHORT, LONG = [1.0] * 4, [1.0] * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lengths")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "mine.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        model = (f"mine={folder / 'mine.py'}:Sum", "--device", "cpu", "--max-batch-size", "8")
        with serving(*model, "--policy", "multi-bin:2,max_wait_ms=50", "--profile-first") as running:
            yield running


def call(server: Server, x: list[float]) -> Any:
    reply = fetch(server.url, "/predict", json.dumps({"inputs": {"x": x}}).encode())
    assert reply.status == 200, reply.body
    return reply.json


def calls(server: Server, samples: list[list[float]]) -> list[Any]:
    with ThreadPoolExecutor(len(samples)) as pool:
        return list(pool.map(lambda x: call(server, x), samples))


def set_policy(server: Server, spec: str) -> None:
    server.set_policy("mine", spec)


def test_samples_of_all_lengths_share_a_batch_and_keep_their_answers(server: Server) -> None:
    set_policy(server, "static:8,max_wait_ms=10000")
    answers = calls(server, [[float(n)] * n for n in range(1, 9)])
    assert [answer["outputs"] for answer in answers] == [{"sum": float(n * n), "padded": 8} for n in range(1, 9)]
    assert {answer["batch_size"] for answer in answers} == {8}


def test_bins_separate_short_samples_from_long_ones(server: Server) -> None:
    set_policy(server, "multi-bin:2,batch_size=4,max_wait_ms=100")
    calls(server, [SHORT, LONG] * 16)  # the edges are learned from 32 sizes
    answers = calls(server, [SHORT, LONG] * 8)
    assert [answer["outputs"]["padded"] for answer in answers] == [4, 64] * 8
    assert max(answer["batch_size"] for answer in answers) > 1


def test_the_bound_is_in_the_metadata_and_in_the_error(server: Server) -> None:
    assert fetch(server.url, "/v2/models/mine").json["parameters"]["max_length"] == 64
    reply = fetch(server.url, "/predict", json.dumps({"inputs": {"x": [0.0] * 65}}).encode())
    error = "input x has the length 65, over the maximum 64; send a shorter one"
    assert (reply.status, reply.json) == (400, {"error": error})


def test_a_policy_that_decides_between_stages_is_refused(server: Server) -> None:
    body = json.dumps({"policy": "lazy:slo_ms=100"}).encode()
    reply = fetch(server.url, "/admin/models/mine/policy", body, "PUT")
    assert reply.status == 400
    assert "but none by stage; use greedy or multi-bin" in reply.json["error"]


def test_generate_load_sends_and_simulates_the_lengths(server: Server, folder: Path) -> None:
    sizes = ("--rate", "100", "--duration", "0.5", "--sizes", "uniform:1:64")
    report = run_json("generate-load", server.url, *sizes)
    assert report["ok"] == report["scheduled"] > 0
    (profile,) = (folder / "batchwright" / "profiles").iterdir()
    simulated = run_json("generate-load", "--simulate", str(profile), "--policy", "multi-bin:2", *sizes)
    assert simulated["ok"] == report["scheduled"]
