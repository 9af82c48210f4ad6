"""Models of named tensors on a device: users' classes, exported programs and ONNX files."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from batchwright.model import Model
from server.backends.executor import Batch
from server.backends.tensor_batches import checked_rows, client_errors, stack
from server.backends.torch_device import cpu_threads, translated_errors
from server.errors import OutputError
from server.models.model import ServedModel
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
            BadInputError: the model raised BadInput, or failed on a single sample that has NaN or infinity.
            ModelError: the outputs do not fit the signature, or are not a number.
            Exception: whatever the model raises.
        """
        inputs = {name: stack(name, tensor, batch.inputs) for name, tensor in self._model.inputs.items()}
        with client_errors(batch.inputs), translated_errors(self._device):
            outputs: Any = self._run_torch(inputs) if self._model.torch else self._model.run(**inputs)
            return checked_rows(self._signature, outputs, len(batch.inputs))

    def _run_torch(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        """Run a model that takes tensors on the device; return arrays."""
        tensors = {}
        for spec in self._signature.inputs:
            tensor = torch.from_numpy(inputs[spec.name]).to(self._device)
            tensors[spec.name] = tensor.bfloat16() if spec.datatype == "BF16" else tensor
        with torch.inference_mode():
            outputs: Any = self._model.run(**tensors)
            if not isinstance(outputs, Mapping):
                raise OutputError(
                    f"the model returned {type(outputs).__name__}; it has to return tensors by output name"
                )
            return {name: _to_array(value) for name, value in outputs.items()}


def _to_array(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_array(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
