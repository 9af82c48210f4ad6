"""ONNX files, run by ONNX Runtime: NAME=FILE.onnx. Needs the extra `onnx`."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.model import BadInput, Model, Tensor
from policies.cpus import available_cpus
from policies.types import SpecError
from server.errors import one_line

_DATATYPES = {
    "tensor(bool)": "BOOL",
    **{f"tensor(uint{bits})": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"tensor(int{bits})": f"INT{bits}" for bits in (8, 16, 32, 64)},
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_SIZES = re.compile(r"shape|dimension|broadcast|axis|rank|out of (data )?bounds", re.IGNORECASE)
_OF_THE_DEVICE = re.compile(r"allocat|CUDA|CUDNN|CUBLAS|TensorRT", re.IGNORECASE)
_PLACE = re.compile(r".*(?:Status Message: |/\S+\.(?:cc|h):\d+ )")  # names of nodes and of the source
_REASON = 160  # characters of a message for a client, from its end, which has the sizes
_PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")  # the fastest first


class OnnxModel(Model):
    """A model in a file, in a session of ONNX Runtime with the fastest provider of the device."""

    def __init__(self, file: str) -> None:
        """Read the signature of a file.

        Raises:
            SpecError: ONNX Runtime is missing, the file cannot be read, or its model takes no batches of tensors.
        """
        self._file = file
        if not Path(file).is_file():
            raise SpecError(f"no file {file!r}; give NAME=FILE.onnx")
        session = self._session(("CPUExecutionProvider",), 1)
        self.inputs = {each.name: _tensor(each, f"{file}: input") for each in session.get_inputs()}  # type: ignore[misc]
        self.outputs = {each.name: _tensor(each, f"{file}: output", True) for each in session.get_outputs()}  # type: ignore[misc]
        del session

    def load(self, device: str) -> None:
        """Open the session on the device."""
        kind, _, index = device.partition(":")
        if kind == "cpu":
            self._run = self._session(_PROVIDERS[2:], max(1, available_cpus() - 1))
            return
        options = {"device_id": index or "0"}
        self._run = self._session([(name, options) for name in _PROVIDERS[:2]] + [_PROVIDERS[2]], 1)

    def run(self, **inputs: Any) -> Mapping[str, Any]:
        """Run the session on a batch.

        Raises:
            BadInput: a string is not UTF-8, or the sizes or values of the inputs do not fit the model or each other.
        """
        for name, tensor in self.inputs.items():
            if tensor.datatype == "BYTES":
                inputs[name] = _to_text(name, inputs[name])
        try:
            found = self._run.run(list(self.outputs), inputs)
        except Exception as error:
            if _is_about_inputs(error):
                raise BadInput(f"the model does not take this sample: {_reason(error)}") from error
            raise
        return dict(zip(self.outputs, found, strict=True))

    def _session(self, providers: Any, threads: int) -> Any:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import; its builds report models to Microsoft
        try:
            import onnxruntime
        except ImportError as error:
            raise SpecError(
                f"{self._file} needs ONNX Runtime; install the extra onnx: pip install onnxruntime, or onnxruntime-gpu "
                "for CUDA"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # its lines are not JSON, and its exceptions say the same
        known = onnxruntime.get_available_providers()
        found = [each for each in providers if (each if isinstance(each, str) else each[0]) in known]
        try:
            return onnxruntime.InferenceSession(self._file, options, found)
        except Exception as error:
            raise SpecError(f"{self._file} cannot be loaded by ONNX Runtime: {one_line(error)}") from error


def _to_text(name: str, array: Any) -> Any:
    texts = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise BadInput(f"input {name} has a string that is not UTF-8; send UTF-8") from error
    return texts


def _is_about_inputs(error: Exception) -> bool:
    """Whether an exception of ONNX Runtime is about sizes or values of inputs, and not about the device."""
    kind, reason = type(error).__name__, _reason(error)
    if kind == "InvalidArgument":
        return True
    of_sizes = _SIZES.search(reason) is not None and _OF_THE_DEVICE.search(str(error)) is None
    return kind in ("Fail", "RuntimeException") and of_sizes


def _reason(error: Exception) -> str:
    """The end of a message of ONNX Runtime, which names the sizes, without names of nodes and of its source."""
    reason = _PLACE.sub("", " ".join(str(error).split()))
    return reason if len(reason) <= _REASON else f"... {reason[-_REASON:].partition(' ')[2]}"


def _tensor(described: Any, where: str, is_output: bool = False) -> Tensor:
    """Datatype and shape of one sample.

    The first dimension of an output may be annotated as 1, as converters do: what the model returns is checked.

    Raises:
        SpecError: there is no dynamic batch dimension, or the protocol lacks the datatype.
    """
    if described.type not in _DATATYPES:
        remedy = "; convert it with zipmap=False, which makes it a tensor" if "map" in described.type else ""
        known = ", ".join(_DATATYPES)
        raise SpecError(f"{where} {described.name} has the type {described.type}; there is {known}{remedy}")
    if not described.shape or (isinstance(described.shape[0], int) and not (is_output and described.shape[0] == 1)):
        raise SpecError(
            f"{where} {described.name} has the static shape {described.shape}, so it takes no batches; export it "
            "with a dynamic first dimension, such as dynamic_shapes={'x': {0: 'batch'}}"
        )
    shape = [size if isinstance(size, int) and size > 0 else -1 for size in described.shape[1:]]
    return Tensor(_DATATYPES[described.type], shape)
