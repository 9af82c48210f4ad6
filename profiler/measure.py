"""Service time and energy by batch size, measured through the server's executor.

Service time is the time from the launch of a batch to that of the next one, which the device starts by itself, as it
does in a loaded server: so it includes the hand-over between two batches. Sizes are visited in passes, in random order,
so that a drift of the machine (heat, other processes) affects all sizes alike.

A repeat is an outlier if it differs from its size's median by more than five scaled median absolute deviations and by
more than a tenth of the median. At most one repeat in five is dropped; the profile's note counts them. Mean,
coefficient of variation and confidence interval are over the remaining repeats.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf, isinf, sqrt
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from policies.profile import EnergySource, Profile, interpolate
from profiler.back_to_back import Rotation, back_to_back
from profiler.conditions import Conditions, unknown_conditions
from server.backends.executor import Batch, Executor
from server.energy.meters import EnergyMeter
from server.models.model import Codec
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors

OnProgress = Callable[[float], None]  # share of the work done, 0..1

_QUICK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_QUICK_NOTE = "quick: "  # begins the notes of quick profiles
_ENERGY_SOURCE: Mapping[str, EnergySource] = {"emulated": "modelled"}


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under measurement.

    Attributes:
        executor: runs the batches.
        model: the model's name in the executor.
        samples: decoded inputs, used in rotation.
        meter: read before and after each batch if it counts single batches. A sensor's steps are too long for that:
            see profiler/energy_sweep.py.
        by_length: the model's codec if its service time depends on length; else None.
        shape: shape of the samples of a model whose inputs vary in shape; else empty.
        conditions: reads the device's clocks and why they are lowered; None where it has none to read.
    """

    executor: Executor
    model: str
    samples: Sequence[Any]
    meter: EnergyMeter
    by_length: Codec | None = None
    shape: str = ""
    conditions: Callable[[], Conditions | None] = unknown_conditions


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Plan of a service time measurement.

    Attributes:
        sizes: batch sizes, ascending from 1 to the largest.
        warm_ups: sizes of the warm-up batches, in order.
        min_repeats: minimum number of repeats of each size.
        min_samples: minimum number of samples over all repeats of a size, which means more repeats of small batches.
        max_repeats: maximum number of repeats of each size.
        half_width: a size is done once its mean's 95 % confidence interval has this half-width, relative to the mean.
        max_time: a repeat beyond the minimum is started only if it ends within this time after the start, s.
        quick: whether the profile's note says that it is a quick one.
    """

    sizes: tuple[int, ...]
    warm_ups: tuple[int, ...]
    min_repeats: int = 5
    min_samples: int = 0
    max_repeats: int = 50
    half_width: float = 0.02
    max_time: float = 600.0
    quick: bool = False

    def required_repeats(self, size: int) -> int:
        """Minimum number of repeats of a size."""
        return max(self.min_repeats, -(-self.min_samples // size))


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """Estimate from the repeats of one batch size.

    Attributes:
        batch_size: b.
        mean: mean service time, s.
        cv: coefficient of variation; None for a single repeat.
        half_width: half-width of the mean's 95 % confidence interval, relative to the mean; infinite for one repeat.
        repeats: number of repeats without the outliers.
        outliers: number of dropped repeats.
        energy: mean energy per batch over all repeats, J; None without a meter.
        cpu_time: mean user and system time of the device's process over all repeats, s; None where it is not counted.
    """

    batch_size: int
    mean: float
    cv: float | None
    half_width: float
    repeats: int
    outliers: int
    energy: float | None
    cpu_time: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Estimates of all measured sizes, ascending, the meter's name, and the shape of the samples if it varies.

    `quick` is that of the plan.
    """

    estimates: tuple[SizeEstimate, ...]
    meter: str
    shape: str = ""
    quick: bool = False

    def profile(self, name: str, model: str, device: str, about: str = "") -> Profile:
        """Profile of every size up to the largest; `about` (versions, threads) is appended to its note."""
        sizes = [e.batch_size for e in self.estimates]
        energies, cpu_times = self._energies(), [e.cpu_time for e in self.estimates if e.cpu_time is not None]
        return Profile(
            name=name,
            service_times=interpolate(sizes, [e.mean for e in self.estimates]),
            model=model,
            device=device,
            source="measured",
            note="; ".join(filter(None, (self._note(), about))),
            cvs=self._cvs(),
            energies=interpolate(sizes, energies) if energies else None,
            energy_source=_ENERGY_SOURCE.get(self.meter, "none") if energies else "none",
            cpu_times=interpolate(sizes, cpu_times) if len(cpu_times) == len(sizes) and all(cpu_times) else None,
        )

    def _energies(self) -> list[float] | None:
        """Energies by measured size, J; None without a meter or if all are 0 (an emulated profile without energies)."""
        joules = [e.energy for e in self.estimates if e.energy is not None]
        return joules if len(joules) == len(self.estimates) and any(joules) else None

    def _cvs(self) -> tuple[float, ...] | None:
        """Coefficient of variation by size; sizes with a single repeat are interpolated from their neighbours."""
        known = {e.batch_size: e.cv for e in self.estimates if e.cv is not None}
        if not known:
            return None
        every = np.arange(1, self.estimates[-1].batch_size + 1)
        return tuple(np.interp(every, list(known), list(known.values())).tolist())

    def _note(self) -> str:
        repeats = [e.repeats for e in self.estimates]
        fewest, most = min(repeats), max(repeats)
        outliers = sum(e.outliers for e in self.estimates)
        widest = max(self.estimates, key=lambda e: e.half_width)
        gaps = len(self.estimates) < self.estimates[-1].batch_size
        precision = (
            "single repeats have no confidence interval"
            if isinf(widest.half_width)
            else f"95 % half-width of the mean at most {widest.half_width:.1%} (size {widest.batch_size})"
        )
        return (
            f"{_QUICK_NOTE if self.quick else ''}service time from launch to launch through the executor, "
            f"{fewest}{f' to {most}' if most > fewest else ''} repeats of each of "
            f"{len(repeats)} sizes in random order{', linear between them' if gaps else ''}; {precision}; "
            f"{outliers} outliers of {sum(repeats) + outliers} repeats dropped"
            f"{self.shape and f'; samples of shape {self.shape}'}"
        )


