"""Implementations of one network for captured graphs, of which the fastest is chosen by measuring when it is loaded.

All have channels last in memory, and batch normalisation folded into the convolutions. They are:

    eager           one kernel for each operation
    fused           ReLU, and the addition before it, in the convolutions' kernels
    fused-but-stem  the same without convolutions of an image's channels, which cuDNN may compute slowly if fused
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from policies.files import cache_folder, read_text, write_atomically
from server.backends.buckets import bucket_sizes
from server.backends.cuda.fused_epilogues import fuse_epilogues
from server.backends.cuda.runtime import Replay, Runtime
from server.errors import one_line
from server.models.images.torchvision_source import PixelNet, trace

_log = logging.getLogger("batchwright.device")
FIRST_BATCHES = 20.0  # s that the first batches of all buckets may take
_SMALLER = (16, 1)  # batch sizes that are measured after the largest
_REPLAYS, _ROUNDS = 10, 5
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.5}  # of logits, random weights amplify errors
_T = TypeVar("_T")
Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """The network that was chosen.

    Attributes:
        name: of the implementation.
        network: computes logits from pixels on the device.
        times: time of each implementation that was measured, s.
    """

    name: str
    network: Network
    times: Mapping[str, float]


def implementations(net: PixelNet) -> dict[str, Network]:
    """The implementations of a network that is on its device, by name; all use its weights."""
    found: dict[str, Network] = {"eager": net}
    traced = _traced(net)
    if traced is not None:
        for name, stem in (("fused", True), ("fused-but-stem", False)):
            fused = fuse_epilogues(traced, stem)
            if fused is not None:
                found[name] = fused
    return found


def choose(known: Mapping[str, Network], measure: Callable[[Network], float]) -> Choice | None:
    """Measure implementations, and return the fastest; None if all failed. One that raises is left out."""
    times: dict[str, float] = {}
    for name, network in known.items():
        try:
            times[name] = measure(network)
        except Exception as error:  # noqa: BLE001  (a library may raise anything)
            _log.warning("the implementation %r of the network is left out: %s", name, one_line(error))
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    return Choice(best, known[best], times)


def compare(known: Mapping[str, Network], measure: Callable[[Network], float]) -> Choice | None:
    """As `choose`, in a new thread; once more if cuDNN's search was switched off, so that all are compared without it.

    cuDNN's plans are kept by thread: each comparison begins without any.
    """
    searched = torch.backends.cudnn.benchmark
    choice = _in_new_thread(lambda: choose(known, measure))
    if searched and not torch.backends.cudnn.benchmark and len(known) > 1:
        choice = _in_new_thread(lambda: choose(known, measure))
    return choice


def optimised(net: PixelNet, runtime: Runtime, samples: Sequence[Any], key: "ChoiceKey") -> Network:
    """The implementation that serves: the one chosen before on this kind of device, or the fastest.

    Args:
        net: the network, on its device.
        runtime: of that device; its graphs are dropped afterwards.
        samples: as many samples as the largest batch has, uint8 [height, width, 3].
        key: what the choice depends on.
    """
    known = implementations(net)
    buckets = len(bucket_sizes(len(samples)))
    try:
        batches = reference_batches(net, runtime, samples)
    except torch.OutOfMemoryError as error:  # the warm-up finds the largest batch that fits
        _log.warning("%s: the implementations of the network are not compared: %s", key.model, one_line(error))
        return net
    measure = partial(
        seconds_per_batch, runtime=runtime, batches=batches, tolerance=_TOLERANCES[net.dtype], buckets=buckets
    )
    before, searched = key.load() or ("", True)
    torch.backends.cudnn.benchmark &= searched  # a profile of then holds for the kernels of then
    choice = compare({before: known.pop(before)}, measure) if before in known else None
    if choice is None:
        choice = compare(known, measure)
        if choice is None:
            return net  # its first batch reports why
        key.store(choice.name, choice.times)
    times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in choice.times.items())
    _log.info("%s: network implementation %s (geometric means of batch times: %s)", key.model, choice.name, times)
    return choice.network


def reference_batches(net: PixelNet, runtime: Runtime, samples: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Batches of the first samples, the largest first, and their logits by the network without cuDNN's search.

    They are computed in a thread of their own, since cuDNN would use the plans of these batches again. Noise instead of
    samples that look like images would give random weights logits beyond the range of fp16.
    """
    sizes = dict.fromkeys(min(size, len(samples)) for size in (len(samples), *_SMALLER))

    def compute() -> list[tuple[Tensor, Tensor]]:
        with torch.inference_mode(), runtime.computing():
            pixels = torch.stack([torch.as_tensor(sample) for sample in samples]).to(runtime.device)
            found = [(pixels[:size], net(pixels[:size]).float()) for size in sizes]
        runtime.record().synchronize()
        return found

    search, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        return _in_new_thread(compute)
    finally:
        torch.backends.cudnn.benchmark = search


