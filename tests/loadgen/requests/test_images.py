"""Tests of requests to image models: encoded images, and pixels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.requests.images import image_content, pixel_content, sample_photograph, takes_images
from loadgen.requests.metadata import ModelMetadata
from policies.types import SpecError
from tests.support.stub_server import METADATA


def model(**image: Any) -> ModelMetadata:
    """The stub's model, with changes of its input."""
    tensor = {"name": "image", "datatype": "UINT8", "shape": [-1, 4, 5, 3]}
    return ModelMetadata.model_validate(METADATA | {"inputs": [tensor | image]})


def test_the_photograph_is_sent_unchanged_to_predict() -> None:
    content = image_content("a b/c", None)
    assert content.path == "/predict/a%20b%2Fc"
    assert next(content.bodies) == next(content.bodies) == sample_photograph().read_bytes()
    assert content.headers["Content-Type"] == "image/jpeg"
    assert image_content(None, None).path == "/predict"


def test_an_image_file_is_sent_with_the_type_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    content = image_content("tiny", tmp_path / "a.png")
    assert (next(content.bodies), content.headers["Content-Type"]) == (b"png", "image/png")


def test_an_image_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the image"):
        image_content(None, tmp_path)


def test_pixels_are_sent_as_one_binary_tensor_of_the_models_size() -> None:
    content = pixel_content(model())
    body, length = next(content.bodies), int(content.headers["Inference-Header-Content-Length"])
    document = json.loads(body[:length])
    assert content.path == "/v2/models/tiny/infer"
    assert len(body) - length == 4 * 5 * 3
    assert document["inputs"] == [
        {"name": "image", "datatype": "UINT8", "shape": [1, 4, 5, 3], "parameters": {"binary_data_size": 60}}
    ]
    assert document["outputs"] == [{"name": "logits", "parameters": {"classification": 1, "binary_data": False}}]


def test_pixels_are_as_smooth_as_those_of_a_photograph_and_not_all_the_same() -> None:
    content = pixel_content(model(shape=[-1, 64, 48, 3]))
    length = int(content.headers["Inference-Header-Content-Length"])
    pixels = np.frombuffer(next(content.bodies)[length:], np.uint8).reshape(64, 48, 3).astype(float)
    assert max(abs(np.diff(pixels, axis=axis)).max() for axis in (0, 1)) < 48
    assert pixels.std() > 30


@pytest.mark.parametrize(
    "image", [{"datatype": "FP32"}, {"shape": [-1, 3, 4, 5]}, {"shape": [-1, -1, 5, 3]}, {"shape": [-1, 3]}]
)
def test_pixels_to_a_model_without_them_are_an_error(image: dict[str, Any]) -> None:
    assert not takes_images(model(**image))
    with pytest.raises(SpecError, match=r"tiny takes image as .*, not UINT8 \[-1, H, W, 3\]; leave out --pixels"):
        pixel_content(model(**image))


def test_an_image_is_an_input_of_that_name() -> None:
    assert takes_images(model())
    assert not takes_images(model(name="x"))
