"""Implementations of one network for captured graphs, of which the fastest is chosen by measuring when it is loaded.

All have channels last in memory, and batch normalisation folded into the convolutions. They are:

    eager      one kernel for each operation
    fused      ReLU, and the addition before it, in the convolutions' kernels
    compile    torch.compile with max-autotune, once for all batch sizes
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from policies.files import read_text, write_atomically
from policies.types import SpecError
from server.backends.cuda.fused_epilogues import fuse_epilogues
from server.backends.cuda.runtime import Runtime
from server.backends.torch_device import Optimise
from server.models.images.torchvision_source import PixelNet, trace

_log = logging.getLogger("batchwright.device")
_LIMIT = 240.0  # s for making and measuring one implementation, most of which is torch.compile's time
_SIZES = (64, 16, 1)  # batch sizes that are measured; largest first, as graphs are captured
_REPLAYS, _ROUNDS = 10, 5
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.5}  # of logits, random weights amplify errors
_T = TypeVar("_T")
Network = Callable[[Tensor], Tensor]
Makers = Mapping[str, Callable[[], Network]]


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


def makers(net: PixelNet) -> Makers:
    """What makes each implementation of a network that is on its device."""
    found: dict[str, Callable[[], Network]] = {"eager": lambda: net}
    traced = _traced(net)
    if isinstance(traced, fx.GraphModule):
        fused = fuse_epilogues(traced)
        if fused is not None:
            found["fused"] = lambda: fused
    found["compile"] = partial(_compiled, traced)
    return found


def choose(known: Makers, measure: Callable[[Network], float], limit: float = _LIMIT) -> Choice | None:
    """Make and measure implementations, and return the fastest; None if all failed.

    One that raises, or takes longer than `limit`, s, is left out. The latter goes on in a thread of its own until its
    compiler returns, and does not run on the device any more.
    """
    made: dict[str, tuple[float, Network]] = {}

    def make_and_measure(make: Callable[[], Network]) -> tuple[float, Network]:
        until, network = time.monotonic() + limit, make()

        def in_time(pixels: Tensor) -> Tensor:
            if time.monotonic() > until:
                raise TimeoutError
            return network(pixels)

        return measure(in_time), network

    for name, make in known.items():
        try:
            made[name] = _within(limit, partial(make_and_measure, make))
        except TimeoutError:
            _log.warning("the implementation %r of the network is left out: it took over %g s", name, limit)
        except Exception as error:  # noqa: BLE001  (a compiler may raise anything)
            _log.warning("the implementation %r of the network is left out: %s", name, error)
    if not made:
        return None
    best = min(made, key=lambda name: made[name][0])
    return Choice(best, made[best][1], {name: seconds for name, (seconds, _) in made.items()})


def optimised(
    net: PixelNet, runtime: Runtime, optimise: Optimise, shape: Sequence[int], largest: int, key: "ChoiceKey"
) -> Network:
    """The implementation that serves: the one chosen before on this kind of device, or the fastest, or the compiled.

    Args:
        net: the network, on its device.
        runtime: of that device; its graphs are dropped afterwards.
        optimise: the setting.
        shape: of a sample.
        largest: the largest batch size.
        key: what the choice depends on.

    Raises:
        SpecError: torch.compile fails, and the setting allows no other.
    """
    known = {**makers(net)}
    try:
        batches = reference_batches(net, runtime, shape, largest)
    except torch.OutOfMemoryError as error:  # the warm-up finds the largest batch that fits
        _log.warning("%s: the implementations of the network are not compared: %s", key.model, error)
        return net
    measure = partial(seconds_per_batch, runtime=runtime, batches=batches, tolerance=_TOLERANCES[net.dtype])
    if optimise == "compile":
        only = choose({"compile": known["compile"]}, measure, math.inf)
        if only is None:
            raise SpecError("torch.compile fails for this network, as the log says; give --optimise auto")
        return _settled(only)
    before = key.load() or ""
    choice = choose({before: known.pop(before)}, measure) if before in known else None
    if choice is None:
        choice = choose(known, measure)
        if choice is None:
            return net  # its first batch reports why
        key.store(choice.name, choice.times)
    times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in choice.times.items())
    _log.info("%s: network implementation %s (geometric means of batch times: %s)", key.model, choice.name, times)
    return _settled(choice)


def reference_batches(
    net: PixelNet, runtime: Runtime, shape: Sequence[int], largest: int
) -> list[tuple[Tensor, Tensor]]:
    """Batches of random pixels, and their logits by the network as it is."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with torch.inference_mode(), runtime.computing():
        for size in dict.fromkeys(min(size, largest) for size in _SIZES):
            pixels = torch.randint(256, (size, *shape), dtype=torch.uint8, generator=generator).to(runtime.device)
            found.append((pixels, net(pixels).float()))
    runtime.record().synchronize()
    return found


