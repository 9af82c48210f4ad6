"""Bodies of POST /predict with several samples, with none, and what `decode` keeps for `render`."""

import json
from collections.abc import Iterator

import pytest

from benchmarks.support.harness import Server, serving
from tests.support.http_client import fetch

CODE = """
import json, numpy as np
from batchwright import Answer, Kept, Model, Tensor
class Plain(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}
    def run(self, x):
        return {"y": 2 * x}
class Own(Plain):
    def decode(self, body, content_type):
        document = json.loads(body)
        if not document:
            return Answer({"empty": True})
        if isinstance(document, list):
            return [{"x": [float(each)]} for each in document]
        if "bad" in document:
            return [{"x": [1.0]}, {"z": [1.0]}]
        return Kept({"x": [document["value"]]}, document["name"])
    def render(self, outputs, *kept):
        return {"y": float(outputs["y"][0]), "name": kept[0] if kept else None}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.py").write_text(CODE)
    models = [f"{name.lower()}={folder}/models.py:{name}" for name in ("Plain", "Own")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with serving(*models, "--device", "cpu", "--policy", "greedy", "--queue-capacity", "32") as running:
            yield running


def test_a_list_of_inputs_is_answered_with_a_list(server: Server) -> None:
    found = fetch(server.url, "/predict/plain", json.dumps({"inputs": [{"x": [1]}, {"x": [4]}]}).encode())
    assert found.json["outputs"] == [{"y": [2.0]}, {"y": [8.0]}]
    one = fetch(server.url, "/predict/plain", json.dumps({"inputs": [{"x": [1]}]}).encode())
    assert one.json["outputs"] == [{"y": [2.0]}]


@pytest.mark.parametrize("inputs", [[], [1], [{"x": [1]}, {"z": [1]}], {}, "x"])
def test_a_list_of_what_are_no_inputs_is_an_error_of_the_client(server: Server, inputs: object) -> None:
    found = fetch(server.url, "/predict/plain", json.dumps({"inputs": inputs}).encode())
    assert found.status == 400
    assert "send" in found.json["error"]


def test_decode_returns_several_samples_or_an_answer_or_keeps_a_value(server: Server) -> None:
    several = fetch(server.url, "/predict/own", b"[1, 2, 3]").json
    assert [each["y"] for each in several["outputs"]] == [2.0, 4.0, 6.0]
    at_once = fetch(server.url, "/predict/own", b"[]").json
    assert at_once["outputs"] == {"empty": True}
    assert (at_once["batch_size"], at_once["service_ms"]) == (0, 0.0)
    kept = fetch(server.url, "/predict/own", b'{"value": 5, "name": "five"}').json
    assert kept["outputs"] == {"y": 10.0, "name": "five"}


def test_samples_that_do_not_fit_and_too_many_of_them_fail_alone(server: Server) -> None:
    bad = fetch(server.url, "/predict/own", b'{"bad": 1}')
    assert bad.status == 500
    assert "decode gives z" in bad.json["error"]
    many = fetch(server.url, "/predict/own", json.dumps([*range(1, 40)]).encode())
    assert many.status == 400
    assert "39 samples, over the maximum 32 that may wait" in many.json["error"]
    assert fetch(server.url, "/predict/own", b"[1]").status == 200