def full_plan(max_batch_size: int, sizes: tuple[int, ...] = ()) -> MeasurementPlan:
    """Plan for every batch size, or for `sizes`, to a confidence interval of 2 %."""
    sizes = sizes or tuple(range(1, max_batch_size + 1))
    return MeasurementPlan(sizes, warm_ups=2 * sizes[::-1])


def quick_plan(max_batch_size: int, autotunes: bool, sizes: tuple[int, ...] = ()) -> MeasurementPlan:
    """Plan for about two sizes per octave, which takes about ten seconds for GoogLeNet on one CPU core.

    Args:
        max_batch_size: largest batch size.
        autotunes: whether the device's first batch of each size is slow, as with cuDNN. Otherwise, as on the CPU, the
            largest batch warms the memory up and small batches the rest.
        sizes: the batch sizes to measure in place of these.
    """
    sizes = sizes or coarse_sizes(max_batch_size)
    warm_ups = tuple(b for b in sizes[::-1] if autotunes or b <= 4 or b == max_batch_size)
    return MeasurementPlan(sizes, warm_ups, min_repeats=1, min_samples=8, max_repeats=20, max_time=10.0, quick=True)


def is_quick(profile: Profile) -> bool:
    """Whether a measured profile is a quick one, by its note."""
    return profile.note.startswith(_QUICK_NOTE)


