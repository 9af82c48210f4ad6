"""The torch device of image models: the CPU, or a CUDA GPU with one stream and one batch in flight."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.cpus import available_cpus
from policies.profile import Profile
from policies.types import SpecError
from server.backends.activations import ActivationBuffers, ActivationRow
from server.backends.executor import Batch, Executor, Logits
from server.backends.glibc_heap import heap
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError
from server.models.images import ImageCodec
from server.models.model import ServedModel
from server.models.torchvision_source import PixelNet

_log = logging.getLogger("batchwright")
Precision = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    """A Device for one or several image models, made by `make_image_device`; not thread-safe."""

    def __init__(self, models: Mapping[str, _PlacedModel], run: _Run, device: torch.device) -> None:
        """`models` are by name; `run` gathers and computes on the device, and returns when that is done."""
        self._models = models
        self._run = run
        self._device = device

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Logits, float32 [classes], for each input, uint8 [H, W, 3]; each output owns its memory.

        A batch that ends before the last stage gives `ActivationRow`s, the inputs of the next stage.
        """
        model = self._models[batch.model]
        with torch.inference_mode(), translated_errors(self._device):
            outputs = self._run(partial(model.compute, batch), partial(model.gather, batch))
        if not model.is_last(batch):
            return [ActivationRow(outputs, index) for index in range(len(batch.inputs))]
        logits: Logits = outputs.cpu().numpy()
        if not np.isfinite(logits).all():
            raise NotFiniteError("the model's output is not finite")
        return [row.copy() for row in logits]


@contextmanager
def translated_errors(device: torch.device) -> Iterator[None]:
    """Translate torch's errors into OutOfMemoryError, which a smaller batch may avoid, and DeviceLostError.

    After an error of the accelerator the device is lost if its context is gone, in which case the next call fails too.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemoryError(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # the CPU's allocator has no exception type for it
            raise OutOfMemoryError(str(error)) from error
        if isinstance(error, torch.AcceleratorError) and not _context_works(device):
            raise DeviceLostError(str(error)) from error
        raise


def _context_works(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001  (any error means that the context is gone)
        return False
    return True


async def warm_up(executor: Executor, model: ServedModel, batch_sizes: Iterable[int]) -> None:
    """Serve synthetic batches, largest first, in the executor's thread: cuDNN keeps its plans by thread."""
    (sample,) = model.codec.synthetic_samples(1, np.random.default_rng(0))
    for size in sorted(batch_sizes, reverse=True):
        await executor.run(Batch(model.name, [sample] * size))


def autotunes(place: torch.device, model: ServedModel) -> bool:
    """Whether the first batch of each size is slow because cuDNN then searches for the fastest convolutions.

    That takes samples of one shape, with which batches of one size are always the same computation.
    """
    return place.type == "cuda" and -1 not in model.codec.input.sample_shape


def warm_up_and_fit(executor: Executor, model: ServedModel, profile: Profile, every_size: bool) -> Profile:
    """Warm a model up for all batch sizes of its profile, or for the first two and the last.

    Returns:
        The profile, truncated to a largest batch that fits the memory by halving it.

    Raises:
        SpecError: a batch of one sample does not fit.
    """
    largest = profile.max_batch_size
    try:
        asyncio.run(warm_up(executor, model, range(1, largest + 1) if every_size else (1, min(2, largest), largest)))
    except OutOfMemoryError as error:
        if largest == 1:
            raise SpecError(f"{model.name} does not fit the memory that is free on {executor.name}: {error}") from error
        _log.warning("%s: a batch of %d does not fit the memory; trying half of it", model.name, largest)
        return warm_up_and_fit(executor, model, profile.truncated(largest // 2), every_size)
    return profile


def make_image_device(
    models: Iterable[tuple[ServedModel[ImageCodec], PixelNet]], device: torch.device, precision: Precision = "auto"
) -> ImageDevice:
    """Put models on the device and set the process up for it; the precision "auto" is fp32 on the CPU, else bf16."""
    dtype = _DTYPES[_resolve_precision(precision, device)]
    placed = {model.name: _place(model, net, device, dtype) for model, net in models}
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
        heap.keep_freed()
        return ImageDevice(placed, _run_on_cpu, device)
    torch.backends.cudnn.benchmark = True
    torch.cuda.synchronize(device)  # weights are copied on another stream than batches
    return ImageDevice(placed, _CudaRun(device), device)


def settings(device: torch.device, precision: Precision = "auto", stages: int | None = None) -> str:
    """Settings of the device that change service times, for a profile's note and its key in the cache."""
    threads = f", {cpu_threads()} threads" if device.type == "cpu" else ""
    split = "" if stages is None else f", {stages} stages"
    return f"{_resolve_precision(precision, device)}{threads}{split}"


def resolve_device(spec: str) -> tuple[torch.device, str]:
    """The device of a spec, "auto", "cpu", "cuda" or "cuda:N", and its display name.

    Raises:
        SpecError: the spec is invalid, or there is no such CUDA device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec == "cpu" or (spec == "auto" and count == 0):
        return torch.device("cpu"), _cpu_name()
    cuda = re.fullmatch(r"auto|cuda(?::(\d{1,4}))?", spec)
    if cuda is None:
        raise SpecError(f"no device {spec!r}; give auto, cpu, cuda:N or emulated:PROFILE")
    index = int(cuda[1] or 0)
    if index >= count:
        raise SpecError(
            f"no CUDA device {index} among the {count} that torch {torch.__version__} sees; give cpu or auto"
        )
    return torch.device("cuda", index), torch.cuda.get_device_name(index)


def cpu_threads() -> int:
    """The number of threads for the network; one processor stays free for the event loop and the decoders."""
    return max(1, available_cpus() - 1)


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


def _resolve_precision(precision: Precision, device: torch.device) -> Precision:
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


def _place(model: ServedModel[ImageCodec], net: PixelNet, device: torch.device, dtype: torch.dtype) -> _PlacedModel:
    net.move_to(device, dtype)
    shape = (model.max_batch_size, *model.codec.shape)
    pixels = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _PlacedModel(net, pixels, pixels.numpy(), ActivationBuffers(model.max_batch_size))


def _cpu_name() -> str:
    """The model name in /proc/cpuinfo, or "cpu"."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else "cpu"
