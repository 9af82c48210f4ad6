"""Models of named tensors on a device, in their own process. torch is imported only for models that use it."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numpy.typing import NDArray

from batchwright.model import Model
from server.backends.executor import Batch
from server.backends.tensor_batches import checked_rows, client_errors, stack
from server.errors import OutputError
from server.models.tensors.codec import TensorCodec


class TensorDevice:
    """A Device for one model; all methods are called on the thread that runs it, in the model's process."""

    def __init__(self, model: Model, device: str) -> None:
        """Serve the model, once `load` was called, on a device by torch's name of it."""
        self._signature = TensorCodec(model).signature(0)
        self._device = device
        self._model = model

    def load(self) -> None:
        """Load the model.

        Raises:
            Exception: whatever the model raises.
        """
        self._limit_threads()
        with self._translated_errors():
            self._model.load(self._device)
        self._limit_threads()

    def _limit_threads(self) -> None:
        """Leave a processor to the event loop and to decoding, if the model uses torch on the CPU."""
        if self._device == "cpu" and (self._model.torch or "torch" in sys.modules):
            import torch

            from server.backends.real_device import cpu_threads

            torch.set_num_threads(cpu_threads())

    def _translated_errors(self) -> AbstractContextManager[None]:
        if not self._model.torch and "torch" not in sys.modules:
            return nullcontext()
        import torch

        from server.backends.torch_device import translated_errors

        return translated_errors(torch.device(self._device))

    def serve(self, batch: Batch, /) -> Sequence[Mapping[str, NDArray[Any]]]:
        """For each sample its outputs, arrays by name.

        Raises:
            BadInputError: the model raised BadInput, or failed on a single sample that has NaN or infinity.
            ModelError: the outputs do not fit the signature, or are not a number.
            Exception: whatever the model raises.
        """
        inputs = {name: stack(name, tensor, batch.inputs) for name, tensor in self._model.inputs.items()}
        with client_errors(batch.inputs), self._translated_errors():
            outputs: Any = self._run_torch(inputs) if self._model.torch else self._model.run(**inputs)
            return checked_rows(self._signature, outputs, len(batch.inputs))

    def _run_torch(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        """Run a model that takes tensors on the device; return arrays."""
        import torch

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
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