def seconds_per_batch(
    network: Network, runtime: Runtime, batches: Sequence[tuple[Tensor, Tensor]], tolerance: float
) -> float:
    """The geometric mean, over the batches, of the least time of a replay of the network as a graph, s.

    Raises:
        RuntimeError: its logits are not close to the expected ones, or it cannot be captured.
    """
    logarithms = []
    with torch.inference_mode():
        for pixels, expected in batches:
            with runtime.computing():
                logits = torch.empty_like(expected)
                run = partial(_run, network, pixels, logits)
                for _ in range(3):
                    run()
                runtime.record().synchronize()
                error = float((logits - expected).norm() / expected.norm())
                if not error <= tolerance:
                    raise RuntimeError(f"its logits differ by {error:.2g}, relative to their norm")
                replay = runtime.capture(run)
                logarithms.append(math.log(min(_replay_time(runtime, replay) for _ in range(_ROUNDS))))
    return math.exp(sum(logarithms) / len(logarithms))


def _run(network: Network, pixels: Tensor, logits: Tensor) -> None:
    logits.copy_(network(pixels))


def _replay_time(runtime: Runtime, replay: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(_REPLAYS):
        replay()
    runtime.record().synchronize()
    return (time.perf_counter() - began) / _REPLAYS


def _traced(net: PixelNet) -> torch.nn.Module:
    """The network and its normalisation as one graph, whose code is its own; itself if it cannot be traced."""
    try:
        return trace(net)
    except Exception as error:  # noqa: BLE001  (tracing runs the model's code on proxies, which may raise anything)
        _log.info("the network is not traced: %s", error)
        return net


def _compiled(net: torch.nn.Module) -> Network:
    """The network compiled once for batches of one sample, and once for all others."""
    compiled: Network = torch.compile(net, mode="max-autotune-no-cudagraphs")

    def network(pixels: Tensor) -> Tensor:
        if len(pixels) > 1:
            torch._dynamo.maybe_mark_dynamic(pixels, 0)
        return compiled(pixels)

    return network


def _settled(choice: Choice) -> Network:
    """The network, which compiles nothing more: a batch size that needs it, at tens of seconds, runs uncompiled."""
    if choice.name != "compile":
        return choice.network

    def network(pixels: Tensor) -> Tensor:
        with torch.compiler.set_stance("eager_on_recompile"):
            return choice.network(pixels)

    return network


def _within(limit: float, function: Callable[[], _T]) -> _T:
    """Call a function in a daemon thread and return its result; raise TimeoutError after `limit`, s."""
    done: Future[_T] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001  (it is the result)
            done.set_exception(error)

    Thread(target=call, name="network", daemon=True).start()
    return done.result(None if limit == math.inf else limit)


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

    def load(self) -> str | None:
        """The implementation chosen before; None if none was."""
        try:
            content: Any = json.loads(read_text(self._path))
            return str(content["implementation"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, name: str, times: Mapping[str, float]) -> None:
        """Keep the name of the implementation, and the times, s; a file that cannot be written is logged."""
        content = {"implementation": name, "seconds_per_batch": {**times}}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            _log.warning("the choice of the network's implementation is not kept: %s", error)

    @property
    def _path(self) -> Path:
        root = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative path
        folder = Path(root) if root.startswith("/") else Path.home() / ".cache"
        identity = json.dumps([self.model, self.device, self.settings, torch.__version__])
        return folder / "batchwright" / "networks" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
