"""Measures a model's service time and energy by batch size, through the executor that serves.

Service time is what the dispatcher sees: from the instant the device takes a batch to its outputs being there. Sizes
are visited in passes, in random order, so that a drift of the machine (heat, a neighbour) falls on all sizes alike.
A repeat that lies further from its size's median than five scaled median absolute deviations, and than a tenth of
the median, is an outlier: somebody else's doing. Outliers are dropped, never more than one repeat in five, and
counted in the profile's note; mean, coefficient of variation and confidence interval are over the rest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from policies.profile import EnergySource, Profile, interpolate
from profiler.feed import take
from server.backends.executor import Batch, Executor
from server.energy.meters import EnergyMeter
from server.models.model import Codec

OnProgress = Callable[[float], None]  # share of the work done, 0..1

_QUICK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_ENERGY_SOURCE: Mapping[str, EnergySource] = {"emulated": "modelled"}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        executor: runs the batches.
        model: its name there.
        samples: decoded inputs; a batch takes them in turn.
        meter: read before and after each batch if it counts batches; a sensor's steps are too long for that, and
            profiler/sweep.py measures by it.
        texts: the codec, where samples are texts, whose length matters.
    """

    executor: Executor
    model: str
    samples: Sequence[Any]
    meter: EnergyMeter
    texts: Codec | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        sizes: batch sizes, ascending from 1 to the largest.
        warm_ups: sizes of the batches that run, in this order, before anything counts.
        min_repeats: batches of each size that count, at least.
        min_samples: samples in the batches of each size that count, at least: more repeats for small batches.
        max_repeats: batches of each size that count, at most.
        half_width: the 95 % confidence interval of the mean at which a size is done, half its width over the mean.
        max_time: no repeat beyond the least is begun that would end later than this after the start, s.
    """

    sizes: tuple[int, ...]
    warm_ups: tuple[int, ...]
    min_repeats: int = 5
    min_samples: int = 0
    max_repeats: int = 50
    half_width: float = 0.02
    max_time: float = 600.0

    def owed(self, size: int) -> int:
        """The least number of repeats of a size."""
        return max(self.min_repeats, -(-self.min_samples // size))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the repeats of one batch size say.

    Attributes:
        batch_size: b.
        mean: service time, s.
        cv: standard deviation over mean; None from a single repeat.
        half_width: of the mean's 95 % confidence interval, over the mean; infinite from a single repeat.
        repeats: that counted.
        outliers: that did not.
        energy: mean over all repeats, J a batch; None where there is no meter.
    """

    batch_size: int
    mean: float
    cv: float | None
    half_width: float
    repeats: int
    outliers: int
    energy: float | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The estimates of all sizes that were measured, ascending, and the meter's name."""

    estimates: tuple[Estimate, ...]
    meter: str

    def profile(self, name: str, model: str, device: str, about: str = "") -> Profile:
        """A profile with every size up to the largest; `about` (versions, threads) joins the note."""
        sizes = [e.batch_size for e in self.estimates]
        energies = self._energies()
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
        )

    def _energies(self) -> list[float] | None:
        """None without a meter, and where it stood still: an emulated profile without energies counts zeros."""
        joules = [e.energy for e in self.estimates if e.energy is not None]
        return joules if len(joules) == len(self.estimates) and any(joules) else None

    def _cvs(self) -> tuple[float, ...] | None:
        """By size; a single repeat says nothing, so its neighbours speak for it."""
        known = {e.batch_size: e.cv for e in self.estimates if e.cv is not None}
        if not known:
            return None
        every = np.arange(1, self.estimates[-1].batch_size + 1)
        return tuple(np.interp(every, list(known), list(known.values())).tolist())

    def _note(self) -> str:
        repeats = [e.repeats for e in self.estimates]
        least, most = min(repeats), max(repeats)
        outliers = sum(e.outliers for e in self.estimates)
        widest = max(self.estimates, key=lambda e: e.half_width)
        gaps = len(self.estimates) < self.estimates[-1].batch_size
        precision = (
            "single repeats have no confidence interval"
            if isinf(widest.half_width)
            else f"95 % half-width of the mean at most {widest.half_width:.1%} (size {widest.batch_size})"
        )
        return (
            f"service time through the executor, {least}{f' to {most}' if most > least else ''} repeats of each of "
            f"{len(repeats)} sizes in random order{', linear between them' if gaps else ''}; {precision}; "
            f"{outliers} outliers of {sum(repeats) + outliers} repeats dropped"
        )


def full_plan(max_batch_size: int) -> Plan:
    """Every batch size, to 2 %."""
    sizes = tuple(range(1, max_batch_size + 1))
    return Plan(sizes, warm_ups=2 * sizes[::-1])


