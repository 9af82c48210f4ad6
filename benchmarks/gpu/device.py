"""All that one process measures on the GPU without a server: `python -m benchmarks.gpu.device`.

Networks have random weights, with which outputs are as hard to compute as with trained ones. The bias of the classifier
is set to 0: centred logits would have the rounding errors of larger ones.
"""

import argparse
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu.records import Recorder
from policies.cpus import SWITCH_INTERVAL
from profiler import cache
from profiler.batch_load import ExecutorLoad
from profiler.first_profile import make_subject
from profiler.measure import MeasurementPlan, Subject, full_plan, measure_service_times
from profiler.preflight import preflight
from server.backends.buckets import bucket_sizes, padded
from server.backends.cuda.graph import GraphDevice
from server.backends.cuda.networks import (
    ChoiceKey,
    Network,
    compare,
    implementations,
    reference_batches,
    seconds_per_batch,
)
from server.backends.cuda.page_locked import PageLocked
from server.backends.cuda.runtime import CudaRuntime, Runtime
from server.backends.executor import Batch, ThreadExecutor, uploaded
from server.backends.model_devices import ModelDevices
from server.backends.real_device import Precision, device_settings
from server.backends.torch_device import resolve_device
from server.backends.torch_images import place
from server.backends.warm_up import warm_up
from server.energy.meters import NoMeter
from server.errors import one_line
from server.models.images.codec import ImageCodec
from server.models.images.torchvision_source import PixelNet, load_image_model
from server.models.model import ServedModel

PARTS = "idle", "placement", "implementations", "outputs", "times", "energies"
CHECKED = 16  # batch size of the loads with gaps
SHARES = 0.2, 0.5, 0.8  # of the time in service, of these loads
_TOLERANCE = 0.2  # of the logits of an implementation in fp16
_OUTPUTS = 8, 1  # batch sizes whose outputs are compared after the largest
_SETTLE, _WINDOW = 0.3, 2.0  # s; the power sensor of an H100 samples a quarter of the time
_REGISTERED = 64 * 2**20  # bytes of shared memory
_REPEATS = 200  # of a wait
_REPLAYS = 10


@dataclass(frozen=True)
class Call:
    """What is measured.

    Attributes:
        models: of torchvision; the first one is served later, and its energies are measured first.
        largest: batch size.
        references: samples whose outputs are computed on the CPU, too.
        eager: whether fused implementations and cuDNN's search are left out.
        rehearse: whether the CPU stands for the GPU.
        until: the end of each part, s of time.monotonic.
    """

    models: tuple[str, ...]
    largest: int
    references: int
    eager: bool
    rehearse: bool
    until: dict[str, float]


