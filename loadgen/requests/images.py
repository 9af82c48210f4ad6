"""Requests to an image model: an encoded image to /predict, or pixels by the Open Inference Protocol."""

import importlib.util
import mimetypes
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.client import RequestContent
from loadgen.requests.metadata import ModelMetadata, TensorMetadata, predict_path
from loadgen.requests.tensors import tensor_body, tensor_headers
from policies.types import SpecError

_GRID = 8  # colours of a smooth image in each direction


def takes_images(model: ModelMetadata) -> bool:
    """Whether the only input is `image`, of pixels."""
    return len(model.inputs) == 1 and model.inputs[0].name == "image" and _is_pixels(model.inputs[0])


def image_content(model: str | None, image: Path | None) -> RequestContent:
    """Send one image to /predict.

    Args:
        model: model name; None for a server that does not list its models.
        image: an image file; None is matplotlib's sample photograph.

    Raises:
        SpecError: the file cannot be read.
    """
    path = image or sample_photograph()
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the image {str(path)!r} ({error.strerror}); give --image an image file") from None
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return RequestContent(predict_path(model), repeat(body), {"Content-Type": kind})


def pixel_content(model: ModelMetadata) -> RequestContent:
    """Send a smooth image of the model's size; only the best class is requested, to keep responses small.

    Raises:
        SpecError: the model takes no pixels.
    """
    tensor = model.inputs[0]
    if len(model.inputs) > 1 or not _is_pixels(tensor):
        taken = model.input_names()
        raise SpecError(f"{model.name} takes {taken}, not UINT8 [-1, H, W, 3]; leave out --pixels")
    pixels = _smooth_image(*tensor.sample_shape[:2])
    best = {"name": model.outputs[0].name, "parameters": {"classification": 1, "binary_data": False}}
    length, body = tensor_body([(tensor, pixels)], {"outputs": [best]})
    return RequestContent(model.infer_path, repeat(body), tensor_headers(length))


def _smooth_image(height: int, width: int) -> NDArray[np.uint8]:
    """Random colours on a coarse grid, interpolated linearly: on noise, activations exceed the range of fp16."""
    colours = np.random.default_rng(0).uniform(0.0, 255.0, (_GRID, _GRID, 3))
    rows, columns = (
        np.maximum(0.0, 1.0 - abs(np.linspace(0.0, _GRID - 1.0, size)[:, None] - np.arange(_GRID)))
        for size in (height, width)
    )
    image: NDArray[np.uint8] = np.einsum("hi,wj,ijc->hwc", rows, columns, colours).astype(np.uint8)
    return image


def sample_photograph() -> Path:
    """Path of matplotlib's sample photograph, found without importing matplotlib, which takes half a second."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise SpecError("matplotlib and its sample photograph are not installed; give --image FILE")
    return Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"


def _is_pixels(tensor: TensorMetadata) -> bool:
    shape = tensor.sample_shape
    return tensor.datatype == "UINT8" and len(shape) == 3 and min(shape) > 0 and shape[2] == 3
