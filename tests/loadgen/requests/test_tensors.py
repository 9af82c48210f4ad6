"""Tests of requests to models of named tensors, whose bodies the server's own parser reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.client import RequestContent
from loadgen.requests.metadata import ModelMetadata
from loadgen.requests.tensors import SAMPLES, VARYING, tensor_content
from policies.types import SpecError
from server.api.open_inference.protocol import InferCall, parse_infer
from server.models.signature import DTYPES, Signature, TensorSpec

OUTPUT = {"name": "y", "datatype": "FP32", "shape": [-1, 1]}


def model(**inputs: tuple[str, list[int]]) -> ModelMetadata:
    """A model with these datatypes and shapes of one sample by input name."""
    listed = [{"name": name, "datatype": kind, "shape": [-1, *shape]} for name, (kind, shape) in inputs.items()]
    return ModelMetadata.model_validate({"name": "a b", "inputs": listed, "outputs": [OUTPUT]})


def calls(described: ModelMetadata, content: RequestContent, count: int) -> list[InferCall]:
    """The next calls as the server reads them."""
    length = int(content.headers["Inference-Header-Content-Length"])
    inputs = tuple(TensorSpec(each.name, {each.datatype: each.sample_shape}) for each in described.inputs)
    signature = Signature(inputs, (TensorSpec("y", {"FP32": (1,)}),))
    return [parse_infer(next(content.bodies), length, signature, 8) for _ in range(count)]


def values(call: InferCall, name: str) -> Any:
    return np.asarray(call.tensors[name].data).reshape(call.tensors[name].shape)


@pytest.mark.parametrize("datatype", DTYPES)
def test_synthetic_samples_of_every_datatype_fit_the_signature(datatype: str) -> None:
    described = model(x=(datatype, [3, -1]), scalar=(datatype, []))
    content = tensor_content(described, None)
    assert content.path == "/v2/models/a%20b/infer"
    sent = calls(described, content, SAMPLES + 1)
    assert {call.tensors["x"].shape for call in sent} == {(1, 3, VARYING)}
    assert {call.tensors["scalar"].shape for call in sent} == {(1,)}
    assert not (values(sent[0], "x") == values(sent[1], "x")).all()
    assert (values(sent[0], "x") == values(sent[SAMPLES], "x")).all()
    assert all(output.binary for output in sent[0].outputs)


def test_the_sample_of_a_file_is_sent(tmp_path: Path) -> None:
    described = model(ids=("INT64", [-1]), weights=("BF16", [2]), words=("BYTES", [2]), flag=("BOOL", []))
    path = tmp_path / "sample.json"
    sample = {"ids": [5, 6, 7], "weights": [0.5, -3.0], "words": ["größer", ""], "flag": True}
    path.write_text(json.dumps({"inputs": sample}))
    for call in calls(described, tensor_content(described, path), 2):
        assert values(call, "ids").tolist() == [[5, 6, 7]]
        assert values(call, "weights").tolist() == [[0.5, -3.0]]
        assert values(call, "words").tolist() == [["größer".encode(), b""]]
        assert values(call, "flag").tolist() == [True]


def test_a_sample_that_does_not_fit_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    np.savez(tmp_path / "sample.npz", x=np.zeros((1, 4)))
    with pytest.raises(SpecError, match=r"input x has the shape \[1, 4\], the model takes \[4\]"):
        tensor_content(model(x=("FP32", [4])), tmp_path / "sample.npz")


def test_a_datatype_of_another_server_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"a b takes x as FP8 \[-1, 4\]; generate-load sends only BOOL, "):
        tensor_content(model(x=("FP8", [4])), None)


def with_max_length(longest: int) -> ModelMetadata:
    described = model(x=("FP32", [2, -1]), mask=("BOOL", [-1]), k=("INT32", []))
    return described.model_copy(update={"parameters": {"weights": "m.py", "max_length": longest}})


def test_samples_of_given_lengths_share_one_header() -> None:
    described, lengths = with_max_length(1600), [7, 1600, 1, 123]
    for call, length in zip(calls(described, tensor_content(described, lengths=lengths), 4), lengths, strict=True):
        assert call.tensors["x"].shape == (1, 2, length)
        assert call.tensors["mask"].shape == (1, length)
        assert call.tensors["k"].shape == (1,)


def test_the_first_sample_of_a_class_is_cut_or_repeated_to_each_length(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUES = [1.0, 2.0, 3.0]")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom neighbour import VALUES\nclass Mine:\n    def samples(self):\n"
        "        return [{'x': np.array([VALUES] * 2), 'mask': np.array([True, False, False]), 'k': 7}]\n"
    )
    described, lengths = with_max_length(1600), [2, 5]
    sent = calls(described, tensor_content(described, tmp_path / "mine.py:Mine", lengths), 2)
    assert [values(call, "x").tolist() for call in sent] == [[[[1, 2]] * 2], [[[1, 2, 3, 1, 2]] * 2]]
    assert values(sent[1], "mask").tolist() == [[True, False, False, True, False]]
    assert [values(call, "k").tolist() for call in sent] == [[7], [7]]
    (tmp_path / "broken.py").write_text(
        "class Mine:\n    def samples(self):\n        return []\nclass Bad:\n    samples = 1"
    )
    for name, reason in (
        ("mine.py:Other", r"mine\.py has no class Other; name one"),
        ("no.py:Mine", r"no file .*no\.py'; give FILE"),
        ("broken.py:Mine", r"samples\(\) of Mine returns none; let it"),
        ("broken.py:Bad", r"gives no sample \(TypeError: 'int' object is not callable\); correct the file"),
    ):
        with pytest.raises(SpecError, match=reason):
            tensor_content(described, tmp_path / name, lengths)


def test_without_sizes_a_model_with_lengths_gets_half_its_largest() -> None:
    (call,) = calls(with_max_length(101), tensor_content(with_max_length(101)), 1)
    assert call.tensors["x"].shape == (1, 2, 51)


def test_sizes_that_the_model_does_not_take_are_errors() -> None:
    with pytest.raises(SpecError, match="--sizes has 21, the longest sample of a b is 20; lower --size-scale"):
        tensor_content(with_max_length(20), lengths=[3, 21])
    with pytest.raises(SpecError, match="a b has samples of one size; leave out --sizes"):
        tensor_content(model(x=("FP32", [-1])), lengths=[3])
