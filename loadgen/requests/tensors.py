"""Requests to a model of named tensors: synthetic samples, or one from a file, as binary tensors."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from loadgen.client import JSON_LENGTH, RequestContent
from loadgen.requests.metadata import ModelMetadata, TensorMetadata
from policies.sample_file import read_sample
from policies.types import SpecError

SAMPLES = 4  # synthetic samples, sent in turn
VARYING = 16  # size of a dimension that varies, in synthetic samples
_DTYPES: Mapping[str, np.dtype[Any]] = {  # of the protocol's datatypes; BF16 is float32 until it is sent
    "BOOL": np.dtype("?"),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype("<f4"),
    "BYTES": np.dtype(object),
}


def tensor_content(model: ModelMetadata, sample: Path | None) -> RequestContent:
    """Send samples by the Open Inference Protocol; the outputs come back as binary tensors.

    Args:
        model: the model's metadata.
        sample: file with the sample to send; None sends `SAMPLES` synthetic ones in turn.

    Raises:
        SpecError: the file cannot be read, its sample does not fit the model, or a datatype is unknown.
    """
    for tensor in model.inputs:
        if tensor.datatype not in _DTYPES:
            raise SpecError(f"{model.name} takes {tensor}; generate-load sends only {', '.join(_DTYPES)}")
    if sample is None:
        rng = np.random.default_rng(0)
        samples = [{tensor.name: _synthetic(tensor, rng) for tensor in model.inputs} for _ in range(SAMPLES)]
    else:
        samples = [
            read_sample(sample, {each.name: (_DTYPES[each.datatype], each.sample_shape) for each in model.inputs})
        ]
    outputs = {"parameters": {"binary_data_output": True}}
    bodies = [tensor_body([(tensor, each[tensor.name]) for tensor in model.inputs], outputs) for each in samples]
    return RequestContent(model.infer_path, cycle([body for _, body in bodies]), tensor_headers(bodies[0][0]))


def tensor_body(sample: Iterable[tuple[TensorMetadata, NDArray[Any]]], more: Mapping[str, Any]) -> tuple[int, bytes]:
    """Make the body of an inference call with one sample.

    Args:
        sample: the inputs, each with its array without the batch dimension.
        more: further members of the JSON document.

    Returns:
        The length of the JSON document, and the body: the document, followed by the tensors.
    """
    entries, tensors = [], []
    for tensor, array in sample:
        data = _encode(array, tensor.datatype)
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": [1, *array.shape]}
        entries.append(entry | {"parameters": {"binary_data_size": len(data)}})
        tensors.append(data)
    document = orjson.dumps({"inputs": entries, **more})
    return len(document), b"".join((document, *tensors))


def tensor_headers(length: int) -> dict[str, str]:
    """Headers of inference calls whose JSON document has this length."""
    return {JSON_LENGTH: str(length), "Content-Type": "application/octet-stream"}


def _synthetic(tensor: TensorMetadata, rng: np.random.Generator) -> NDArray[Any]:
    """Random values; texts have two digits, so that the bodies of all samples have one length."""
    shape = tuple(VARYING if size == -1 else size for size in tensor.sample_shape)
    dtype = _DTYPES[tensor.datatype]
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    numbers = np.asarray(rng.integers(10, 100, shape))
    return numbers.astype("S2").astype(object) if dtype.hasobject else numbers.astype(dtype)


def _encode(array: NDArray[Any], datatype: str) -> bytes:
    """A binary tensor: row-major; BYTES with their lengths; BF16 rounded towards zero."""
    if datatype == "BYTES":
        return b"".join(len(each).to_bytes(4, "little") + each for each in array.reshape(-1).tolist())
    if datatype == "BF16":
        return (np.ascontiguousarray(array).view("<u4") >> 16).astype("<u2").tobytes()
    return array.tobytes()
