"""Energy by batch size on a device with a sensor: steady loads of a few sizes, with idle power before and after.

The energy of a batch is P(b) l(b): the power while batches of size b are in service, times the service time. Power is
smooth in b while energy jumps with l(b), so power is interpolated between the measured sizes. Between two batches that
run back to back the device waits for the next one; that share of time counts as idle, so that P(b) is the power in
service. Where steady batches of a size take less time than l(b), which is measured among batches of other sizes, P(b)
is lower by the same ratio, so that the energy of a batch is the one that was measured.

The model assumes that power depends only on whether the device is idle or busy now. The duty-cycle check tests it with
loads of one size that have gaps between the batches. A device that keeps its clocks up in such gaps draws more than
idle power there ("active idle"). Batches are then charged with what they add to that power, since a server under load
waits in such gaps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite, log
from time import monotonic, sleep

import numpy as np
import scipy

from policies.profile import EnergySource, Profile
from profiler.batch_load import BatchLoad, ExecutorLoad
from profiler.conditions import Conditions, reasons_of, summarise
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
from profiler.energy_plan import EnergyPlan
from profiler.measure import OnProgress, Subject
from server.energy.meters import EnergyMeter

_log = logging.getLogger("batchwright.profiler")

_FASTER = 0.05  # share by which a steady batch is faster than l(b) from which a profile's note says so
_SOURCE: dict[str, EnergySource] = {"nvml": "nvml", "rapl": "rapl"}


@dataclass(frozen=True, slots=True)
class EnergyRig:
    """A device under measurement: meter and clock, source of load, and random order of the sizes."""

    instruments: Instruments
    load: BatchLoad
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Steady load of one batch size: power, W, and batch rate, 1/s, with standard errors over the passes.

    Attributes:
        passes: the powers of the passes, W.
        conditions: of the device at the edges of the windows.
    """

    batch_size: int
    power: Mean
    rate: Mean
    passes: tuple[float, ...] = ()
    conditions: tuple[Conditions, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchEnergy:
    """Energy of a batch of one size.

    Attributes:
        batch_size: b.
        power: power in service, idle power included, W.
        total: total energy of a batch, J.
        marginal: energy of a batch above idle, J.
    """

    batch_size: int
    power: Mean
    total: Mean
    marginal: Mean


@dataclass(frozen=True, slots=True)
class EnergySweep:
    """Result of an energy measurement.

    Attributes:
        plan: the plan that was run.
        points: the measured sizes, ascending.
        before: idle power before the first load, W.
        after: idle power after the last load, W.
        part_loads: partial loads of the duty-cycle check, one for each of the plan's shares.
    """

    plan: EnergyPlan
    points: tuple[LoadPoint, ...]
    before: Mean
    after: Mean
    part_loads: tuple[LoadPoint, ...] = ()

    @property
    def idle(self) -> Mean:
        """Idle power, W; its error is at least half the difference between before and after."""
        half_difference = abs(self.before.value - self.after.value) / 2
        error = hypot(self.before.standard_error, self.after.standard_error) / 2
        return Mean(
            (self.before.value + self.after.value) / 2,
            max(half_difference, error) if isfinite(error) else half_difference,
        )

    def active_idle(self, service_times: Sequence[float]) -> float | None:
        """Power in the gaps of the partial loads, W: the least-squares fit; None without partial loads."""
        if not self.part_loads:
            return None
        busy, loads = self._checked_power(service_times), self._loads(service_times)
        gaps = [1.0 - load for load in loads]
        beyond = [p.power.value - load * busy for p, load in zip(self.part_loads, loads, strict=True)]
        squares = sum(gap * gap for gap in gaps)
        return sum(gap * watts for gap, watts in zip(gaps, beyond, strict=True)) / squares if squares else None

    def baseline(self, service_times: Sequence[float]) -> Mean:
        """Power that batches are charged above, W: active idle if a duty-cycle check fails, else idle power."""
        active = self.active_idle(service_times)
        if active is None or all(check.passed for _, check in self.checks(service_times)):
            return self.idle
        return Mean(active, self.idle.standard_error)

    def batch_energies(self, service_times: Sequence[float]) -> tuple[BatchEnergy, ...]:
        """Energies of the measured sizes; `service_times` are l(b), s, for b = 1, 2, ..."""
        base = self.baseline(service_times)
        return tuple(self._batch_energy(point, service_times[point.batch_size - 1], base) for point in self.points)

    def _batch_energy(self, point: LoadPoint, service_time: float, baseline: Mean) -> BatchEnergy:
        power = self._power_in_service(point, service_time)
        total = Mean(service_time * power.value, service_time * power.standard_error)
        return BatchEnergy(point.batch_size, power, total, marginal(total, baseline, service_time))

    def _power_in_service(self, point: LoadPoint, service_time: float) -> Mean:
        """Power for l(b) that gives the energy above idle of a measured batch, W."""
        share = point.rate.value * service_time
        value = self.idle.value + (point.power.value - self.idle.value) / share
        return Mean(value, hypot(point.power.standard_error, (1.0 - share) * self.idle.standard_error) / share)

    def powers(self, service_times: Sequence[float]) -> tuple[float, ...]:
        """P(b), W, for every size up to the largest, by monotone cubic interpolation in log b."""
        measured = self.batch_energies(service_times)
        if len(measured) == 1:
            return (measured[0].power.value,)
        logs = [log(energy.batch_size) for energy in measured]
        smooth = scipy.interpolate.PchipInterpolator(logs, [energy.power.value for energy in measured])
        return tuple(smooth(np.log(np.arange(1, measured[-1].batch_size + 1))).tolist())

    def checks(self, service_times: Sequence[float]) -> tuple[tuple[float, DutyCheck], ...]:
        """Loads reached in the duty-cycle check, with predicted and measured power."""
        power, loads = self._checked_power(service_times), self._loads(service_times)
        return tuple(
            (load, duty_cycle(self.idle.value, power, load, point.power.value))
            for load, point in zip(loads, self.part_loads, strict=True)
        )

    def _checked_power(self, service_times: Sequence[float]) -> float:
        """Power in service of the size of the duty-cycle check, W."""
        busy = next((p for p in self.points if p.batch_size == self.plan.checked), self.points[0])
        return self._power_in_service(busy, service_times[self.plan.checked - 1]).value

    def _loads(self, service_times: Sequence[float]) -> list[float]:
        return [point.rate.value * service_times[self.plan.checked - 1] for point in self.part_loads]

    @property
    def conditions(self) -> tuple[Conditions, ...]:
        """Of the device, in all windows under load."""
        return tuple(each for point in (*self.points, *self.part_loads) for each in point.conditions)

    def apply_to(self, profile: Profile, meter: EnergyMeter) -> Profile:
        """Return the profile with these energies, as measured by this meter."""
        idle, powers = self.baseline(profile.service_times).value, self.powers(profile.service_times)
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
        if self.conditions:
            notes.append(summarise(self.conditions))
        faster = {point.batch_size: point.rate.value * service_times[point.batch_size - 1] for point in self.points}
        size = max(faster, key=lambda b: faster[b])
        if faster[size] > 1.0 + _FASTER:
            notes.append(f"steady batches of {size} take {1.0 - 1.0 / faster[size]:.0%} less time than l({size})")
        checks = [f"{check.error:+.1%} at load {load:.2f}" for load, check in self.checks(service_times)]
        if checks:
            notes.append(f"power against idle plus batches of {plan.checked}: {', '.join(checks)}")
        active = self.active_idle(service_times)
        if active is not None and self.baseline(service_times) != self.idle:
            notes.append(f"energies are above the {active:.1f} W drawn in gaps between batches")
        return notes

    def _precision(self, service_times: Sequence[float]) -> str:
        errors = {r.batch_size: r.total.standard_error / r.total.value for r in self.batch_energies(service_times)}
        widest = max(errors, key=lambda b: errors[b])
        if not isfinite(errors[widest]):
            return "single windows have no standard error"
        return f"standard error of the total at most {errors[widest]:.1%} (size {widest})"


def watts(power: Mean) -> str:
    """Format a power with its standard error, if finite."""
    error = f" ± {power.standard_error:.1f}" if isfinite(power.standard_error) else ""
    return f"{power.value:.1f}{error} W"


def sweep_energies(rig: EnergyRig, plan: EnergyPlan, on_progress: OnProgress) -> EnergySweep:
    """Run the plan: idle power, all sizes in each pass, partial loads, idle power again.

    Raises:
        UnmeasuredError: the sensor has no reading, or no batch completes.
    """
    run = _Run(rig, plan, on_progress)
    before = run.idle()
    visits: dict[int, list[LoadPoint]] = {size: [] for size in plan.sizes}
    for _ in range(plan.passes):
        for size in rig.rng.permutation(plan.sizes).tolist():
            visits[size].append(run.visit(size))
    part_loads = tuple(run.visit(plan.checked, share) for share in plan.shares)
    after = run.idle() if plan.idle_after else before
    return EnergySweep(plan, tuple(_pooled(points) for points in visits.values()), before, after, part_loads)


def _pooled(points: Sequence[LoadPoint]) -> LoadPoint:
    powers, rates = ([getattr(point, name).value for point in points] for name in ("power", "rate"))
    conditions = tuple(each for point in points for each in point.conditions)
    return LoadPoint(points[0].batch_size, mean(powers), mean(rates), tuple(powers), conditions)


class _Run:
    """Runs the parts of a plan and reports progress."""

    def __init__(self, rig: EnergyRig, plan: EnergyPlan, on_progress: OnProgress) -> None:
        self._rig = rig
        self._plan = plan
        self._on_progress = on_progress
        self._done = 0.0  # s of the plan's duration

    def idle(self) -> Mean:
        power = idle_power(self._rig.instruments, self._plan.idle)
        self._report(self._plan.idle.duration)
        return power

    def visit(self, size: int, share: float = 1.0) -> LoadPoint:
        windows = self._plan.visit
        if share < 1.0:  # the gaps are random, so that rate and power need many batches
            windows = replace(windows, min_batches=20)
        with self._rig.load(size, share) as load:
            steady = steady_power(self._rig.instruments, load, windows)
        self._rig.instruments.sleep(self._plan.rest)
        self._report(self._plan.rest + self._plan.visit.duration)
        return LoadPoint(size, steady.power, steady.rate, (steady.power.value,), steady.conditions)

    def _report(self, seconds: float) -> None:
        self._done += seconds
        self._on_progress(min(1.0, self._done / self._plan.duration))


def make_rig(subject: Subject, rng: np.random.Generator) -> EnergyRig:
    """Make a rig on this machine's clock; `rng` draws the order of the sizes."""
    (gaps,) = rng.spawn(1)  # a generator of its own, because the load's thread draws from it
    load = ExecutorLoad(subject.executor, subject.model, subject.samples, gaps, monotonic, sleep)
    return EnergyRig(Instruments(subject.meter, monotonic, sleep, subject.conditions), load, rng)


def is_sensor(meter: EnergyMeter) -> bool:
    """Whether the meter reads a device's sensor, whose steps are too long for a single batch."""
    return meter.source in _SOURCE


def with_energy(
    profile: Profile, rig: EnergyRig, planned: Callable[[Sequence[float]], EnergyPlan], on_progress: OnProgress
) -> tuple[Profile, EnergySweep | None]:
    """Add measured energies to a profile of service times; without a working sensor, return it unchanged.

    Args:
        profile: profile of the device, just measured.
        rig: the device.
        planned: makes the plan from service times, s.
        on_progress: called with the share of the work done.
    """
    meter = rig.instruments.meter
    if not is_sensor(meter):
        return profile, None
    try:
        found = sweep_energies(rig, planned(profile.service_times), on_progress)
    except UnmeasuredError as error:
        _log.warning("the profile has no energy, its measurement failed: %s", error)
        return profile, None
    _warn(found, profile.service_times)
    return found.apply_to(profile, meter), found


def _warn(found: EnergySweep, service_times: Sequence[float]) -> None:
    if any(reasons_of(each.throttle) for each in found.conditions):
        _log.warning("%s", summarise(found.conditions))
    checks = found.checks(service_times)
    load, worst = max(checks, key=lambda pair: abs(pair[1].error), default=(0.0, None))
    if worst is not None and not worst.passed:
        _log.warning(
            "at load %.2f the device draws %.1f W, %+.1f %% from the sum of idle power and batches: energies are above "
            "the %.1f W that it draws between batches, not above idle power",
            load,
            worst.measured,
            100 * worst.error,
            found.baseline(service_times).value,
        )
