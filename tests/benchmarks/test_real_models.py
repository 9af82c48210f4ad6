"""The comparison of real models: bodies in each server's form, and answers found in each server's response."""

import json
from typing import Any

import pytest

from benchmarks.real_models import PAGES, has_answer, in_json, in_tensor, lines_beside_the_class, openai, servers, table
from loadgen.client import JSON_LENGTH

ANSWER = {"class": 285, "logit": 9.125}
VECTOR = {"embedding": [0.1, -0.2]}


@pytest.mark.parametrize(
    "document",
    [
        {"class": 285, "logit": 9.13},
        {"model": "model", "outputs": {"class": 285, "logit": 9.125}, "batch_size": 4},
        [{"class": 285, "logit": 9.125}],
        {"outputs": [{"name": "answer", "data": [json.dumps(ANSWER)]}]},
    ],
)
def test_the_answer_is_found_in_each_servers_response(document: Any) -> None:
    assert has_answer(document, ANSWER)


@pytest.mark.parametrize(
    "document",
    [{"class": 284, "logit": 9.125}, {"class": 285, "logit": 9.5}, {"class": 285}, {"error": "full"}, [], "285", None],
)
def test_another_answer_or_none_is_wrong(document: Any) -> None:
    assert not has_answer(document, ANSWER)


def test_an_embedding_may_have_more_values_than_the_ones_compared() -> None:
    assert has_answer({"data": [{"embedding": [0.1, -0.2, 0.3]}]}, VECTOR)
    for found in ([0.1, 0.2, 0.3], [], [0.1], [None, -0.2], "0.1", None):
        assert not has_answer({"data": [{"embedding": found}]}, VECTOR)


def test_a_body_is_sent_in_each_servers_form() -> None:
    assert json.loads(in_json("u", lambda body: {"bodies": [body]})(b"\xff").body) == {"bodies": ["/w=="]}
    assert json.loads(openai("u")(b"text").body)["input"] == "text"
    call = in_tensor("u")(b"abc")
    assert call.body[int(call.headers[JSON_LENGTH]) :] == b"\3\0\0\0abc"


def test_the_table_marks_the_best_server_and_says_who_is_left_out() -> None:
    runs = {name: [run(mean)] for name, mean in (("Batchwright", 20.0), ("mosec", 10.0))}
    times = {name: [1.0] for name in runs}
    found = {"bound_ms": 80.0, "runs": runs, "first_answer_s": times, "saturation": times}
    shown = table({"Classifier": {**found, "wrong": {"mosec": 3}, "left_out": {"Triton": "no wheel"}}})
    assert "| Batchwright | 20† (30) |" in shown, "another server is better"
    assert "| mosec | **10** (30) |" in shown
    assert "within 80 ms at 0.3" in shown
    runs["mosec"][0]["errors"] = 2  # those answered are no comparison
    shown = table({"Classifier": {**found, "wrong": {"mosec": 3}, "left_out": {"Triton": "no wheel"}}})
    assert "| Batchwright | **20** (30) |" in shown
    assert "Triton is left out: no wheel" in shown


def test_each_peer_has_a_script_whose_lines_are_counted_without_docstrings() -> None:
    counts = {name: lines_beside_the_class(name) for model in ("Classifier", PAGES) for name in servers(model, 100.0)}
    ours = {name for name in counts if name.startswith("Batchwright")}
    assert {counts.pop(name) for name in ours} == {0}
    assert all(20 < count < 60 for count in counts.values())


def run(mean: float) -> dict[str, float]:
    counts = {"requests": 100, "errors": 0}
    keys = ("cpu_s_per_1000", "within", "answered_hz", "p99_ms", "rss_mb")
    return {"load": 0.3, "mean_ms": mean, "p95_ms": 30.0, **counts, **dict.fromkeys(keys, 1.0)}
