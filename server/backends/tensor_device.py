"""Models of named tensors on a device: users' classes, exported programs and ONNX files."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.model import Model, Tensor
from server.backends.executor import Batch
from server.backends.torch_device import cpu_threads, translated_errors
from server.errors import BadInputError, DeviceLostError, ModelError, OutOfMemoryError
from server.models.model import ServedModel
from server.models.signature import DTYPES, TensorSpec
from server.models.tensors.codec import TensorCodec

_log = logging.getLogger("batchwright.model")


class TensorDevice:
    """A Device for one model; all methods are called on the executor's thread."""

    def __init__(self, served: ServedModel[TensorCodec], make_model: Callable[[], Model], device: torch.device) -> None:
        """Serve the model of the codec, once `load` was called; `make_model` makes another one if it hangs."""
        self._signature = served.signature
        self._name = served.name
        self._make_model = make_model
        self._device = device
        self._model: Model = served.codec.model

    def load(self) -> None:
        """Load the model.

        Raises:
            Exception: whatever the model raises.
        """
        if self._device.type == "cpu":
            torch.set_num_threads(cpu_threads())
        with translated_errors(self._device):
            self._model.load(str(self._device))

    def restart(self) -> None:
        """Replace the model by a new one, which is loaded."""
        _log.warning("%s is loaded again on a new thread: a batch exceeded the batch timeout", self._name)
        self._model = self._make_model()
        self.load()

    def serve(self, batch: Batch, /) -> Sequence[Mapping[str, NDArray[Any]]]:
        """For each sample its outputs, arrays by name.

        Raises:
            BadInputError: the model failed on a single sample whose inputs have NaN or infinity.
            ModelError: the outputs do not fit the signature, or are not a number.
            Exception: whatever the model raises.
        """
        inputs = {
            name: _stack([sample[name] for sample in batch.inputs], tensor)
            for name, tensor in self._model.inputs.items()
        }
        try:
            return self._serve(inputs, len(batch.inputs))
        except (OutOfMemoryError, DeviceLostError):
            raise
        except Exception as error:
            odd = next((name for name, array in inputs.items() if not _is_finite(array)), None)
            if odd is None or len(batch.inputs) > 1:
                raise
            raise BadInputError(
                f"the model fails on input {odd}, which has NaN or infinity: {type(error).__name__}"
            ) from error

    def _serve(self, inputs: Mapping[str, NDArray[Any]], rows: int) -> Sequence[Mapping[str, NDArray[Any]]]:
        with translated_errors(self._device):
            outputs = self._run_torch(inputs) if self._model.torch else self._model.run(**inputs)
            arrays = {spec.name: _checked(spec, outputs, rows) for spec in self._signature.outputs}
        if len(outputs) > len(arrays):
            unknown = next(name for name in outputs if name not in arrays)
            raise ModelError(f"the model returned an output {unknown!r}, which its signature does not have")
        return [{name: array[row, ...] for name, array in arrays.items()} for row in range(rows)]

    def _run_torch(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        """Run a model that takes tensors on the device; return arrays."""
        tensors = {}
        for spec in self._signature.inputs:
            tensor = torch.from_numpy(inputs[spec.name]).to(self._device)
            tensors[spec.name] = tensor.bfloat16() if spec.datatype == "BF16" else tensor
        with torch.inference_mode():
            outputs: Any = self._model.run(**tensors)
            if not isinstance(outputs, Mapping):
                raise ModelError(
                    f"the model returned {type(outputs).__name__}; it has to return tensors by output name"
                )
            return {name: _to_array(value) for name, value in outputs.items()}


def _stack(samples: Sequence[NDArray[Any]], tensor: Tensor) -> NDArray[Any]:
    """The samples of one input as a new array [n, ...], padded at the end to the longest if the input is padded."""
    if tensor.pad is None:
        return np.stack(samples)
    batch = np.full((len(samples), *np.max([sample.shape for sample in samples], axis=0)), tensor.pad, samples[0].dtype)
    for row, sample in zip(batch, samples, strict=True):
        row[tuple(map(slice, sample.shape))] = sample
    return batch


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _to_array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _checked(spec: TensorSpec, outputs: Any, rows: int) -> NDArray[Any]:
    """An output of a batch, as the signature promises it.

    Raises:
        ModelError: it is missing, or has another datatype, shape or number of rows, or a value is not a number.
    """
    if not isinstance(outputs, Mapping):
        raise ModelError(f"the model returned {type(outputs).__name__}; it has to return arrays by output name")
    if spec.name not in outputs:
        raise ModelError(f"the model returned no output {spec.name}")
    array, dtype = np.array(outputs[spec.name]), DTYPES[spec.datatype]  # a copy: a model may use its buffer again
    if array.dtype.kind in "OSU" and dtype.hasobject:
        array = array.astype(object)
    if array.dtype != dtype:
        raise ModelError(f"the model returned output {spec.name} as {array.dtype}; its datatype is {spec.datatype}")
    if array.ndim == 0 or len(array) != rows or not spec.accepts(spec.datatype, array.shape):
        shape = [rows, *spec.sample_shape]
        raise ModelError(f"the model returned output {spec.name} of shape {[*array.shape]}; the batch takes {shape}")
    if dtype.hasobject and not all(isinstance(element, bytes | str) for element in array.flat):
        raise ModelError(f"the model returned output {spec.name} with elements that are neither bytes nor str")
    if dtype.kind == "f" and np.isnan(array).any():
        raise ModelError(f"the model returned NaN in output {spec.name}")
    return array
