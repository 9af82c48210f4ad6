"""Batches of named tensors: stacked inputs, and outputs checked against the signature. Without torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.model import Tensor
from server.errors import (
    BadInputError,
    DeviceLostError,
    DeviceUnavailableError,
    ModelError,
    OutOfMemoryError,
    OutputError,
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
def non_finite_inputs_named(samples: Sequence[Row]) -> Iterator[None]:
    """Raise BadInputError, with the input's name, if the model fails on one sample that has NaN or infinity."""
    try:
        yield
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
    """The outputs of a batch, row by row.

    Args:
        signature: the model's.
        outputs: what the model returned; it should be arrays [rows, ...] by name.
        rows: number of samples in the batch.

    Raises:
        OutputError: the outputs do not fit the signature.
        ModelError: a value is not a number.
    """
    arrays = {spec.name: _checked(spec, outputs, rows) for spec in signature.outputs}
    if len(outputs) > len(arrays):
        unknown = next(name for name in outputs if name not in arrays)
        raise OutputError(f"the model returned an output {unknown!r}, which its signature does not have")
    return [{name: array[row, ...] for name, array in arrays.items()} for row in range(rows)]


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _checked(spec: TensorSpec, outputs: Any, rows: int) -> NDArray[Any]:
    """An output of a batch that fits the signature.

    Raises:
        OutputError: it is missing, or has another datatype, shape or number of rows.
        ModelError: a value is not a number.
    """
    if not isinstance(outputs, Mapping):
        raise OutputError(f"the model returned {type(outputs).__name__}; it has to return arrays by output name")
    if spec.name not in outputs:
        raise OutputError(f"the model returned no output {spec.name}")
    array, dtype = np.asarray(outputs[spec.name]), DTYPES[spec.datatype]
    if array.dtype.kind in "OSU" and dtype.hasobject:
        array = array.astype(object)
    if array.dtype != dtype:
        raise OutputError(f"the model returned output {spec.name} as {array.dtype}; its datatype is {spec.datatype}")
    if array.ndim == 0 or len(array) != rows or not spec.accepts(spec.datatype, array.shape):
        shape = [rows, *spec.sample_shape]
        raise OutputError(f"the model returned output {spec.name} of shape {[*array.shape]}; the batch takes {shape}")
    if dtype.hasobject and not all(isinstance(element, bytes | str) for element in array.flat):
        raise OutputError(f"the model returned output {spec.name} with elements that are neither bytes nor str")
    if dtype.kind == "f" and np.isnan(array).any():
        raise ModelError(f"the model returned NaN in output {spec.name}")
    return array
