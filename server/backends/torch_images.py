"""A device that runs PixelNets with torch: the CPU, or one CUDA GPU with one stream and one batch in flight."""

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
from server.backends.activations import Activations, Row
from server.backends.executor import Batch, Executor, Logits
from server.backends.heap import heap
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError
from server.models.images import ImageCodec
from server.models.model import ServedModel
from server.models.torchvision_source import PixelNet

_log = logging.getLogger("batchwright")
Precision = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_Work = Callable[[Tensor], Tensor]
_Run = Callable[[_Work, Callable[[], Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class _Place:
    """One model on the device: its network, and where a batch's pixels are gathered."""

    net: PixelNet
    pixels: Tensor  # uint8 [max_batch_size, H, W, 3] in host memory, pinned for CUDA
    rows: NDArray[np.uint8]  # the same memory
    activations: Activations  # of those between two stages

    def gathered(self, batch: Batch) -> Tensor:
        """What the batch's first stage takes: pixels in host memory, or activations on the device."""
        if batch.first_stage:
            return self.activations.joined(batch.first_stage, batch.inputs)
        count = len(batch.inputs)
        np.stack(batch.inputs, out=self.rows[:count])  # refuses a sample of another shape, which [...] would spread
        return self.pixels[:count]

    def work(self, batch: Batch) -> _Work:
        """From what `gathered` gives to what the batch's last stage gives; to float32 logits after the very last."""

        def work(x: Tensor) -> Tensor:
            y = self.net.part(x if batch.first_stage else self.net.normalised(x), batch.first_stage, batch.stages)
            return y.float() if self.is_last(batch) else y

        return work

    def is_last(self, batch: Batch) -> bool:
        """Whether the batch runs to the end."""
        return batch.last_stage is None or batch.last_stage >= self.net.stages


class TorchDevice:
    """A Device for one or several models; make it with `torch_device`, then leave it to one thread."""

    def __init__(self, places: Mapping[str, _Place], run: _Run, device: torch.device) -> None:
        """`places` by model name; `run` gathers and works on the device, and returns when that is done."""
        self._places = places
        self._run = run
        self._device = device

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Logits, float32 [classes], for each input, uint8 [H, W, 3]; each row owns its memory.

        A batch that ends before the last stage gives rows, which are the inputs of their next stage.
        """
        place = self._places[batch.model]
        with torch.inference_mode(), named_faults(self._device):
            outputs = self._run(place.work(batch), partial(place.gathered, batch))
        if not place.is_last(batch):
            return [Row(outputs, index) for index in range(len(batch.inputs))]
        logits: Logits = outputs.cpu().numpy()
        if not np.isfinite(logits).all():
            raise NotFiniteError("the model's output is not finite")
        return [row.copy() for row in logits]


@contextmanager
def named_faults(device: torch.device) -> Iterator[None]:
    """Tell apart, by type, what a smaller batch may mend and what only a new process may.

    After an error of the accelerator every later call fails too if its context is gone; then so does the next one.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemoryError(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # the CPU's allocator has no type of its own for it
            raise OutOfMemoryError(str(error)) from error
        if isinstance(error, torch.AcceleratorError) and not _context_lives(device):
            raise DeviceLostError(str(error)) from error
        raise


def _context_lives(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001  (whatever it is: a context that lives answers)
        return False
    return True


async def warm_up(executor: Executor, model: ServedModel, batch_sizes: Iterable[int]) -> None:
    """Serve made-up batches, largest first, on the executor's own thread: cuDNN keeps its tuned plans by thread."""
    (sample,) = model.codec.synthetic_samples(1, np.random.default_rng(0))
    for size in sorted(batch_sizes, reverse=True):
        await executor.run(Batch(model.name, [sample] * size))


def tunes(place: torch.device, model: ServedModel) -> bool:
    """Whether the first batch of any size is slow there: cuDNN then looks for the fastest convolutions."""
    return place.type == "cuda" and model.codec.fixed_shape


def warmed_up(executor: Executor, model: ServedModel, profile: Profile, every_size: bool) -> Profile:
    """Warm a model up for the sizes of its profile: each of them, or the first two and the last.

    Returns:
        The profile up to the largest size that fits the memory, halved from what does not.

    Raises:
        SpecError: not even one sample fits.
    """
    largest = profile.max_batch_size
    try:
        asyncio.run(warm_up(executor, model, range(1, largest + 1) if every_size else (1, min(2, largest), largest)))
    except OutOfMemoryError as error:
        if largest == 1:
            raise SpecError(f"{model.name} does not fit the memory that is free on {executor.name}: {error}") from error
        _log.warning("%s: a batch of %d does not fit the memory; half of that is tried", model.name, largest)
        return warmed_up(executor, model, profile.truncated(largest // 2), every_size)
    return profile


def torch_device(
    models: Iterable[tuple[ServedModel[ImageCodec], PixelNet]], device: torch.device, precision: Precision = "auto"
) -> TorchDevice:
    """Put the models on the device and set the process up for it; `precision` auto is fp32 on the CPU, else bf16."""
    dtype = _DTYPES[_resolved(precision, device)]
    places = {model.name: _place(model, net, device, dtype) for model, net in models}
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads())
        heap.keep_freed()
        return TorchDevice(places, _run_on_cpu, device)
    torch.backends.cudnn.benchmark = True
    torch.cuda.synchronize(device)  # the weights came on another stream than the batches will
    return TorchDevice(places, _CudaRun(device), device)


def settings(device: torch.device, precision: Precision = "auto", stages: int | None = None) -> str:
    """What of a device's set-up changes service times, for a profile's note and its place in the cache."""
    threads = f", {cpu_threads()} threads" if device.type == "cpu" else ""
    cut = "" if stages is None else f", {stages} stages"
    return f"{_resolved(precision, device)}{threads}{cut}"


def resolve_device(spec: str) -> tuple[torch.device, str]:
    """The device that "auto", "cpu", "cuda" or "cuda:N" means, and its name for people.

    Raises:
        SpecError: another spec, or a CUDA device that is not there.
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
    """Return the number of threads for the network: one processor stays free for the event loop and the decoders."""
    return max(1, available_cpus() - 1)


class _CudaRun:
    """Runs on one stream and waits asleep: a spinning wait would take a core from the gateway."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def __call__(self, work: _Work, gather: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.stream(self._stream):  # merging too: another stream would not wait for it
            outputs = work(gather().to(self._device, non_blocking=True))
            self._done.record(self._stream)
            self._done.synchronize()
            return outputs


def _run_on_cpu(work: _Work, gather: Callable[[], Tensor]) -> Tensor:
    return work(gather())


def _resolved(precision: Precision, device: torch.device) -> Precision:
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


def _place(model: ServedModel[ImageCodec], net: PixelNet, device: torch.device, dtype: torch.dtype) -> _Place:
    net.place(device, dtype)
    shape = (model.max_batch_size, *model.codec.shape)
    pixels = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _Place(net, pixels, pixels.numpy(), Activations(model.max_batch_size))


def _cpu_name() -> str:
    """The model name of /proc/cpuinfo, "cpu" where there is none."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else "cpu"