def quick_plan(max_batch_size: int, tunes_by_size: bool) -> Plan:
    """About two sizes an octave, in about ten seconds where GoogLeNet takes 50 ms a picture (one core of a CPU).

    Args:
        max_batch_size: the largest size.
        tunes_by_size: whether the device's first batch of any size is slow, as cuDNN's is; else, as on the CPU, only
            memory has to be warm, which the largest batch sees to, and what little else there is shows in small ones.
    """
    sizes = octaves(max_batch_size)
    warm_ups = tuple(b for b in sizes[::-1] if tunes_by_size or b <= 4 or b == max_batch_size)
    return Plan(sizes, warm_ups, min_repeats=1, min_samples=8, max_repeats=20, max_time=10.0)


def octaves(max_batch_size: int) -> tuple[int, ...]:
    """All sizes up to 4, two an octave above, and the largest."""
    sizes = {b for b in _QUICK_SIZES if b < max_batch_size} | {max_batch_size}
    octave = 32
    while octave < max_batch_size:
        sizes |= {b for b in (octave, octave * 3 // 2) if b < max_batch_size}
        octave *= 2
    return tuple(sorted(sizes))


async def measure(subject: Subject, plan: Plan, rng: np.random.Generator, on_progress: OnProgress) -> Measurement:
    """Run the plan; the order of the sizes is drawn from `rng`."""
    start = time.monotonic()
    runs = _Runs(subject, plan)
    for size in plan.warm_ups:
        await runs.warm_up(size)
        on_progress(runs.progress(time.monotonic() - start))
    while todo := runs.unfinished(time.monotonic() - start):
        for size in rng.permutation(todo).tolist():
            if runs.fits(size, time.monotonic() - start):
                await runs.repeat(size)
            on_progress(runs.progress(time.monotonic() - start))
    on_progress(1.0)
    return Measurement(tuple(runs.estimate(size) for size in plan.sizes), subject.meter.source)


class _Runs:
    """The repeats so far."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self._subject = subject
        self._plan = plan
        self._warm = 0  # samples run before anything counted
        self._times: dict[int, list[float]] = {size: [] for size in plan.sizes}
        self._joules: dict[int, list[float]] = {size: [] for size in plan.sizes}
        self._done: set[int] = set()

    async def warm_up(self, size: int) -> None:
        await self._run(size)
        self._warm += size

    async def repeat(self, size: int) -> None:
        seconds, joules = await self._run(size)
        self._times[size].append(seconds)
        if joules is not None:
            self._joules[size].append(joules)
        if self._enough(size):
            self._done.add(size)

    async def _run(self, size: int) -> tuple[float, float | None]:
        subject = self._subject
        batch = Batch(subject.model, take(subject.samples, size))
        before = self._joules_so_far()
        completion = await subject.executor.run(batch)
        after = self._joules_so_far()
        joules = None if before is None or after is None else after - before
        return completion.finished - completion.started, joules

    def _joules_so_far(self) -> float | None:
        meter = self._subject.meter
        return meter.read() if meter.scope == "batches" else None

    def unfinished(self, elapsed: float) -> list[int]:
        """The sizes that want another repeat and may have it."""
        return [size for size in self._plan.sizes if size not in self._done and self.fits(size, elapsed)]

    def fits(self, size: int, elapsed: float) -> bool:
        """Whether a repeat is owed, or ends in time."""
        times = self._times[size]
        return len(times) < self._plan.owed(size) or elapsed + max(times) <= self._plan.max_time

    def _enough(self, size: int) -> bool:
        count, plan = len(self._times[size]), self._plan
        if count >= plan.max_repeats or count < max(2, plan.owed(size)):
            return count >= plan.max_repeats
        return self.estimate(size).half_width <= plan.half_width

    def progress(self, elapsed: float) -> float:
        """Half of it when the samples owed were run, all of it when every size is done or the time is up."""
        plan = self._plan
        owed = sum(plan.warm_ups) + sum(b * plan.owed(b) for b in plan.sizes)
        run = self._warm + sum(b * min(len(times), plan.owed(b)) for b, times in self._times.items())
        spent = 1.0 if elapsed >= plan.max_time else elapsed / plan.max_time
        return run / owed * (0.5 + 0.5 * max(spent, len(self._done) / len(plan.sizes)))

    def estimate(self, size: int) -> Estimate:
        kept = _without_outliers(np.asarray(self._times[size]))
        joules = self._joules[size]
        count, mean = len(kept), float(kept.mean())
        cv = float(kept.std(ddof=1)) / mean if count > 1 else None
        half_width = inf if cv is None else float(stdtrit(count - 1, 0.975)) * cv / sqrt(count)
        return Estimate(
            batch_size=size,
            mean=mean,
            cv=cv,
            half_width=half_width,
            repeats=count,
            outliers=len(self._times[size]) - count,
            energy=float(np.mean(joules)) if joules else None,
        )


def _without_outliers(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """The repeats that count; what an outlier is, the module's docstring says."""
    median = float(np.median(times))
    distance = np.abs(times - median)
    limit = max(5.0 * 1.4826 * float(np.median(distance)), 0.1 * median)
    furthest = np.argsort(-distance, kind="stable")[: len(times) // 5]
    return np.delete(times, furthest[distance[furthest] > limit])
