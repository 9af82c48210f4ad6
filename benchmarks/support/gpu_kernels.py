"""Stage A of benchmarks/gpu.py: what one batch takes, by implementation of the network, and what surrounds it.

`Accelerator` is what the measurements need of CUDA; `Rehearsal` is the same on the CPU without graphs, so that all of
this runs, and is tested, without a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.gpu_parts import emit
from benchmarks.support.gpu_tensorrt import UnavailableProviderError, find_runtime, make_tensorrt
from server.backends.cuda.networks import ChoiceKey, Network, makers
from server.backends.torch_device import resolve_precision
from server.errors import one_line
from server.models.images.codec import synthetic_images
from server.models.images.torchvision_source import PixelNet, load_image_model

SIZES = 128, 64, 8, 1  # batch sizes, in the order of measurement
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_REPEATS, _AT_MOST = 30, 1.0  # of a launch, and s after which no other is started
_RING = 512  # samples in pinned memory
_RUNS = 1, 8, 64, 256  # consecutive samples of one upload
_LONGEST_START = 60.0  # s of the first batches of an implementation that stages B and C serve
TENSORRT = "tensorrt"

Step = Callable[[], Tensor]


class Accelerator(Protocol):
    """A device with streams and graphs.

    Attributes:
        place: the device.
        stream: handle of the stream on which `seconds` measures; 0 without one.
    """

    place: torch.device
    stream: int

    def capture(self, step: Step) -> Callable[[], object]:
        """Capture what `step` launches, which has run before, and return the function that replays it."""
        ...

    def seconds(self, launch: Callable[[], object]) -> float:
        """Time that the device takes for what `launch` launches, s."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        ...

    def pinned(self, *shape: int) -> Tensor:
        """A uint8 tensor in memory from which the device copies directly."""
        ...

    def kernels(self, launch: Callable[[], object]) -> int | None:
        """Number of kernels that `launch` launches; None where that is unknown."""
        ...


class Cuda:
    """An Accelerator: a CUDA device and one stream."""

    def __init__(self, index: int = 0) -> None:
        """Use cuda:`index`, with cuDNN's search for the fastest convolution."""
        self.place = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)
        torch.cuda.set_device(self.place)
        torch.backends.cudnn.benchmark = True

    def capture(self, step: Step) -> Callable[[], object]:
        """Capture on the stream; see Accelerator."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def seconds(self, launch: Callable[[], object]) -> float:
        """Time between two events; see Accelerator."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            first.record(self._stream)
            launch()
            last.record(self._stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.place)

    def pinned(self, *shape: int) -> Tensor:
        """Page-locked memory."""
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=True)

    def kernels(self, launch: Callable[[], object]) -> int | None:
        """Count by torch.profiler."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        try:
            with torch.profiler.profile(activities=activities) as seen:
                launch()
                self.synchronize()
        except RuntimeError:  # the driver may refuse it
            return None
        count = sum(int(event.count) for event in seen.key_averages() if event.device_type.name == "CUDA")
        return count or None  # without permission nothing is seen


class Rehearsal:
    """An Accelerator without an accelerator: the CPU, and graphs that call their step."""

    place = torch.device("cpu")
    stream = 0

    def capture(self, step: Step) -> Callable[[], object]:
        """Return the step."""
        return step

    def seconds(self, launch: Callable[[], object]) -> float:
        """Time of the call."""
        began = time.perf_counter()
        launch()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        """Return."""

    def pinned(self, *shape: int) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(shape, dtype=torch.uint8)

    def kernels(self, _: Callable[[], object]) -> int | None:
        """None."""
        return None


def variants(net: PixelNet, compile_too: bool) -> Iterator[tuple[str, Network]]:
    """The network's implementations by name, in the order of measurement; compiling takes longest."""
    for name, make in makers(net).items():
        if name != "compile" or compile_too:
            yield name, make()


def measure_kernels(model: str, device: Accelerator, sizes: tuple[int, ...], compile_too: bool, until: float) -> None:
    """Report, by variant and batch size, times eager and by a graph, kernels, the first call and the relative error.

    Kernels are counted last, since the profiler may slow down what runs after it.

    Args:
        model: a torchvision model.
        device: the accelerator.
        sizes: batch sizes.
        compile_too: whether torch.compile is measured.
        until: no size is started after it, s of time.monotonic.
    """
    loaded, net = load_image_model(model, "random", max(sizes))
    net.move_to(device.place, _DTYPES[resolve_precision("auto", device.place)])
    images = torch.from_numpy(synthetic_images(loaded.codec, max(sizes), np.random.default_rng(1)))
    exact: dict[int, Tensor] = {}
    cells: list[dict[str, Any]] = []
    made: dict[str, Network] = {}
    with torch.inference_mode():
        for name, run in _with_tensorrt(variants(net, compile_too), net, device):
            made[name] = run
            for size in sizes:
                if time.monotonic() > until:
                    emit("stopped", f"no time for {name} at {size} and what follows")
                    return
                pixels = [images[:size].roll(shift, 0).to(device.place) for shift in range(4)]
                cell: dict[str, Any] = {"variant": name, "batch_size": size}
                try:
                    cell |= _measure(device, run, pixels, exact, captures=name != TENSORRT)
                except Exception as error:  # noqa: BLE001  (a compiler may raise anything; the others are measured)
                    cell["failed"] = f"{type(error).__name__}: {one_line(error)}"
                cells.append(cell)
                emit("cells", cells)
        for cell in cells:
            if "failed" not in cell and time.monotonic() < until:
                pixels = [images[: cell["batch_size"]].to(device.place)]
                cell["kernels"] = device.kernels(partial(made[cell["variant"]], pixels[0]))
        emit("cells", cells)


