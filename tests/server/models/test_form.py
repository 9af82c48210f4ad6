"""The form of each kind of model: its examples are samples that the model takes, also as a call for a shell."""

import json
import shlex
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest

from batchwright.model import Model, Tensor
from server.models.form import MAX_EXAMPLE, Form
from server.models.images.codec import ImageCodec
from server.models.tensors.codec import TensorCodec

URL = "http://127.0.0.1:8000/predict"
DATATYPES = ("BOOL", "UINT8", "INT64", "FP16", "BF16", "FP64", "BYTES")


def codec_of(**shapes: Any) -> TensorCodec:
    class Mine(Model):
        inputs: ClassVar = {name: Tensor(*each) for name, each in shapes.items()}
        outputs: ClassVar = {"y": Tensor("FP32", [2])}

    return TensorCodec(Mine())


def form_of(**shapes: Any) -> Form:
    return codec_of(**shapes).form()


def sent(form: Form) -> bytes:
    """The body that the line for a shell sends."""
    words = shlex.split(form.curl(URL))
    assert words[-1] == URL
    if words[0] == "curl":
        return words[words.index("-d") + 1].encode()
    assert words[1] == "-c"
    return subprocess.run([sys.executable, *words[1:3]], check=True, capture_output=True).stdout


@pytest.mark.parametrize("shape", [[], [1], [1, 1], [3], [-1], [2, 3], [-1, -1], [3, 40, 50]], ids=str)
@pytest.mark.parametrize("datatype", DATATYPES)
def test_the_call_for_a_shell_is_a_sample_of_the_model(datatype: str, shape: list[int]) -> None:
    codec = codec_of(x=(datatype, shape), **{"it's": ("BYTES", [])})
    (sample,) = codec.from_body(sent(codec.form()), "").read()
    assert sample["x"].shape == tuple(16 if size == -1 else size for size in shape)
    assert set(sample) == {"x", "it's"}


def test_a_scalar_is_a_number_or_a_text_and_other_inputs_are_json() -> None:
    form = form_of(a=("FP32", []), b=("INT32", [1]), c=("BYTES", [1]), d=("BOOL", []), e=("FP32", [4]))
    assert [field.control for field in form.fields] == ["number", "number", "text", "json", "json"]
    assert [field.shape for field in form.fields] == [(), (1,), (1,), (), ()]
    assert np.shape(json.loads(form.fields[-1].example)) == (4,)
    assert form.fields[1].note == "INT32 [1]"
    assert form.outputs == {"y": "FP32"}


def test_a_large_input_is_one_value_that_is_repeated() -> None:
    small, large = form_of(x=("FP32", [8, MAX_EXAMPLE // 8])), form_of(x=("FP32", [3, 1000, 1000]))
    assert small.fields[0].shape == ()
    assert np.shape(json.loads(small.fields[0].example)) == (8, MAX_EXAMPLE // 8)
    assert large.fields[0].shape == (3, 1000, 1000)
    assert json.loads(large.fields[0].example) == 1
    assert len(large.curl(URL)) < 200


def test_a_model_with_its_own_decode_and_render_takes_a_file() -> None:
    class Mine(Model):
        inputs: ClassVar = {"x": Tensor("FP32", [4])}
        outputs: ClassVar = {"y": Tensor("FP32", [2])}

        def decode(self, body: bytes, content_type: str) -> Any:
            return {"x": np.zeros(4)}

        def render(self, outputs: Any) -> Any:
            return "two numbers"

    form = TensorCodec(Mine()).form()
    assert [field.control for field in form.fields] == ["file"]
    assert form.outputs == {}
    assert form.curl(URL) == f"curl -H 'Content-Type: application/octet-stream' --data-binary @sample.bin {URL}"


def test_an_image_is_a_file() -> None:
    form = ImageCodec().form()
    assert form.fields[0].accept == "image/jpeg,image/png"
    assert form.curl(URL) == f"curl --data-binary @photo.jpg {URL}"


def test_the_address_is_quoted() -> None:
    assert shlex.split(ImageCodec().form().curl("http://a/$(x) y"))[-1] == "http://a/$(x) y"
