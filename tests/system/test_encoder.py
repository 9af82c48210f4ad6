"""Encoders by hf:FOLDER: embeddings, classes and scores over every protocol, and bad input."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.harness import Server, serving
from policies.types import SpecError
from server.models.sources import source_of
from server.models.tensors.encoder_source import EncoderModel
from tests.support.http_client import fetch
from tests.support.tiny_encoder import MOST, WORDS, embedding_of, write_encoder, write_onnx_encoder
from tests.support.triton import infer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    models = {
        "embedder": write_encoder(folder / "embedder"),
        "classes": write_encoder(folder / "classes", labels=3),
        "ranker": write_encoder(folder / "ranker", labels=1),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        specs = [f"{name}=hf:{path}" for name, path in models.items()]
        with serving(*specs, "--device", "cpu", "--queue-capacity", "4096") as running:
            yield running


def post(server: Server, path: str, document: Any) -> Any:
    return fetch(server.url, path, json.dumps(document).encode(), headers={"Content-Type": "application/json"})


def test_embeddings_are_those_of_the_library_for_each_kind_of_input(server: Server, folder: Path) -> None:
    texts = ["the cat sat on the mat", "a dog", " ".join(WORDS)]
    expected = [embedding_of(folder / "embedder", text) for text in texts]
    found = post(server, "/v1/embeddings", {"model": "embedder", "input": texts}).json
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in texts)
    one = post(server, "/v1/embeddings", {"model": "embedder", "input": texts[1]}).json
    np.testing.assert_allclose(one["data"][0]["embedding"], expected[1], atol=1e-5)
    tokens = [2, 6, 8, 3]  # [CLS] a dog [SEP]
    for given in (tokens, [tokens, tokens]):
        found = post(server, "/v1/embeddings", {"model": "embedder", "input": given}).json
        np.testing.assert_allclose(found["data"][0]["embedding"], expected[1], atol=1e-5)
    plain = fetch(server.url, "/predict/embedder", texts[1].encode()).json
    np.testing.assert_allclose(plain["outputs"], expected[1], atol=1e-5)
    tensors = {name: np.array([row]) for name, row in _tensors(tokens).items()}
    np.testing.assert_allclose(infer(server.url, "embedder", **tensors)["embedding"][0], expected[1], atol=1e-5)


def _tensors(tokens: list[int]) -> dict[str, list[int]]:
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "token_type_ids": [0] * len(tokens)}


def test_the_openai_client_works_unmodified(server: Server, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="embedder", input=["a dog", "the cat"])
    np.testing.assert_allclose(found.data[0].embedding, embedding_of(folder / "embedder", "a dog"), atol=1e-5)
    floats = client.embeddings.create(model="embedder", input="a dog", encoding_format="float")
    np.testing.assert_allclose(floats.data[0].embedding, found.data[0].embedding, atol=1e-6)
    assert [each.id for each in client.models.list()] == ["embedder", "classes", "ranker"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="over the maximum 32; shorten it"):
        client.embeddings.create(model="embedder", input="a " * 40)


def test_two_thousand_texts_at_once_get_each_its_own_vector(server: Server, folder: Path) -> None:
    rng = np.random.default_rng(0)
    known = [" ".join(rng.choice(WORDS, rng.integers(1, MOST - 2))) for _ in range(20)]
    expected = np.array([embedding_of(folder / "embedder", text) for text in known])
    order = rng.integers(0, len(known), 2000)
    found = post(server, "/v1/embeddings", {"model": "embedder", "input": [known[i] for i in order]}).json
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected[order], atol=1e-5)


def test_rerank_orders_texts_in_both_shapes(server: Server) -> None:
    texts = ["a dog ran", "bake bread", "the sky is blue"]
    raw = post(server, "/rerank", {"query": "how", "texts": texts, "raw_scores": True, "model": "ranker"}).json
    ranks = post(server, "/rerank", {"query": "how", "texts": texts, "return_text": True, "model": "ranker"}).json
    assert [each["index"] for each in ranks] == [each["index"] for each in raw]
    assert [each["text"] for each in ranks] == [texts[each["index"]] for each in ranks]
    for each, score in zip(ranks, raw, strict=True):
        assert each["score"] == pytest.approx(1 / (1 + np.exp(-score["score"])))
    documents = [texts[0], {"text": texts[1]}, texts[2]]
    cohere = {"query": "how", "documents": documents, "top_n": 2, "model": "ranker", "return_documents": True}
    found = post(server, "/rerank", cohere).json["results"]
    assert [each["index"] for each in found] == [each["index"] for each in ranks][:2]
    assert found[0]["document"]["text"] == ranks[0]["text"]


def test_a_classifier_of_texts_gives_its_labels_by_probability(server: Server) -> None:
    found = fetch(server.url, "/predict/classes", b"the cat").json["outputs"]
    assert {each["label"] for each in found} == {"LABEL_0", "LABEL_1", "LABEL_2"}
    assert sum(each["score"] for each in found) == pytest.approx(1.0)
    several = post(server, "/predict/classes", {"inputs": ["the cat", "a dog"]}).json["outputs"]
    assert several[0] == [pytest.approx(each) for each in found]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"input": ""}, 400, "input is ''"),
    ({"input": []}, 400, "input is []"),
    ({"input": ["a", ""]}, 400, "none of them empty"),
    ({"input": ["a"] * 2049}, 400, "2049 elements, over the maximum 2048"),
    ({"input": 5}, 400, "input is 5"),
    ({"input": ["a", 5]}, 400, "input is"),
    ({"input": [99999]}, 400, "a token is not within 0..22"),
    ({"input": [2**70]}, 400, ""),
    ({"input": "a " * 100_000}, 400, "the text has 100002 tokens, over the maximum 32"),
    ({"input": "a", "dimensions": 8}, 400, "dimensions is 8; the model allows 16"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format is 'hex'"),
    ({"input": "a", "unknown": 1}, 400, "unknown is 1"),
    ({"input": "a", "model": "other"}, 404, "no model 'other'"),
    ({"input": "a", "model": "ranker"}, 400, "the task of the model ranker is not embed"),
    ({}, 400, "input is missing"),
]


@pytest.mark.parametrize(("document", "status", "message"), BAD)
def test_bad_input_is_answered_in_the_shape_of_openai(
    server: Server, document: dict[str, Any], status: int, message: str
) -> None:
    found = post(server, "/v1/embeddings", {"model": "embedder", **document})
    assert found.status == status
    assert message in found.json["error"]["message"]
    assert found.json["error"]["type"] == "invalid_request_error"


def test_texts_are_cut_where_the_client_wants_it_and_emoji_are_texts(server: Server) -> None:
    long = "a " * 40
    cut = post(server, "/v1/embeddings", {"model": "embedder", "input": long, "truncate": True}).json
    assert cut["usage"]["prompt_tokens"] == MOST
    emoji = post(server, "/v1/embeddings", {"model": "embedder", "input": "\N{CAT FACE} \N{GRINNING FACE}"})
    assert emoji.status == 200
    surrogate = fetch(server.url, "/v1/embeddings", b'{"model": "embedder", "input": "\\ud800"}')
    assert surrogate.status == 400
    assert surrogate.json["error"]["type"] == "invalid_request_error"


def test_batches_keep_within_the_tokens_of_the_spec(server: Server, folder: Path) -> None:
    spec = f"embedder=hf:{folder}/embedder,max_batch_tokens=64"
    with serving(spec, "--device", "cpu", "--queue-capacity", "4096") as limited:
        found = post(limited, "/v1/embeddings", {"input": ["a " * 30] * 50 + ["a"] * 50})
        assert found.status == 200
        assert _largest_batch(limited, "a " * 30) <= 2
        assert _largest_batch(limited, "a") > 2


def _largest_batch(server: Server, text: str) -> int:
    body = json.dumps({"inputs": [text] * 40}).encode()
    answer = fetch(server.url, "/predict", body, headers={"Content-Type": "application/json"}).json
    return int(answer["batch_size"])


def test_without_a_name_the_only_model_of_the_task_serves(server: Server) -> None:
    assert post(server, "/rerank", {"query": "how", "texts": ["a dog"]}).status == 200
    assert post(server, "/v1/embeddings", {"input": "a"}).json["model"] == "embedder"


def test_a_query_that_would_be_copied_for_many_texts_is_too_large(server: Server) -> None:
    found = post(server, "/rerank", {"query": "a" * 100_000, "texts": ["a"] * 2000})
    assert found.status == 413
    assert "send a shorter query" in found.json["error"]["message"]


@pytest.mark.parametrize(("name", "value"), [("token_type_ids", 99), ("input_ids", -1)])
def test_tensors_outside_the_tables_of_the_network_are_bad_input(server: Server, name: str, value: int) -> None:
    arrays = _tensors([2, 6, 3]) | {name: [value] * 3}
    inputs = [{"name": key, "shape": [1, 3], "datatype": "INT64", "data": row} for key, row in arrays.items()]
    found = post(server, "/v2/models/embedder/infer", {"inputs": inputs})
    assert found.status == 400
    assert "is not within 0.." in found.json["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules.json": [{"type": "x.Dense", "path": ""}]}, "the module x.Dense is not supported"),
        ({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}, "is not supported"),
        ({"config.json": None}, "has no config.json"),
        ({"config.json": {"model_type": "unheard"}}, "reading the model failed"),
        ({"model.safetensors": None}, "has no weights"),
    ],
)
def test_a_folder_that_cannot_be_served_is_one_line_with_the_remedy(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_encoder(tmp_path / "encoder")
    for name, content in change.items():
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    with pytest.raises(RuntimeError) as error, serving(f"m=hf:{folder}", "--device", "cpu"):
        pass
    assert message in str(error.value)
    assert "Traceback" not in str(error.value)


def test_the_pooling_of_newer_folders_is_read(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": True}))
    model = EncoderModel(f"hf:{folder}")
    model.load("cpu")
    sample = model.decode(b"a dog", "text/plain")
    found = model.run(**{name: each[None] for name, each in sample.items()})["embedding"][0]
    np.testing.assert_allclose(found, embedding_of(folder, "a dog"), atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:", "names no model"),
        ("hf:/nowhere", "no folder '/nowhere'"),
        ("hf:x,task=chat", "has 'task=chat'"),
        ("hf:x,max_batch_tokens=0", "has 'max_batch_tokens=0'"),
    ],
)
def test_a_spec_that_cannot_be_read_names_the_value(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        source_of(spec).check("m", "pretrained", None)


def test_weights_in_onnx_are_served_where_there_are_none_of_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    table = write_onnx_encoder(folder / "onnx")
    texts = ["the cat sat on the mat", "a dog"]
    with serving(f"model=hf:{folder / 'onnx'}", "--device", "cpu") as server:
        found = post(server, "/v1/embeddings", {"input": texts}).json["data"]
        alone = [post(server, "/v1/embeddings", {"input": text}).json["data"][0] for text in texts]
    for text, together, one in zip(texts, found, alone, strict=True):
        tokens = [2, *(5 + WORDS.index(word) for word in text.split()), 3]
        expected = table[tokens].mean(0) + 1.0
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose([together["embedding"], one["embedding"]], [expected] * 2, atol=1e-5)


def test_a_task_without_its_head_is_refused(folder: Path, server: Server) -> None:
    with pytest.raises(SpecError, match="has no network for task=rerank; its task is embed"):
        EncoderModel(f"hf:{folder}/embedder,task=rerank")
