"""Energy by batch size, on a device with a sensor: steady loads of a few sizes, and idle power before and after.

What a batch is charged is P(b) l(b): the power while batches of its size are in service, times its service time. Power
is smooth in b, energy is not (a tile more, and l jumps), so it is power that is interpolated between the measured
sizes. Between two batches that run back to back the device rests while the next one is handed over; that share is
taken to be idle, so that P(b) is of the device in service only.

All of this takes power for idle power while idle plus something while busy, whatever came before. Loads of one size
with gaps between the batches show whether it is.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite, log
from time import monotonic, sleep

import numpy as np
from scipy.interpolate import PchipInterpolator

from policies.profile import EnergySource, Profile
from profiler.energy import (
    DutyCheck,
    Instruments,
    Mean,
    UnmeasuredError,
    duty_cycle,
    idle_power,
    marginal,
    mean,
    steady_power,
)
from profiler.energy_plan import EnergyPlan, lasting
from profiler.feed import ExecutorFeed, Feed
from profiler.measure import OnProgress, Subject
from server.energy.meters import EnergyMeter

_log = logging.getLogger("batchwright.profiler")

_SOURCE: dict[str, EnergySource] = {"nvml": "nvml", "rapl": "rapl"}


@dataclass(frozen=True, slots=True)
class Rig:
    """A device under measurement: what measures, what keeps it busy, and what draws the order of the sizes."""

    instruments: Instruments
    feed: Feed
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class Point:
    """One size under a steady load: power in W and rate in batches/s, each with its standard error over the passes."""

    batch_size: int
    power: Mean
    rate: Mean


@dataclass(frozen=True, slots=True)
class Reading:
    """What a size comes to.

    Attributes:
        batch_size: b.
        power: while in service, idle included, W.
        total: energy of a batch with all that the device draws meanwhile, J.
        marginal: energy of a batch above idle, J.
    """

    batch_size: int
    power: Mean
    total: Mean
    marginal: Mean


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was measured.

    Attributes:
        plan: by which.
        points: the sizes, ascending.
        before: idle power before all, W.
        after: idle power after all, W.
        part_loads: the size of the duty-cycle check, one for each of the plan's shares.
    """

    plan: EnergyPlan
    points: tuple[Point, ...]
    before: Mean
    after: Mean
    part_loads: tuple[Point, ...] = ()

    @property
    def idle(self) -> Mean:
        """Idle power, W; its error is no less than half of what lies between before and after."""
        apart = abs(self.before.value - self.after.value) / 2
        spread = hypot(self.before.standard_error, self.after.standard_error) / 2
        return Mean((self.before.value + self.after.value) / 2, max(apart, spread) if isfinite(spread) else apart)

    def readings(self, service_times: Sequence[float]) -> tuple[Reading, ...]:
        """What the measured sizes come to; `service_times` are l(b), s, for b = 1, 2, ..."""
        return tuple(self._reading(point, service_times[point.batch_size - 1]) for point in self.points)

    def _reading(self, point: Point, service_time: float) -> Reading:
        power = self._in_service(point, service_time)
        total = Mean(service_time * power.value, service_time * power.standard_error)
        return Reading(point.batch_size, power, total, marginal(total, self.idle, service_time))

    def _in_service(self, point: Point, service_time: float) -> Mean:
        """Power without the rests between batches, W."""
        share = min(1.0, point.rate.value * service_time)
        value = self.idle.value + (point.power.value - self.idle.value) / share
        return Mean(value, hypot(point.power.standard_error, (1.0 - share) * self.idle.standard_error) / share)

    def powers(self, service_times: Sequence[float]) -> tuple[float, ...]:
        """P(b), W, for every size up to the largest: monotone cubics in log b between the measured ones."""
        readings = self.readings(service_times)
        if len(readings) == 1:
            return (readings[0].power.value,)
        logs = [log(reading.batch_size) for reading in readings]
        smooth = PchipInterpolator(logs, [reading.power.value for reading in readings])
        return tuple(smooth(np.log(np.arange(1, readings[-1].batch_size + 1))).tolist())

    def checks(self, service_times: Sequence[float]) -> tuple[tuple[float, DutyCheck], ...]:
        """Loads that were reached in the duty-cycle check, and what was drawn there."""
        service_time = service_times[self.plan.checked - 1]
        busy = next((p for p in self.points if p.batch_size == self.plan.checked), self.points[0])
        power = self._in_service(busy, service_time).value
        loads = [point.rate.value * service_time for point in self.part_loads]
        return tuple(
            (load, duty_cycle(self.idle.value, power, load, point.power.value))
            for load, point in zip(loads, self.part_loads, strict=True)
        )

    def applied(self, profile: Profile, meter: EnergyMeter) -> Profile:
        """The profile with these energies, by this meter, for each of its sizes."""
        idle, powers = self.idle.value, self.powers(profile.service_times)
        by_size = list(zip(powers, profile.service_times, strict=True))
        return replace(
            profile,
            energies=tuple(max(0.0, power - idle) * seconds for power, seconds in by_size),
            total_energies=tuple(power * seconds for power, seconds in by_size),
            idle_power=idle,
            energy_source=_SOURCE[meter.source],
            note="; ".join((profile.note, *self._notes(profile.service_times, meter))),
        )

    def _notes(self, service_times: Sequence[float], meter: EnergyMeter) -> list[str]:
        plan = self.plan
        notes = [
            f"energy by {meter.about}: power of batches back to back, {plan.passes} windows of {plan.visit.length:.2g} "
            f"s at each of {len(plan.sizes)} sizes, smooth between them, times l(b)",
            self._precision(service_times),
            f"idle power before and after {watts(self.before)} and {watts(self.after)}",
        ]
        checks = [f"{check.error:+.1%} at load {load:.2f}" for load, check in self.checks(service_times)]
        return notes + [f"power against idle plus batches of {plan.checked}: {', '.join(checks)}"] * bool(checks)

    def _precision(self, service_times: Sequence[float]) -> str:
        errors = {r.batch_size: r.total.standard_error / r.total.value for r in self.readings(service_times)}
        widest = max(errors, key=lambda b: errors[b])
        if not isfinite(errors[widest]):
            return "single windows have no standard error"
        return f"standard error of the total at most {errors[widest]:.1%} (size {widest})"


