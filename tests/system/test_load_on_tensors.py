"""A user's model is profiled, served and loaded: the commands on one source, NAME=FILE.py:CLASS."""

import json
from pathlib import Path

import pytest

from benchmarks.support.harness import command_line, run_json, serving
from tests.support.fork_server import run_process
from tests.support.http_client import fetch

MODEL = """
import numpy as np

from batchwright import Model, Tensor


class Scaled(Model):
    inputs = {"x": Tensor("FP32", [-1, 2]), "words": Tensor("BYTES", [1])}
    outputs = {"y": Tensor("FP32", [-1, 2]), "length": Tensor("INT64", [1])}
    max_batch_size = 4

    def run(self, x, words):
        if x.shape[1] == 7:
            raise ValueError("seven rows")
        return {"y": x * 2, "length": np.array([[len(word)] for (word,) in words])}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"mine={tmp_path / 'mine.py'}:Scaled"


def test_a_two_input_model_is_loaded_with_synthetic_samples_and_with_a_file(source: str, tmp_path: Path) -> None:
    sample = tmp_path / "sample.json"
    sample.write_text(json.dumps({"x": [[0.5, 1.5]] * 7, "words": ["hello"]}))
    load = ("--rate", "100", "--duration", "0.5", "--model", source)
    profiles = tmp_path / "cache" / "batchwright" / "profiles"
    with serving(source, "--device", "cpu") as server:
        report = run_json("generate-load", server.url, *load)
        assert report["ok"] == report["scheduled"] > 0
        assert report["mean_batch_size"] >= 1
        done = run_process([*command_line("generate-load"), server.url, *load, "--sample", str(sample), "--json"])
        assert done.returncode == 1
        failed = json.loads(done.stdout)
        assert failed["errors"] == {"500": failed["scheduled"]}, "the model got the file's seven rows"
        assert fetch(server.url, "/v2/models/mine/config").json["max_batch_size"] == 4
    (profile,) = profiles.iterdir()
    measured = profile.stat().st_mtime_ns
    assert json.loads(profile.read_text())["batch_size"] == [1, 2, 3, 4]
    with serving(source, "--device", "cpu"):
        assert ([*profiles.iterdir()], profile.stat().st_mtime_ns) == ([profile], measured), "it was not measured again"


def test_the_profile_of_profile_model_is_the_servers(source: str, tmp_path: Path) -> None:
    profile = run_json("profile-model", source, "--device", "cpu", "--quick", "--energy-time", "0")
    with serving(source, "--device", "cpu") as server:
        policy = fetch(server.url, "/admin/models/mine/policy").json
        assert policy["profile"] == profile["name"]
    assert len([*(tmp_path / "cache" / "batchwright" / "profiles").iterdir()]) == 1


def test_a_model_that_takes_no_random_values_is_served_with_a_sample(tmp_path: Path) -> None:
    code = MODEL.replace("if x.shape[1] == 7:", "if words[0][0] != b'real':")
    (tmp_path / "picky.py").write_text(code)
    spec = f"picky={tmp_path / 'picky.py'}:Scaled"
    with pytest.raises(RuntimeError) as caught, serving(spec, "--device", "cpu"):
        pass
    message = str(caught.value)
    assert "picky.py line 14: ValueError: seven rows; if the model does not take random values" in message
    assert "Traceback" not in message
    sample = tmp_path / "sample.json"
    sample.write_text(json.dumps({"x": [[0.5, 1.5]], "words": ["real"]}))
    with serving(spec, "--device", "cpu", "--sample", f"picky={sample}") as server:
        answer = fetch(server.url, "/predict", json.dumps({"inputs": {"x": [[1, 2]], "words": ["real"]}}).encode())
        assert answer.json["outputs"] == {"y": [[2.0, 4.0]], "length": [4]}