def _with_tensorrt(
    known: Iterator[tuple[str, Network]], net: PixelNet, device: Accelerator
) -> Iterator[tuple[str, Network]]:
    """The implementations, and after them ONNX Runtime's TensorRT where it is installed."""
    yield from known
    try:
        yield TENSORRT, make_tensorrt(net, device.place, device.stream, find_runtime())
    except UnavailableProviderError as error:
        emit(TENSORRT, f"not compared: {error}")


def mean_times(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By implementation that `serve-model` has, the geometric mean of the times of its graphs, s.

    Those are left out that failed at a size, or whose first batches took so long that later stages had no time left.
    """
    found = {}
    for name in dict.fromkeys(cell["variant"] for cell in cells if cell["variant"] != TENSORRT):
        own = [cell for cell in cells if cell["variant"] == name]
        sizes = {cell["batch_size"] for cell in cells}
        complete = len(own) == len(sizes) and all("graph_ms" in cell for cell in own)
        if complete and sum(cell["first_call_ms"] for cell in own) <= 1e3 * _LONGEST_START:
            found[name] = statistics.geometric_mean(1e-3 * cell["graph_ms"] for cell in own)
    return found


def keep_choice(model: str, cells: Sequence[Mapping[str, Any]], device: torch.device, name: str) -> None:
    """Let later stages serve the fastest implementation, without the time to compare them, if none was chosen yet."""
    key, times = ChoiceKey(model, name, resolve_precision("auto", device)), mean_times(cells)
    if times and key.load() is None:
        key.store(min(times, key=lambda each: times[each]), times)


def _measure(
    device: Accelerator, run: Network, pixels: list[Tensor], exact: dict[int, Tensor], captures: bool
) -> dict[str, Any]:
    static, size, turn = pixels[0].clone(), len(pixels[0]), [0]

    def step() -> Tensor:
        return run(static).float()

    def rotating(launch: Callable[[], object]) -> Callable[[], object]:
        """Launch with other pixels than before."""

        def call() -> None:
            turn[0] += 1
            static.copy_(pixels[turn[0] % len(pixels)])
            launch()

        return call

    began = time.perf_counter()
    found = step()
    device.synchronize()
    cell: dict[str, Any] = {"first_call_ms": 1e3 * (time.perf_counter() - began)}
    reference = exact.setdefault(size, found.clone())
    cell["relative_l2"] = float(torch.linalg.norm(found - reference) / torch.linalg.norm(reference))
    cell["finite"] = bool(torch.isfinite(found).all())
    cell["eager_ms"] = _median(device, rotating(step))
    if not captures:
        return {**cell, "graph": "not captured: it launches by itself"}
    try:
        replay = device.capture(step)
    except RuntimeError as error:
        return {**cell, "graph": f"not captured: {str(error).splitlines()[0]}"}
    cell["graph_ms"] = _median(device, rotating(replay))
    cell["event_to_replay_us"] = _turn_around(device, replay) - 1e3 * _median(device, replay)
    return cell


def _median(device: Accelerator, launch: Callable[[], object]) -> float:
    """Median time of some launches after a warm-up, ms."""
    launch()
    until, times = time.perf_counter() + _AT_MOST, [device.seconds(launch)]
    while len(times) < _REPEATS and time.perf_counter() < until:
        times.append(device.seconds(launch))
    return 1e3 * statistics.median(times)


def _turn_around(device: Accelerator, replay: Callable[[], object]) -> float:
    """Time from one replay to the next where the host waits for each, us."""
    began = time.perf_counter()
    count = 0
    while count < _REPEATS and time.perf_counter() < began + _AT_MOST:
        replay()
        device.synchronize()
        count += 1
    return 1e6 * (time.perf_counter() - began) / count


def measure_uploads(device: Accelerator, samples: int = _RING) -> None:
    """Report the time of an upload from pinned memory by the number of consecutive samples, us, and GB/s."""
    shape = 224, 224, 3
    host = device.pinned(samples, *shape)
    ring = torch.empty(samples, *shape, dtype=torch.uint8, device=device.place)
    rows = []
    for length in (length for length in _RUNS if length <= samples):
        starts = range(0, samples - length + 1, length)

        def upload(length: int = length, starts: range = starts) -> None:
            for start in starts:
                ring[start : start + length].copy_(host[start : start + length], non_blocking=True)

        seconds = statistics.median(device.seconds(upload) for _ in range(5)) / len(starts)
        began = time.perf_counter()
        upload()
        host_us = 1e6 * (time.perf_counter() - began) / len(starts)
        device.synchronize()
        rate = length * host[0].nbytes / seconds / 1e9
        rows.append({"samples": length, "us": 1e6 * seconds, "host_us": host_us, "gb_per_s": rate})
    emit("uploads", rows)