def seconds_per_batch(
    network: Network, runtime: Runtime, batches: Sequence[tuple[Tensor, Tensor]], tolerance: float, buckets: int = 1
) -> float:
    """The geometric mean, over the batches, of the least time of a replay of the network as a graph, s.

    Args:
        network: computes logits from pixels.
        runtime: of the device.
        batches: pixels and expected logits.
        tolerance: of the logits, relative to their norm.
        buckets: number of batch sizes whose first batch may be slow.

    Raises:
        RuntimeError: its logits are not close to the expected ones, it cannot be captured, or its first batches take
            too long.
    """
    replays: list[Replay] = []
    logarithms = []
    with torch.inference_mode():
        for pixels, expected in batches:
            with runtime.computing():
                logits = torch.empty_like(expected)
                run = partial(_run, network, pixels, logits)
                _limit_first_batches(_seconds(runtime, run), buckets)
                for _ in range(2):
                    runtime.poison_free_memory()
                    run()
                    runtime.record().synchronize()
                    error = float((logits - expected).norm() / expected.norm())
                    if not error <= tolerance:
                        raise RuntimeError(f"its logits differ by {error:.2g}, relative to their norm")
                replays.append(runtime.capture(run))
                best = min(_seconds(runtime, replays[-1], _REPLAYS) for _ in range(_ROUNDS))
                logarithms.append(math.log(best / _REPLAYS))
    return math.exp(sum(logarithms) / len(logarithms))


def _limit_first_batches(seconds: float, buckets: int) -> None:
    """End cuDNN's search if the first batches of all buckets would take too long; without it, refuse.

    Raises:
        RuntimeError: they take too long without the search.
    """
    if seconds * buckets > FIRST_BATCHES and not end_search(seconds):
        raise RuntimeError(f"its first batch of a size takes {seconds:.1f} s, without a search")


def end_search(seconds: float) -> bool:
    """Switch off cuDNN's search for the fastest convolutions, whose first batches took this time, s.

    Returns:
        Whether it was on.
    """
    searched = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    if searched:
        _log.warning("cuDNN does not search for the fastest convolutions any more: it has taken %.1f s", seconds)
    return searched


def _in_new_thread(function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1, "network") as pool:
        return pool.submit(function).result()


def _run(network: Network, pixels: Tensor, logits: Tensor) -> None:
    logits.copy_(network(pixels))


def _seconds(runtime: Runtime, run: Callable[[], object], repeats: int = 1) -> float:
    """Time of all repeats, s."""
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    runtime.record().synchronize()
    return time.perf_counter() - began


def _traced(net: PixelNet) -> fx.GraphModule | None:
    """The network and its normalisation as one graph; None if it cannot be traced."""
    try:
        return trace(net)
    except Exception as error:  # noqa: BLE001  (tracing runs the model's code on proxies, which may raise anything)
        _log.info("the network is not traced: %s", one_line(error))
        return None


@dataclass(frozen=True)
class ChoiceKey:
    """What the choice of an implementation depends on, and the file beside the cached profiles in which it is kept.

    Attributes:
        model: name of the model.
        device: name of the device.
        settings: precision and other settings.
    """

    model: str
    device: str
    settings: str

    def load(self) -> tuple[str, bool] | None:
        """The implementation chosen before, and whether cuDNN searched then; None if none was."""
        try:
            content: Any = json.loads(read_text(self._path))
            return str(content["implementation"]), bool(content["search"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, name: str, times: Mapping[str, float]) -> None:
        """Keep a choice: name, times, s, and whether cuDNN searches; a file that cannot be written is logged."""
        content = {
            "implementation": name, "search": torch.backends.cudnn.benchmark, "seconds_per_batch": {**times},
        }  # fmt: skip
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            _log.warning("the choice of the network's implementation is not kept: %s", error)

    @property
    def _path(self) -> Path:
        identity = json.dumps([self.model, self.device, self.settings, torch.__version__])
        return cache_folder() / "networks" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
