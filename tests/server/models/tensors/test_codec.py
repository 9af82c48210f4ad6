"""The codec of models of named tensors: inputs from every form, outputs to every form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from batchwright import Model, Tensor
from server.api.open_inference.protocol import parse_infer
from server.errors import BadInputError, ModelError
from server.models.tensors.codec import TensorCodec, check_sample

NUMBERS = {
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
}


class Two(Model):
    inputs = {"x": Tensor("FP32", [2, 3]), "tag": Tensor("BYTES", [])}
    outputs = {"y": Tensor("FP32", [2]), "text": Tensor("BYTES", [1])}


class Varying(Model):
    inputs = {"a": Tensor("INT64", [-1]), "b": Tensor("FP32", [2, -1])}
    outputs = {"y": Tensor("FP32", [-1])}


class Padded(Model):
    inputs = {"x": Tensor("FP32", [2, -1], pad=0.0), "mask": Tensor("BOOL", [-1], pad=False), "k": Tensor("INT32")}
    outputs = {"y": Tensor("FP32", [2])}
    lengths = [4, 6, 20]


class PaddedAndVarying(Padded):
    inputs = {"x": Tensor("FP32", [2, -1], pad=0.0), "other": Tensor("INT64", [-1])}


class One(Model):
    inputs = {"x": Tensor("UINT16", [-1, 2])}
    outputs = {"x": Tensor("UINT16", [-1, 2])}


class Own(Two):
    def decode(self, body: bytes, content_type: str) -> Mapping[str, Any]:
        if content_type == "crash":
            raise RuntimeError("a secret")
        if content_type == "exit":
            raise SystemExit(1)
        if content_type == "short":
            return {"x": np.zeros((2, 3), np.float32)}
        if content_type == "other":
            return {"x": np.zeros((3, 3), np.float32), "tag": b"t"}
        return {"x": [[float(body)] * 3] * 2, "tag": content_type}

    def render(self, outputs: Mapping[str, Any]) -> Any:
        return {"sum": outputs["y"].sum(), "text": outputs["text"][0].decode()}


CODEC = TensorCodec(Two())
OUTPUT = {"y": np.array([1.5, np.inf], np.float32), "text": np.array([b"\xc3\xa9"], object)}


def read(codec: TensorCodec, body: Any, content_type: str = "application/json") -> Mapping[str, Any]:
    (sample,) = codec.from_body(body if isinstance(body, bytes) else json.dumps(body).encode(), content_type).read()
    assert isinstance(sample, Mapping)
    return sample


def test_a_body_holds_one_sample_as_nested_lists() -> None:
    sample = read(CODEC, {"inputs": {"x": [[1, 2, 3], [4, 5, 6.5]], "tag": "hello"}})
    np.testing.assert_array_equal(sample["x"], np.array([[1, 2, 3], [4, 5, 6.5]], np.float32), strict=True)
    assert sample["tag"].item() == b"hello"
    assert CODEC.shape_of(sample) == ""
    assert not CODEC.varies_in_shape


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'send {"inputs": {...}} with x, tag'),
        ([], 'send an object with "inputs"'),
        ({"inputs": [1]}, "with x, tag"),
        ({"inputs": {"x": [[1, 2, 3], [4, 5, 6]]}}, "inputs missing: 'tag'; send"),
        ({"inputs": {"x": [[1, 2, 3]] * 2, "Tag": "t", "z": 1}}, "inputs missing: 'tag' and unknown: 'Tag, z'; send"),
        ({"inputs": {"x": [[1, 2, 3]] * 2, "tag": "t"}, "outputs": []}, "with x, tag"),
        ({"inputs": {"x": [[1, 2, 3]] * 3, "tag": "t"}}, "one sample of `x`, FP32 [2, 3], as nested lists"),
        ({"inputs": {"x": [[1, 2, 3], [4]], "tag": "t"}}, "does not fit shape"),
        ({"inputs": {"x": [[1, 2, "3"], [4, 5, 6]], "tag": "t"}}, "holds str"),
        ({"inputs": {"x": 1, "tag": "t"}}, "one sample of `x`"),
        ({"inputs": {"x": [[1, 2, 3]] * 2, "tag": ["t"]}}, "holds list; send str"),
        ({"inputs": {"x": [[1, 2, 3]] * 2, "tag": 7}}, "holds int; send str"),
        ({"inputs": {"x": [[1e39, 2, 3]] * 2, "tag": "t"}}, "too large for FP32"),
    ],
)
def test_a_body_that_is_no_sample_is_bad_input(body: Any, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read(CODEC, body)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_call_has_a_sample_for_each_row_of_all_inputs() -> None:
    x = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    document = json.dumps(
        {
            "inputs": [
                {"name": "tag", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]},
                {"name": "x", "datatype": "FP32", "shape": [3, 2, 3], "parameters": {"binary_data_size": x.nbytes}},
            ]
        }
    ).encode()
    call = parse_infer(document + x.tobytes(), len(document), CODEC.signature(0), 100)
    inputs = CODEC.from_tensors(call.tensors)
    samples = inputs.read()
    assert inputs.count == len(samples) == 3
    for row, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["x"], x[row])
        assert sample["tag"] == b"abc"[row : row + 1]


def test_inputs_with_different_numbers_of_samples_are_bad_input() -> None:
    entries = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2, 3], "data": [0] * 6},
        {"name": "tag", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]},
    ]
    with pytest.raises(BadInputError, match="input tag has 2 samples, x has 1"):
        parse_infer(json.dumps({"inputs": entries}).encode(), None, CODEC.signature(0), 100)


def test_a_raw_body_is_one_sample_of_the_only_input() -> None:
    codec = TensorCodec(One())
    raw = np.arange(6, dtype="<u2").tobytes()
    call = parse_infer(raw, 0, codec.signature(0), 1)
    (sample,) = codec.from_tensors(call.tensors).read()
    np.testing.assert_array_equal(sample["x"], np.arange(6, dtype=np.uint16).reshape(3, 2))
    assert codec.shape_of(sample) == "3x2"
    with pytest.raises(BadInputError, match="5 bytes is not one sample"):
        codec.from_tensors(parse_infer(raw[:5], 0, codec.signature(0), 1).tensors)
    with pytest.raises(BadInputError, match="cannot hold 2 inputs"):
        parse_infer(raw, 0, CODEC.signature(0), 1)


def test_samples_of_different_shapes_have_different_keys() -> None:
    codec = TensorCodec(Varying())
    one, other = (read(codec, {"inputs": {"a": [1] * n, "b": [[0.0] * n] * 2}}) for n in (1, 2))
    assert codec.varies_in_shape
    assert (codec.shape_of(one), codec.shape_of(other)) == ("1,2x1", "2,2x2")


def test_a_models_own_functions_decode_and_render() -> None:
    codec = TensorCodec(Own())
    inputs = codec.from_body(b"7", "text/x")
    assert inputs.runs_user_code, "it does not run on the event loop"
    assert not codec.json_body
    (sample,) = inputs.read()
    np.testing.assert_array_equal(sample["x"], np.full((2, 3), 7, np.float32), strict=True)
    assert sample["tag"].item() == b"text/x"
    assert codec.renders_by_user_code
    assert codec.render({**OUTPUT, "y": np.ones(2, np.float32)}, ()) == {"outputs": {"sum": 2.0, "text": "é"}}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("x", BadInputError, "cannot decode the body: could not convert"),
        ("crash", ModelError, "decode of the model failed with RuntimeError"),
        ("exit", ModelError, "decode of the model failed with SystemExit"),
        ("short", ModelError, "decode gives x; it has to give a value by name for x, tag"),
        ("other", ModelError, r"decode: input x has the shape \[3, 3\], the model takes \[2, 3\]"),
    ],
)
def test_a_models_own_decode_may_fail(
    kind: str, error: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error, match=message):
        TensorCodec(Own()).from_body(b"no number", kind).read()
    crashed = "failed with" in message
    assert ("decode of the model Own failed" in caplog.text) == ("in decode" in caplog.text) == crashed


def test_a_render_that_fails_is_the_models_error_and_its_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"render of the model failed with KeyError$"):
        TensorCodec(Own()).render({}, ())
    assert "render of the model Own failed" in caplog.text
    assert "in render" in caplog.text, "the traceback has the line of the model"


@dataclass
class Score:
    value: float


@pytest.mark.parametrize(
    "value", [float("nan"), np.float32("inf"), {"a": [1, (2, np.array([1, np.nan]))]}, [Score(float("inf"))]]
)
def test_a_render_that_returns_what_json_does_not_have_is_the_models_error(value: Any) -> None:
    class Renders(Own):
        def render(self, outputs: Mapping[str, Any]) -> Any:
            return {"null": None, "value": value}

    with pytest.raises(ModelError, match="render of the model returned NaN or infinity"):
        TensorCodec(Renders()).render(OUTPUT, ())


def test_a_render_may_return_null() -> None:
    class Renders(Own):
        def render(self, outputs: Mapping[str, Any]) -> Any:
            return {"best": None, "scores": [0.5, np.arange(2)]}

    assert TensorCodec(Renders()).render(OUTPUT, ()) == {"outputs": {"best": None, "scores": [0.5, [0, 1]]}}


def test_outputs_are_nested_lists_and_stacked_tensors() -> None:
    finite = {**OUTPUT, "y": np.array([1.5, 2.0], np.float32)}
    assert CODEC.render(finite, ()) == {"outputs": {"y": [1.5, 2.0], "text": ["é"]}}
    with pytest.raises(BadInputError, match="output y has NaN or infinities"):
        CODEC.render(OUTPUT, ())
    stacked = CODEC.stack([OUTPUT, OUTPUT])
    assert (stacked["y"].shape, stacked["text"].shape) == ((2, 2), (2, 1))
    assert CODEC.stack([OUTPUT])["y"].shape == (1, 2)
    varying = TensorCodec(Varying())
    with pytest.raises(BadInputError, match="different shapes; send one a call"):
        varying.stack([{"y": np.zeros(n, np.float32)} for n in (1, 2)])


@pytest.mark.parametrize("datatype", sorted(NUMBERS | {"BYTES"}))
def test_synthetic_and_emulated_tensors_fit_the_signature(datatype: str) -> None:
    class OfDatatype(Model):
        inputs = {"x": Tensor(datatype, [2, -1]), "s": Tensor(datatype)}
        outputs = {"y": Tensor(datatype, [3, -1]), "s": Tensor(datatype)}

    codec = TensorCodec(OfDatatype())
    samples = codec.synthetic_samples(3, np.random.default_rng(0))
    for sample in samples:
        assert check_sample(sample, codec.signature(0), "it")["x"].shape == (2, 16)
    first, again, other = (codec.emulate(sample) for sample in (samples[0], samples[0], samples[1]))
    assert (first["y"].shape, first["s"].shape) == ((3, 1), ())
    np.testing.assert_array_equal(first["y"], again["y"])
    if datatype != "BOOL":
        assert not np.array_equal(first["y"], other["y"]), "an answer to another sample can be detected"
    rendered = codec.render(first, ())["outputs"]
    assert json.loads(json.dumps(rendered)).keys() == {"y", "s"}


def test_given_samples_replace_the_synthetic_ones() -> None:
    sample = {"x": np.ones((2, 3), np.float32), "tag": np.array(b"t", object)}
    codec = TensorCodec(Two(), [sample])
    assert codec.synthetic_samples(2, np.random.default_rng(0)) == [sample, sample]


def padded_sample(length: int) -> dict[str, Any]:
    return {
        "x": np.arange(2 * length, dtype=np.float32).reshape(2, length),
        "mask": np.ones(length, bool),
        "k": np.int32(1),
    }


def test_padded_inputs_do_not_make_a_shape() -> None:
    assert not TensorCodec(Padded()).varies_in_shape
    mixed = TensorCodec(PaddedAndVarying())
    assert mixed.varies_in_shape
    assert mixed.shape_of({"x": np.zeros((2, 9)), "other": np.zeros(3)}) == "3"


def test_synthetic_samples_of_a_padded_model_have_one_of_its_lengths() -> None:
    codec, rng = TensorCodec(Padded()), np.random.default_rng(0)
    assert (codec.lengths, codec.synthetic_length_note) == ((4, 6, 20), "length 6")
    for length, expected in ((None, 6), (20, 20)):
        for sample in codec.synthetic_samples(2, rng, length):
            assert (sample["x"].shape, sample["mask"].shape) == ((2, expected), (expected,))
            assert codec.length_of(sample) == expected


def test_given_samples_of_a_padded_model_are_cut_or_repeated() -> None:
    codec, rng = TensorCodec(Padded(), [padded_sample(3), padded_sample(9)]), np.random.default_rng(0)
    short, long = codec.synthetic_samples(2, rng, 4)
    assert short["x"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 3]]
    assert long["x"].tolist() == [[0, 1, 2, 3], [9, 10, 11, 12]]
    assert codec.synthetic_samples(1, rng)[0]["x"].shape == (2, 6)


def test_a_sample_over_the_largest_length_is_rejected_in_every_form() -> None:
    class Decoding(Padded):
        def decode(self, body: bytes, _: str) -> Mapping[str, Any]:
            return padded_sample(int(body))

    class Raw(Padded):
        inputs = {"x": Tensor("UINT8", [-1], pad=0)}

    def lists(length: int) -> Any:
        return {"inputs": {"x": [[0.0] * length] * 2, "mask": [True] * length, "k": 1}}

    def call(name: str, datatype: str, shape: list[int], codec: TensorCodec) -> Any:
        document = {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": [0] * int(np.prod(shape))}]}
        return codec.from_tensors(parse_infer(json.dumps(document).encode(), None, codec.signature(0), 8).tensors)

    assert TensorCodec(Padded()).metadata_parameters() == {"max_length": 20}
    assert read(TensorCodec(Padded()), lists(20))["x"].shape == (2, 20)
    assert read(TensorCodec(Decoding()), b"20")["x"].shape == (2, 20)
    assert call("x", "UINT8", [2, 20], TensorCodec(Raw())).count == 2
    for too_long in (
        lambda: read(TensorCodec(Padded()), lists(21)),
        lambda: read(TensorCodec(Decoding()), b"21"),
        lambda: call("x", "UINT8", [2, 21], TensorCodec(Raw())),
    ):
        with pytest.raises(BadInputError, match="input x has the length 21, over the maximum 20; send a shorter one"):
            too_long()