def watts(power: Mean) -> str:
    """For people, with its standard error where there is one."""
    error = f" ± {power.standard_error:.1f}" if isfinite(power.standard_error) else ""
    return f"{power.value:.1f}{error} W"


def sweep(rig: Rig, plan: EnergyPlan, on_progress: OnProgress) -> Sweep:
    """Run the plan: idle, all sizes in each pass, part loads, idle again.

    Raises:
        UnmeasuredError: the sensor tells nothing, or no batch is completed.
    """
    run = _Run(rig, plan, on_progress)
    before = run.idle()
    visits: dict[int, list[Point]] = {size: [] for size in plan.sizes}
    for _ in range(plan.passes):
        for size in rig.rng.permutation(plan.sizes).tolist():
            visits[size].append(run.visit(size))
    part_loads = tuple(run.visit(plan.checked, share) for share in plan.shares)
    after = run.idle()
    return Sweep(plan, tuple(_pooled(points) for points in visits.values()), before, after, part_loads)


def _pooled(points: Sequence[Point]) -> Point:
    powers, rates = ([getattr(point, name).value for point in points] for name in ("power", "rate"))
    return Point(points[0].batch_size, mean(powers), mean(rates))


class _Run:
    """The sweep so far."""

    def __init__(self, rig: Rig, plan: EnergyPlan, on_progress: OnProgress) -> None:
        self._rig = rig
        self._plan = plan
        self._on_progress = on_progress
        self._done = 0.0  # s of the plan's duration

    def idle(self) -> Mean:
        found = idle_power(self._rig.instruments, self._plan.idle)
        self._tell(lasting(self._plan.idle))
        return found

    def visit(self, size: int, share: float = 1.0) -> Point:
        windows = self._plan.visit
        if share < 1.0:  # the gaps are uneven: of few batches neither rate nor power would be the load's
            windows = replace(windows, min_batches=20)
        with self._rig.feed(size, share) as load:
            steady = steady_power(self._rig.instruments, load, windows)
        self._rig.instruments.sleep(self._plan.rest)
        self._tell(self._plan.rest + lasting(self._plan.visit))
        return Point(size, steady.power, steady.rate)

    def _tell(self, seconds: float) -> None:
        self._done += seconds
        self._on_progress(min(1.0, self._done / self._plan.duration))


def rig_of(subject: Subject, rng: np.random.Generator) -> Rig:
    """The subject on this machine's clock; `rng` draws the order of the sizes."""
    (gaps,) = rng.spawn(1)  # drawn on the feed's thread
    feed = ExecutorFeed(subject.executor, subject.model, subject.samples, gaps, monotonic, sleep)
    return Rig(Instruments(subject.meter, monotonic, sleep), feed, rng)


def is_sensor(meter: EnergyMeter) -> bool:
    """Whether a device's power is read, in steps too long for a single batch."""
    return meter.source in _SOURCE


def with_energy(
    profile: Profile, rig: Rig, planned: Callable[[Sequence[float]], EnergyPlan], on_progress: OnProgress
) -> tuple[Profile, Sweep | None]:
    """Measure energies for a profile of service times; without a sensor, or if it fails, the profile stays as it is.

    Args:
        profile: of the device as it is now.
        rig: the device.
        planned: the plan for a profile's service times, s.
        on_progress: told the share of the sweep that is done.
    """
    meter = rig.instruments.meter
    if not is_sensor(meter):
        return profile, None
    try:
        found = sweep(rig, planned(profile.service_times), on_progress)
    except UnmeasuredError as error:
        _log.warning("the energy is not measured after all: %s", error)
        return profile, None
    _warn(found.checks(profile.service_times))
    return found.applied(profile, meter), found


def _warn(checks: Sequence[tuple[float, DutyCheck]]) -> None:
    load, worst = max(checks, key=lambda pair: abs(pair[1].error), default=(0.0, None))
    if worst is not None and not worst.holds():
        _log.warning(
            "at load %.2f the device draws %.1f W, %+.1f %% off what idle power and batches add up to: between batches "
            "it does not rest as it does when idle",
            load,
            worst.measured,
            100 * worst.error,
        )