def coarse_sizes(max_batch_size: int) -> tuple[int, ...]:
    """All batch sizes up to 4, two per octave above, and the largest."""
    sizes = {b for b in _QUICK_SIZES if b < max_batch_size} | {max_batch_size}
    octave = 32
    while octave < max_batch_size:
        sizes |= {b for b in (octave, octave * 3 // 2) if b < max_batch_size}
        octave *= 2
    return tuple(sorted(sizes))


async def measure_service_times(
    subject: Subject, plan: MeasurementPlan, rng: np.random.Generator, on_progress: OnProgress
) -> Measurement:
    """Measure service times by the plan; `rng` draws the order of the sizes."""
    start = time.monotonic()
    runs = _Runs(subject, plan)
    for size in plan.warm_ups:
        await runs.warm_up(size)
        on_progress(runs.progress(time.monotonic() - start))
    while todo := runs.unfinished(time.monotonic() - start):
        await runs.visit(rng.permutation(todo).tolist(), start, on_progress)
    on_progress(1.0)
    estimates = tuple(runs.estimate(size) for size in plan.sizes)
    return Measurement(estimates, subject.meter.source, subject.shape, plan.quick)


class _Runs:
    """Repeats measured so far."""

    def __init__(self, subject: Subject, plan: MeasurementPlan) -> None:
        self._subject = subject
        self._plan = plan
        self._inputs = Rotation(subject.samples)
        self._warm = 0  # samples in warm-up batches
        self._times: dict[int, list[float]] = {size: [] for size in plan.sizes}
        self._joules: dict[int, list[float]] = {size: [] for size in plan.sizes}
        self._cpu_times: dict[int, list[float]] = {size: [] for size in plan.sizes}
        self._done: set[int] = set()

    async def warm_up(self, size: int) -> None:
        with one_line_errors(f"{self._subject.model}: a batch of {size}", SAMPLE_HINT):
            await self._subject.executor.run(self._batch(size))
        self._warm += size

    async def visit(self, sizes: Sequence[int], start: float, on_progress: OnProgress) -> None:
        """Run a batch of each size that has time for it; `start` is that of the measurement, s of time.monotonic."""
        if self._subject.meter.scope == "batches":
            for size in sizes:
                if self.fits(size, time.monotonic() - start):
                    await self._repeat_alone(size)
                on_progress(self.progress(time.monotonic() - start))
            return
        last = None
        async with aclosing(back_to_back(self._subject.executor, self._pass(sizes, start))) as cycles:
            async for cycle in cycles:
                if last is not None:
                    self._add(len(last.batch.inputs), last.seconds, last.completion.cpu_time)
                    on_progress(self.progress(time.monotonic() - start))
                last = cycle

    def _pass(self, sizes: Sequence[int], start: float) -> Iterator[Batch]:
        """Batches of these sizes, and one that is not measured, whose launch ends the last cycle."""
        for size in sizes:
            if self.fits(size, time.monotonic() - start):
                yield self._batch(size)
        yield self._batch(1)

    def _batch(self, size: int) -> Batch:
        return Batch(self._subject.model, self._inputs.take(size))

    def _add(self, size: int, seconds: float, cpu_time: float | None) -> None:
        self._times[size].append(seconds)
        if cpu_time is not None:
            self._cpu_times[size].append(cpu_time)
        if self._enough(size):
            self._done.add(size)

    async def _repeat_alone(self, size: int) -> None:
        """Run one batch whose energy is counted; the next one would be counted with it."""
        subject = self._subject
        before = self._joules_so_far()
        with one_line_errors(f"{subject.model}: a batch of {size}", SAMPLE_HINT):
            completion = await subject.executor.run(self._batch(size))
        after = self._joules_so_far()
        if before is not None and after is not None:
            self._joules[size].append(after - before)
        self._add(size, completion.finished - completion.started, completion.cpu_time)

    def _joules_so_far(self) -> float | None:
        return self._subject.meter.read()

    def unfinished(self, elapsed: float) -> list[int]:
        """Sizes that need another repeat and have time for it."""
        return [size for size in self._plan.sizes if size not in self._done and self.fits(size, elapsed)]

    def fits(self, size: int, elapsed: float) -> bool:
        """Whether another repeat is required, or would end in time."""
        times = self._times[size]
        return len(times) < self._plan.required_repeats(size) or elapsed + max(times) <= self._plan.max_time

    def _enough(self, size: int) -> bool:
        count, plan = len(self._times[size]), self._plan
        if count >= plan.max_repeats or count < max(2, plan.required_repeats(size)):
            return count >= plan.max_repeats
        return self.estimate(size).half_width <= plan.half_width

    def progress(self, elapsed: float) -> float:
        """Share of the work done: 0.5 after all required samples, 1 when every size is done or the time is up."""
        plan = self._plan
        required = sum(plan.warm_ups) + sum(b * plan.required_repeats(b) for b in plan.sizes)
        run = self._warm + sum(b * min(len(times), plan.required_repeats(b)) for b, times in self._times.items())
        spent = 1.0 if elapsed >= plan.max_time else elapsed / plan.max_time
        return run / required * (0.5 + 0.5 * max(spent, len(self._done) / len(plan.sizes)))

    def estimate(self, size: int) -> SizeEstimate:
        kept = _without_outliers(np.asarray(self._times[size]))
        joules, cpu_times = self._joules[size], self._cpu_times[size]
        count, mean = len(kept), float(kept.mean())
        cv = float(kept.std(ddof=1)) / mean if count > 1 else None
        half_width = inf if cv is None else float(scipy.special.stdtrit(count - 1, 0.975)) * cv / sqrt(count)
        return SizeEstimate(
            batch_size=size,
            mean=mean,
            cv=cv,
            half_width=half_width,
            repeats=count,
            outliers=len(self._times[size]) - count,
            energy=float(np.mean(joules)) if joules else None,
            cpu_time=float(np.mean(cpu_times)) if cpu_times else None,
        )


def _without_outliers(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Repeats without outliers, as the module docstring defines them."""
    median = float(np.median(times))
    distance = np.abs(times - median)
    limit = max(5.0 * 1.4826 * float(np.median(distance)), 0.1 * median)
    furthest = np.argsort(-distance, kind="stable")[: len(times) // 5]
    return np.delete(times, furthest[distance[furthest] > limit])
