"""Batches of named tensors: stacked inputs, and outputs checked against the signature. Without torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.model import BadInput, Tensor
from server.errors import (
    BadInputError,
    DeviceLostError,
    DeviceUnavailableError,
    ModelError,
    OutOfMemoryError,
    OutputError,
    RowsError,
    one_line,
)
from server.models.signature import DTYPES, Signature, TensorSpec

Row = Mapping[str, NDArray[Any]]  # one sample: array by name, without the batch dimension


def stack(name: str, tensor: Tensor, samples: Sequence[Row]) -> NDArray[Any]:
    """The samples of one input as a new array [n, ...], padded at the end to the longest if the input is padded."""
    arrays = [sample[name] for sample in samples]
    if tensor.pad is None:
        return np.stack(arrays)
    batch = np.full((len(arrays), *np.max([array.shape for array in arrays], axis=0)), tensor.pad, arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return batch


@contextmanager
def client_errors(samples: Sequence[Row]) -> Iterator[None]:
    """Raise BadInputError if the model says BadInput, or fails on one sample that has NaN or infinity."""
    try:
        yield
    except BadInput as error:
        raise BadInputError(one_line(error)) from error
    except (BadInputError, OutOfMemoryError, DeviceLostError, DeviceUnavailableError):
        raise
    except Exception as error:
        name = next((name for name, array in samples[0].items() if not _is_finite(array)), None)
        if name is None or len(samples) > 1:
            raise
        raise BadInputError(
            f"the model fails on input {name}, which has NaN or infinity: {type(error).__name__}"
        ) from error


def checked_rows(signature: Signature, outputs: Any, rows: int) -> Sequence[Row]:
    """The outputs of a batch, row by row, in memory of their own, since a model may use its buffers again.

    Args:
        signature: the model's.
        outputs: what the model returned; it should be arrays [rows, ...] by name. Where a dimension varies, it may be a
            list with an array for each sample.
        rows: number of samples in the batch.

    Raises:
        OutputError: the outputs do not fit the signature.
        ModelError: a value is not a number.
    """
    if not isinstance(outputs, Mapping):
        raise OutputError(f"the model returned {type(outputs).__name__}; it has to return arrays by output name")
    values = {spec.name: _checked(spec, outputs, rows) for spec in signature.outputs}
    if len(outputs) > len(values):
        unknown = next(name for name in outputs if name not in values)
        raise OutputError(f"the model returned an output {unknown!r}, which its signature does not have")
    return [{name: value[row] for name, value in values.items()} for row in range(rows)]


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _checked(spec: TensorSpec, outputs: Mapping[str, Any], rows: int) -> Sequence[NDArray[Any]]:
    """The rows of an output of a batch that fit the signature.

    Raises:
        OutputError: it is missing, or has another datatype, shape or number of rows.
        ModelError: a value is not a number.
    """
    if spec.name not in outputs:
        raise OutputError(f"the model returned no output {spec.name}")
    value = outputs[spec.name]
    if isinstance(value, np.ndarray) and value.dtype.hasobject and spec.datatype != "BYTES":
        value = [*value]  # an array of arrays
    if isinstance(value, list | tuple) and -1 in spec.sample_shape:
        if len(value) != rows:
            raise RowsError(f"the model returned output {spec.name} of {len(value)} samples; the batch has {rows}")
        return [_checked_array(spec, _of_one(spec, each)[None])[0, ...] for each in value]
    array = _array(spec, value)
    if array.ndim == 0 or len(array) != rows:
        raise RowsError(_wrong_shape(spec, array, rows))
    array = _checked_array(spec, array)
    return [array[row, ...] for row in range(rows)]


def _array(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """A copy as an array; BYTES as objects from the start, since NumPy's strings lose zeros at their end."""
    try:
        return np.array(value, object if spec.datatype == "BYTES" and not isinstance(value, np.ndarray) else None)
    except ValueError as error:
        raise OutputError(
            f"the model returned output {spec.name} with samples of different shapes; let the dimension be -1 and "
            "return a list with an array for each sample"
        ) from error


def _of_one(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """The array of one sample; an empty list, whose shape and datatype NumPy cannot know, has those of the output."""
    array = _array(spec, value)
    if array.shape == (0,) and array.ndim < len(spec.sample_shape):
        return np.zeros([max(0, size) for size in spec.sample_shape], DTYPES[spec.datatype])
    return array


def _checked_array(spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    """An array [n, ...] that fits the signature; see `_checked`."""
    dtype = DTYPES[spec.datatype]
    if array.dtype.kind in "SU" and dtype.hasobject:
        array = array.astype(object)
    if array.dtype != dtype:
        raise OutputError(f"the model returned output {spec.name} as {array.dtype}; its datatype is {spec.datatype}")
    if not spec.accepts(spec.datatype, array.shape, least=0):
        raise OutputError(_wrong_shape(spec, array, len(array)))
    if dtype.hasobject and not all(isinstance(element, bytes | str) for element in array.flat):
        raise OutputError(f"the model returned output {spec.name} with elements that are neither bytes nor str")
    if dtype.kind == "f" and np.isnan(array).any():
        raise ModelError(f"the model returned NaN in output {spec.name}")
    return array


def _wrong_shape(spec: TensorSpec, array: NDArray[Any], rows: int) -> str:
    shape = [rows, *spec.sample_shape]
    return f"the model returned output {spec.name} of shape {[*array.shape]}; the batch takes {shape}"
