"""Image models on a torch device: the CPU, or a CUDA GPU with one stream and one batch in flight."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.activations import ActivationBuffers, ActivationRow
from server.backends.cuda.graph import GraphDevice
from server.backends.cuda.networks import ChoiceKey, optimised
from server.backends.cuda.runtime import CudaRuntime
from server.backends.executor import Batch, Logits
from server.backends.real_device import Optimise, Precision, cpu_threads, resolve_precision
from server.backends.torch_device import translated_errors
from server.errors import NotFiniteError
from server.models.images.codec import ImageCodec
from server.models.images.torchvision_source import PixelNet
from server.models.model import ServedModel

_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECKED_SAMPLES = 4
_log = logging.getLogger("batchwright")
_Compute = Callable[[Tensor], Tensor]
_Run = Callable[[_Compute, Callable[[], Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class _PlacedModel:
    """One model on the device, with the memory in which its batches are gathered."""

    net: PixelNet
    pixels: Tensor  # uint8 [max_batch_size, H, W, 3] in host memory, pinned for CUDA
    rows: NDArray[np.uint8]  # the same memory
    activations: ActivationBuffers  # between two stages

    def gather(self, batch: Batch) -> Tensor:
        """The input of the batch's first stage: pixels in host memory, or activations on the device."""
        if batch.first_stage:
            return self.activations.merge(batch.first_stage, batch.inputs)
        count = len(batch.inputs)
        np.stack(batch.inputs, out=self.rows[:count])  # unlike assignment, it raises on a sample of another shape
        return self.pixels[:count]

    def compute(self, batch: Batch, x: Tensor) -> Tensor:
        """Run the batch's stages on what `gather` returned; the last stage gives float32 logits."""
        y = self.net.run_stages(x if batch.first_stage else self.net.normalise(x), batch.first_stage, batch.stages)
        return y.float() if self.is_last(batch) else y

    def is_last(self, batch: Batch) -> bool:
        """Whether the batch runs to the end."""
        return batch.last_stage is None or batch.last_stage >= self.net.stages


class ImageDevice:
    """A Device for an image model, made by `make_image_device`; not thread-safe."""

    def __init__(self, model: _PlacedModel, run: _Run, device: torch.device) -> None:
        """`run` gathers and computes on the device, and returns when that is done."""
        self._model = model
        self._run = run
        self._device = device

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Logits, float32 [classes], for each input, uint8 [H, W, 3]; each output owns its memory.

        A batch that ends before the last stage gives `ActivationRow`s, the inputs of the next stage.
        """
        model = self._model
        with torch.inference_mode(), translated_errors(self._device):
            outputs = self._run(partial(model.compute, batch), partial(model.gather, batch))
        if not model.is_last(batch):
            return [ActivationRow(outputs, index) for index in range(len(batch.inputs))]
        logits: Logits = outputs.cpu().numpy()
        if not np.isfinite(logits).all():
            raise NotFiniteError("the model's output is not finite")
        return [row.copy() for row in logits]


def device_of(
    net: PixelNet, model: ServedModel[ImageCodec], place: str, optimise: Optimise = "auto"
) -> ImageDevice | GraphDevice:
    """Put a network on a device, by torch's name of it, and set the process's threads for it."""
    device = torch.device(place)
    if device.type == "cuda" and net.stages == 1 and optimise != "none":
        return make_graph_device(model, net, device, optimise)
    return make_image_device(model, net, device)


def make_image_device(
    model: ServedModel[ImageCodec], net: PixelNet, device: torch.device, precision: Precision = "auto"
) -> ImageDevice:
    """Put a network on the device, and set the process's threads for it."""
    placed = _placed(model, net, device, precision)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
        return ImageDevice(placed, _run_on_cpu, device)
    torch.backends.cudnn.benchmark = True
    torch.cuda.synchronize(device)  # weights are copied on another stream than batches
    return ImageDevice(placed, _CudaRun(device), device)


def make_graph_device(
    model: ServedModel[ImageCodec],
    net: PixelNet,
    device: torch.device,
    optimise: Optimise = "auto",
    precision: Precision = "auto",
) -> GraphDevice:
    """Put a model without stages on a CUDA device, by default with its fastest implementation; see `optimised`."""
    precision = place(model, net, device, precision)
    torch.backends.cudnn.benchmark = optimise != "eager"
    torch.cuda.synchronize(device)  # weights are copied on another stream than batches
    if optimise == "eager":
        return GraphDevice(model, net, CudaRuntime(device))
    key = ChoiceKey(model.name, torch.cuda.get_device_name(device), precision)
    samples = model.codec.synthetic_samples(model.max_batch_size, np.random.default_rng(0))
    return GraphDevice(model, optimised(net, CudaRuntime(device), samples, key), CudaRuntime(device))


class _CudaRun:
    """Runs batches on one stream, with a blocking wait: a spinning wait would occupy a processor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def __call__(self, compute: _Compute, gather: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.stream(self._stream):  # merging activations too: another stream would not wait for it
            outputs = compute(gather().to(self._device, non_blocking=True))
            self._done.record(self._stream)
            self._done.synchronize()
            return outputs


def _run_on_cpu(compute: _Compute, gather: Callable[[], Tensor]) -> Tensor:
    return compute(gather())


def place(
    model: ServedModel[ImageCodec], net: PixelNet, device: torch.device, precision: Precision = "auto"
) -> Precision:
    """Move a network, float32 on the CPU, to a device, and return its precision there.

    Where the automatic one is fp16 and the outputs exceed its range, it is bf16, which has the range of float32.
    """
    chosen = resolve_precision(precision, device.type == "cuda")
    weights = net.state_dict()  # moving replaces the tensors of the network, not these
    net.move_to(device, _DTYPES[chosen])
    if precision != "auto" or chosen != "fp16" or _is_finite(model, net, device):
        return chosen
    _log.warning("%s: the outputs in fp16 are not finite; it runs in bf16", model.name)
    net.move_to(device, torch.float32)
    net.load_state_dict(weights)
    net.move_to(device, torch.bfloat16)
    return "bf16"


def _is_finite(model: ServedModel[ImageCodec], net: PixelNet, device: torch.device) -> bool:
    """Whether the outputs for a few synthetic samples are finite."""
    count = min(_CHECKED_SAMPLES, model.max_batch_size)
    samples = np.stack(model.codec.synthetic_samples(count, np.random.default_rng(0)))
    with torch.inference_mode():
        logits = net.run_stages(net.normalise(torch.from_numpy(samples).to(device)), 0, None)
        return bool(torch.isfinite(logits).all())


def _placed(model: ServedModel[ImageCodec], net: PixelNet, device: torch.device, precision: Precision) -> _PlacedModel:
    place(model, net, device, precision)
    shape = (model.max_batch_size, *model.codec.shape)
    pixels = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _PlacedModel(net, pixels, pixels.numpy(), ActivationBuffers(model.max_batch_size))
