"""ONNX Runtime's TensorRT provider as one more implementation of a network, to compare ours with."""

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from server.models.images.torchvision_source import PixelNet

PROVIDER = "TensorrtExecutionProvider"
_ELEMENT_TYPES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16}  # of ONNX's TensorProto


class UnavailableProviderError(Exception):
    """The provider cannot be used; the message says why."""


def find_runtime() -> Any:
    """The module onnxruntime, if it has the provider.

    Raises:
        UnavailableProviderError: it is not installed, or a build without the provider.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise UnavailableProviderError("ONNX Runtime is not installed") from error
    available = runtime.get_available_providers()
    if PROVIDER not in available:
        raise UnavailableProviderError(f"this ONNX Runtime {runtime.__version__} has only {', '.join(available)}")
    return runtime


def make_tensorrt(
    net: PixelNet, place: torch.device, stream: int, runtime: Any, provider: str = PROVIDER
) -> Callable[[Tensor], Tensor]:
    """The network as sessions of ONNX Runtime, one for each batch size, made at its first batch.

    Args:
        net: the network, on its device.
        place: the device.
        stream: the CUDA stream on which the sessions run; 0 without CUDA.
        runtime: the module onnxruntime.
        provider: the provider, which falls back to the one of CUDA for what it does not support.
    """
    sessions: dict[int, Any] = {}
    options = runtime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")  # the stream keeps the order

    def network(pixels: Tensor) -> Tensor:
        size = len(pixels)
        if size not in sessions:
            sessions[size] = _session(net, pixels, runtime, _providers(provider, place, stream))
            if provider not in sessions[size].get_providers():
                raise UnavailableProviderError(
                    f"{provider} does not work here: ONNX Runtime took another one, as its log says"
                )
        logits = torch.empty((size, *_classes(sessions[size])), dtype=net.dtype, device=place)
        binding, index = sessions[size].io_binding(), place.index or 0
        binding.bind_input("pixels", place.type, index, 2, [*pixels.shape], pixels.data_ptr())
        binding.bind_output("logits", place.type, index, _ELEMENT_TYPES[net.dtype], [*logits.shape], logits.data_ptr())
        with _in_order(place, stream):
            sessions[size].run_with_iobinding(binding, options)
        return logits

    return network


@contextmanager
def _in_order(place: torch.device, stream: int) -> Iterator[None]:
    """Where another stream is the current one, let the sessions' stream wait for it, and it for them."""
    aside = place.type == "cuda" and torch.cuda.current_stream(place).cuda_stream != stream
    if aside:
        torch.cuda.synchronize(place)
    yield
    if aside:
        torch.cuda.synchronize(place)


def _providers(provider: str, place: torch.device, stream: int) -> list[Any]:
    if place.type != "cuda":
        return [provider]
    shared: Mapping[str, Any] = {"device_id": place.index or 0, "user_compute_stream": str(stream)}
    return [(provider, {**shared, "trt_fp16_enable": True}), ("CUDAExecutionProvider", {**shared})]


def _session(net: PixelNet, pixels: Tensor, runtime: Any, providers: list[Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter without further packages is deprecated
        file = Path(folder) / "network.onnx"
        torch.onnx.export(
            net, (pixels,), file, input_names=["pixels"], output_names=["logits"], dynamo=False, opset_version=17
        )
        return runtime.InferenceSession(str(file), providers=providers)


def _classes(session: Any) -> list[int]:
    (output,) = session.get_outputs()
    return [int(length) for length in output.shape[1:]]
