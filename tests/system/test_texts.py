"""Text models in a real server process: measured at start, served in bins and by continuous batching."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from benchmarks.support.harness import serving
from tests.support.http_client import fetch

pytest.importorskip("transformers", reason="the extra text is not installed")
SHARED = {"vocab_size": 259, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "initializer_range": 0.3}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2}
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32}
BERT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in {"gpt2": GPT2 | {"n_positions": 80, "tie_word_embeddings": False}, "bert": BERT}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(SHARED | config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        models = (f"writer={folder / 'gpt2'}", f"judge={folder / 'bert'}", "--weights", "random", "--device", "cpu")
        policies = ("--policy", "writer=multi-bin:2,batch_size=2,max_wait_ms=50", "--policy", "judge=greedy")
        with serving(*models, *policies, "--max-batch-size", "4") as server:
            yield server.url


def write(url: str, text: str, most: int, **more: Any) -> Any:
    reply = fetch(url, "/predict/writer", json.dumps({"text": text, "max_new_tokens": most, **more}).encode())
    assert reply.status == 200, reply.body
    return reply.json


def test_the_generated_text_does_not_depend_on_the_batch(url: str) -> None:
    requests = [("a", 3), ("hello there", 39), ("x" * 30, 20), ("b", 40), ("cd", 1), ("efg", 30)]
    alone = [write(url, text, most, ignore_eos=True)["text"] for text, most in requests]
    for policy in ("joining", "multi-bin:2,inner=joining", "greedy"):
        assert fetch(url, "/admin/models/writer/policy", json.dumps({"policy": policy}).encode(), "PUT").status == 200
        with ThreadPoolExecutor(len(requests)) as pool:
            replies = list(pool.map(lambda each: write(url, *each, ignore_eos=True), requests))
        assert [reply["text"] for reply in replies] == alone
        assert [reply["new_tokens"] for reply in replies] == [most for _, most in requests]


def test_tritons_client_sends_and_receives_token_ids(url: str) -> None:
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    metadata = client.get_model_metadata("writer")
    assert [each["name"] for each in metadata["inputs"]] == ["input_ids", "max_new_tokens"]
    ids, most = np.array([[5, 6, 7], [9, 0, 0]]), np.array([4, 2], np.int32)
    inputs = [triton.InferInput("input_ids", [2, 3], "INT64"), triton.InferInput("max_new_tokens", [2], "INT32")]
    for tensor, values in zip(inputs, (ids, most), strict=True):
        tensor.set_data_from_numpy(values)
    output = client.infer("writer", inputs, parameters={"ignore_eos": True}).as_numpy("output_ids")
    assert output.shape == (2, 4)
    assert output.dtype == np.int64
    assert (output[1, 2:] == 0).all()
    judged = triton.InferInput("input_ids", [2, 3], "INT64")
    judged.set_data_from_numpy(ids)
    assert client.infer("judge", [judged]).as_numpy("logits").shape == (2, 2)
    client.close()


def test_text_classification_pages_and_metrics(url: str) -> None:
    response = fetch(url, "/predict/judge", b'{"text": "well"}').json
    assert {each["label"] for each in response["predictions"]} == {"LABEL_0", "LABEL_1"}
    assert fetch(url, "/predict/judge", b'{"text": "well", "max_new_tokens": 2}').status == 400
    for path in (
        "/",
        "/docs",
        "/live?model=writer",
        "/live/policy?model=writer",
        "/live/form?model=judge",
        "/v2/models/writer/config",
    ):
        assert fetch(url, path).status == 200, path
    metrics = fetch(url, "/metrics").body.decode()
    assert 'batchwright_tokens_total{model="judge",use="needed"} ' in metrics
    assert 'batchwright_requests_total{model="judge",outcome="bad_input"} ' in metrics