class RehearsalRuntime:
    """A synchronous Runtime on the CPU, whose `capture` returns the function."""

    device = torch.device("cpu")

    class Done:
        """An event that has happened."""

        def query(self) -> bool:
            """True."""
            return True

        def synchronize(self) -> None:
            """Return."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros."""
        return torch.zeros(shape, dtype=dtype)

    def upload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Done:
        """Copy."""
        for target, source in copies:
            target.copy_(source)
        return self.Done()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy."""
        destination.copy_(source)

    def poison_free_memory(self) -> None:
        """Do nothing."""

    def wait_for(self, copy: Any) -> None:
        """Return."""

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        """Return the function."""
        return run

    def record(self) -> Done:
        """Return an event."""
        return self.Done()


@dataclass
class Loaded:
    """A model in the course of the call.

    Attributes:
        served: the model.
        net: its network, on the device from the second part on.
        samples: as many as the largest batch has.
        expected: the logits of the first ones in fp32 on the CPU.
        network: the implementation that is served.
        precision: on the device.
        device: runs its batches, in the executor's thread.
    """

    served: ServedModel[ImageCodec]
    net: PixelNet
    samples: list[Any]
    expected: NDArray[np.float32]
    network: Network
    precision: Precision = "fp32"
    device: GraphDevice | None = None
    executor: ThreadExecutor | None = None

    def running(self, runtime: Callable[[], Runtime]) -> tuple[GraphDevice, ThreadExecutor]:
        """The device and its executor, made at the first call."""
        if self.device is None or self.executor is None:
            self.device = GraphDevice(self.served, self.network, runtime())
            self.executor = ThreadExecutor(ModelDevices({self.served.name: self.device}))
        return self.device, self.executor


class Measurement:
    """The parts of a call, in order; each adds records as it goes."""

    def __init__(self, call: Call, recorder: Recorder) -> None:
        """Open the device."""
        self._call, self._recorder = call, recorder
        self._device = resolve_device("cpu" if call.rehearse else "cuda:0")
        self._place, self.name = torch.device(self._device.place), self._device.name
        self._runtime: Callable[[], Runtime] = RehearsalRuntime if call.rehearse else partial(CudaRuntime, self._place)
        torch.backends.cudnn.benchmark = not call.eager
        torch.zeros(1, device=self._place)  # opens the context
        self._found = preflight(self._device)
        self._loaded: dict[str, Loaded] = {}

    def idle(self) -> None:
        """Measure idle power with the context open, while the CPU loads models and computes the expected logits."""
        began = time.monotonic() + 1.0
        for name in self._call.models:
            self._loaded[name] = load(name, self._call.largest, self._call.references)
        if not self._call.rehearse:
            time.sleep(max(0.0, self._call.until["idle"] - time.monotonic()))  # no time where it was restarted
        if (end := time.monotonic() - 0.2) > began:
            self._recorder.add("idle", begin=began, end=end)

    def placement(self) -> None:
        """Move the networks to the device; one that fails is left out."""
        for name in [*self._loaded]:
            model = self._loaded[name]
            try:
                model.precision = place(model.served, model.net, self._place)
            except Exception as error:  # noqa: BLE001  (the other model is measured)
                del self._loaded[name]
                self._recorder.add("unplaced", model=name, failed=f"{type(error).__name__}: {one_line(error)}")
        if self._place.type == "cuda":
            torch.cuda.synchronize(self._place)

    def implementations(self) -> None:
        """Measure the implementations of the networks, and what a wait and shared memory take on the device."""
        for model in self._loaded.values():
            if not self._call.eager and time.monotonic() < self._call.until["implementations"]:
                self._compare(model, ChoiceKey(model.served.name, self.name, model.precision))
        self._recorder.add("wait", **self._waits())
        if not self._call.rehearse:
            self._recorder.add("registration", **_registration())

    def outputs(self) -> None:
        """Compare outputs of batches through slots and graphs with the CPU's, also with those of other samples."""
        for model in self._loaded.values():
            device, executor = model.running(self._runtime)
            for size in dict.fromkeys(min(size, len(model.expected)) for size in (self._call.largest, *_OUTPUTS)):
                outputs = executor.call(partial(_serve, executor, device, model, size)).result()
                expected = model.expected[:size]
                self._recorder.add(
                    "outputs", model=model.served.name, batch_size=size, **differences(outputs, expected)
                )

    def times(self) -> None:
        """Measure l(b) at all buckets, from launch to launch, and the time of a replay without any host between."""
        until = self._call.until["times"]
        for left, model in zip(range(len(self._loaded), 0, -1), self._loaded.values(), strict=True):
            device, executor = model.running(self._runtime)
            sizes, began = bucket_sizes(self._call.largest), time.monotonic()
            uvloop.run(warm_up(executor, model.served, sizes))
            warm = time.monotonic()
            plan = times_plan(self._call.largest, max(1.0, (until - warm) / left))
            subject = self._subject(model)
            measured = uvloop.run(measure_service_times(subject, plan, np.random.default_rng(0), lambda share: None))
            name = f"{model.served.name}-{cache.slug(self.name).removeprefix('nvidia-')}"
            versions = ", ".join(f"{package} {number}" for package, number in cache.package_versions().items())
            settings = device_settings(self._device, optimise="eager" if self._call.eager else "auto")
            about = f"{settings}, weights random, {versions}; {self._found.note}"
            profile = padded(measured.profile(name, model.served.name, self.name, about))
            replays = {size: executor.call(partial(self._replay_seconds, device, size)).result() for size in sizes}
            self._recorder.add(
                "times",
                model=model.served.name,
                first_batches_s=warm - began,
                search=torch.backends.cudnn.benchmark,
                replay_s=replays,
                profile=json.loads(profile.to_json()),
            )

    def energies(self) -> None:
        """Run steady loads, and record the instants of each window: energies are integrated from the samples later."""
        until = self._call.until["energies"]
        largest = self._call.largest
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < largest] + [largest]
        first, *others = self._loaded
        visits = [(first, size, 1.0) for size in sizes]
        visits += [(first, min(CHECKED, largest), share) for share in SHARES]
        enough = len(visits)  # for policies
        visits += [(other, size, 1.0) for other in others for size in sizes]
        visits += [(name, size, 1.0) for name in self._loaded for size in sizes[::-1]]
        for number, (name, size, share) in enumerate(visits, 1):
            if time.monotonic() + _SETTLE + _WINDOW > until:
                raise TimeoutError(f"{len(visits) - number + 1} of {len(visits)} windows were left out")
            self._window(name, size, share)
            if number == enough:
                self._recorder.add("measured", model=first)

    def _window(self, name: str, size: int, share: float) -> None:
        subject = self._subject(self._loaded[name])
        load = ExecutorLoad(
            subject.executor, name, subject.samples, np.random.default_rng(0), time.monotonic, time.sleep
        )
        with load(size, share) as progress:
            time.sleep(_SETTLE)
            before = progress()
            time.sleep(_WINDOW)
            after = progress()
        if after.batches <= before.batches:
            raise TimeoutError(f"no batch of {size} ended within {_WINDOW} s")
        rate = (after.batches - before.batches) / (after.time - before.time)
        self._recorder.add(
            "window", model=name, batch_size=size, share=share, begin=before.time, end=after.time, batches_hz=rate
        )

    def _subject(self, model: Loaded) -> Subject:
        _, executor = model.running(self._runtime)
        return make_subject(executor, model.served, NoMeter())

    def _compare(self, model: Loaded, key: ChoiceKey) -> None:
        known, runtime = implementations(model.net), self._runtime()
        batches = reference_batches(model.net, runtime, model.samples)
        buckets = len(bucket_sizes(self._call.largest))

        def measure(network: Network) -> float:
            name = next(name for name, each in known.items() if each is network)
            began, values = time.monotonic(), dict[str, Any]()
            try:
                seconds = seconds_per_batch(network, runtime, batches, _TOLERANCE, buckets)
                values = {"ms": 1e3 * seconds}
                return seconds
            except Exception as error:
                values = {"failed": str(error)[:200]}
                raise
            finally:
                values |= {"seconds": time.monotonic() - began, "search": torch.backends.cudnn.benchmark}
                self._recorder.add("implementation", model=key.model, name=name, **values)

        choice = compare(known, measure)
        if choice is not None:
            model.network = choice.network
            key.store(choice.name, choice.times)  # the server serves it, too

    def _waits(self) -> dict[str, float]:
        """Time from the end of a short operation to the thread's next one, us, for both kinds of waits."""
        x = torch.zeros(1, device=self._place)
        if self._call.rehearse:
            return {"blocking_us": 0.0, "spinning_us": 0.0}
        found = {}
        for kind, blocking in (("blocking_us", True), ("spinning_us", False)):
            event, times = torch.cuda.Event(blocking=blocking), []  # type: ignore[no-untyped-call]
            for _ in range(_REPEATS):
                began = time.perf_counter()
                x.add_(1.0)
                event.record()
                event.synchronize()
                times.append(time.perf_counter() - began)
            found[kind] = 1e6 * statistics.median(times)
        return found

    def _replay_seconds(self, device: GraphDevice, size: int) -> float:
        """Time of a replay among others that the device runs one after the other, s."""
        replay, runtime = device._replays[size], device._runtime
        best = float("inf")
        with torch.inference_mode():
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(_REPLAYS):
                    with runtime.computing():
                        replay()
                runtime.record().synchronize()
                best = min(best, (time.perf_counter() - began) / _REPLAYS)
        return best


