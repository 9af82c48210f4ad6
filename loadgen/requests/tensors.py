"""Requests to a model of named tensors: synthetic samples, or one from a file, as binary tensors."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from loadgen.client import JSON_LENGTH, RequestContent
from loadgen.requests.metadata import ModelMetadata, TensorMetadata
from policies.sample_file import read_sample
from policies.types import SpecError

SAMPLES = 4  # synthetic samples, sent in turn
VARYING = 16  # size of a dimension that varies, in synthetic samples of a model without lengths
_DTYPES: Mapping[str, np.dtype[Any]] = {  # of the protocol's datatypes; BF16 is float32 until it is sent
    "BOOL": np.dtype("?"),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype("<f4"),
    "BYTES": np.dtype(object),
}
_OUTPUTS: Mapping[str, Any] = {"parameters": {"binary_data_output": True}}


class _Bounds(BaseModel):
    max_length: int


def tensor_content(
    model: ModelMetadata, sample: Path | None = None, lengths: Sequence[int] | None = None
) -> RequestContent:
    """Send samples by the Open Inference Protocol; the outputs come back as binary tensors.

    Args:
        model: the model's metadata.
        sample: file with the sample to send; None sends `SAMPLES` synthetic ones in turn.
        lengths: length of each request in order, to which the sample is cut or repeated; None sends it as it is, and
            synthetic ones of half the model's largest length.

    Raises:
        SpecError: the file cannot be read, its sample does not fit the model, a datatype is unknown, or a length is
            above the model's largest.
    """
    for tensor in model.inputs:
        if tensor.datatype not in _DTYPES:
            raise SpecError(f"{model.name} takes {tensor}; generate-load sends only {', '.join(_DTYPES)}")
    longest = _max_length(model)
    taken = {each.name: (_DTYPES[each.datatype], each.sample_shape) for each in model.inputs}
    given = None if sample is None else read_sample(sample, taken)
    if lengths is not None:
        if longest is None:
            raise SpecError(f"{model.name} has samples of one size; leave out --sizes")
        if max(lengths) > longest:
            raise SpecError(
                f"--sizes has {max(lengths)}, the longest sample of {model.name} is {longest}; lower --size-scale"
            )
        return _content_of_lengths(model, lengths, given)
    if given is None:
        rng, size = np.random.default_rng(0), longest and (longest + 1) // 2
        samples = [
            {tensor.name: _synthetic(tensor, rng, size or VARYING) for tensor in model.inputs} for _ in range(SAMPLES)
        ]
    else:
        samples = [given]
    bodies = [tensor_body([(tensor, each[tensor.name]) for tensor in model.inputs], _OUTPUTS) for each in samples]
    return RequestContent(model.infer_path, cycle([body for _, body in bodies]), tensor_headers(bodies[0][0]))


def _max_length(model: ModelMetadata) -> int | None:
    """The largest length of a model whose samples differ in length; None for others."""
    try:
        return _Bounds.model_validate(model.parameters).max_length
    except ValidationError:
        return None


def _content_of_lengths(
    model: ModelMetadata, lengths: Sequence[int], sample: Mapping[str, NDArray[Any]] | None
) -> RequestContent:
    """Parts of one sample; the JSON documents of all bodies are filled with spaces to the longest."""
    rng = np.random.default_rng(0)
    whole = sample or {tensor.name: _synthetic(tensor, rng, max(lengths)) for tensor in model.inputs}

    def body(length: int, document: int = 0) -> tuple[int, bytes]:
        parts = [(tensor, _resized(whole[tensor.name], tensor, length)) for tensor in model.inputs]
        return tensor_body(parts, _OUTPUTS, document)

    document, _ = body(max(lengths))
    bodies = (body(length, document)[1] for length in lengths)
    return RequestContent(model.infer_path, bodies, tensor_headers(document))


def _resized(array: NDArray[Any], tensor: TensorMetadata, length: int) -> NDArray[Any]:
    """The array with the dimensions that vary cut, or repeated, to a length."""
    for axis, size in enumerate(tensor.sample_shape):
        if size == -1:
            array = array.take(range(length), axis, mode="wrap")
    return array


def tensor_body(
    sample: Iterable[tuple[TensorMetadata, NDArray[Any]]], more: Mapping[str, Any], min_document: int = 0
) -> tuple[int, bytes]:
    """Make the body of an inference call with one sample.

    Args:
        sample: the inputs, each with its array without the batch dimension.
        more: further members of the JSON document.
        min_document: length to which the JSON document is filled with spaces.

    Returns:
        The length of the JSON document, and the body: the document, followed by the tensors.
    """
    entries, tensors = [], []
    for tensor, array in sample:
        data = _encode(array, tensor.datatype)
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": [1, *array.shape]}
        entries.append(entry | {"parameters": {"binary_data_size": len(data)}})
        tensors.append(data)
    document = orjson.dumps({"inputs": entries, **more}).ljust(min_document)
    return len(document), b"".join((document, *tensors))


def tensor_headers(length: int) -> dict[str, str]:
    """Headers of inference calls whose JSON document has this length."""
    return {JSON_LENGTH: str(length), "Content-Type": "application/octet-stream"}


def _synthetic(tensor: TensorMetadata, rng: np.random.Generator, varying: int = VARYING) -> NDArray[Any]:
    """Random values; texts have two digits, so that the bodies of all samples have one length."""
    shape = tuple(varying if size == -1 else size for size in tensor.sample_shape)
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