def load(name: str, largest: int, references: int) -> Loaded:
    """Load a model with random weights, make as many samples as the largest batch has, and compute logits of some."""
    served, net = load_image_model(name, "random", largest)
    for classifier in [module for module in net.modules() if isinstance(module, nn.Linear)][-1:]:
        with torch.no_grad():
            classifier.bias.zero_()
    samples = served.codec.synthetic_samples(largest, np.random.default_rng(1))
    with torch.inference_mode():
        expected = net(torch.from_numpy(np.stack(samples[:references]))).numpy()
    return Loaded(served, net, samples, expected, net)


def times_plan(largest: int, seconds: float) -> MeasurementPlan:
    """A plan for all buckets within some time, s; they have run before."""
    sizes = bucket_sizes(largest)
    return replace(full_plan(largest, sizes), warm_ups=(sizes[-1],), max_time=seconds)


def differences(outputs: NDArray[np.float32], expected: NDArray[np.float32]) -> dict[str, Any]:
    """The relative L2 error of outputs, and how many are nearer to those of another sample than to their own."""
    distances = np.linalg.norm(outputs[:, None] - expected[None], axis=2)
    return {
        "relative_l2": float(np.linalg.norm(outputs - expected) / np.linalg.norm(expected)),
        "mixed_up": int((distances.argmin(1) != np.arange(len(outputs))).sum()),
    }


def _serve(executor: ThreadExecutor, device: GraphDevice, model: Loaded, size: int) -> NDArray[np.float32]:
    inputs = uploaded(executor, model.served.name, model.samples[:size])
    return np.stack(device.serve(Batch(model.served.name, inputs)))


def _registration() -> dict[str, Any]:
    """Whether shared memory can be page-locked, and how long that takes, ms."""
    locked, memory, began = PageLocked(), mmap.mmap(-1, _REGISTERED), time.perf_counter()
    remove = locked.add(memory)
    taken = 1e3 * (time.perf_counter() - began)
    found = locked.find(np.frombuffer(memory, np.uint8, 1024)) is not None
    remove()
    return {"page_locked": found, "ms": taken}


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--call", required=True, help="a Call as JSON")
    chosen = parser.parse_args()
    call, recorder = Call(**json.loads(chosen.call)), Recorder(chosen.out)
    sys.setswitchinterval(SWITCH_INTERVAL)
    measurement = Measurement(call, recorder)
    recorder.add("device", name=measurement.name)
    for part in PARTS:
        until = inf if part in ("idle", "placement") else call.until[part]  # all others need what these two make
        recorder.part(part, until, getattr(measurement, part))


if __name__ == "__main__":
    main()
