"""Stage B of benchmarks/gpu.py: a model's profile, the sensor's accuracy, and how well its energies can be repeated."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.support.gpu_parts import emit
from policies.profile import Profile
from profiler import cache
from profiler.conditions import conditions_of, reasons_of
from profiler.energy import UnmeasuredError
from profiler.energy_plan import EnergyPlan, full_energy_plan
from profiler.energy_sweep import EnergySweep, make_rig, with_energy
from profiler.first_profile import make_subject
from profiler.measure import MeasurementPlan, full_plan, measure_service_times
from profiler.preflight import preflight
from server.backends.buckets import bucket_sizes, padded
from server.backends.executor import ThreadExecutor
from server.energy.meters import EnergyMeter, meter_for
from server.models.model import ServedModel

ENERGY_SIZES = 8  # of a profile up to 128
PASSES = 2
_TIMES = 0.25  # share of a part's time for service times, if the least number of repeats takes no longer

Meters = Callable[[str], EnergyMeter]  # the meter of a device


def sensor(sweep: EnergySweep, profile: Profile, meter: EnergyMeter) -> dict[str, Any]:
    """The sensor's step, the idle power with the context open, and the linearity of power in the load."""
    checks = sweep.checks(profile.service_times)
    busy = {r.batch_size: r.power.value for r in sweep.batch_energies(profile.service_times)}[sweep.plan.checked]
    by_load = [(0.0, sweep.idle.value), *((load, check.measured) for load, check in checks), (1.0, busy)]
    return {
        "meter": meter.about,
        "step_s": meter.resolution,
        "idle_power_w": {"before": asdict(sweep.before), "after": asdict(sweep.after)},
        "batch_size": sweep.plan.checked,
        "power_w_by_load": by_load,
        "off_the_line": linearity(by_load),
        "active_idle_w": sweep.active_idle(profile.service_times),
        "duty_cycle_error": max((check.error for _, check in checks), key=abs, default=None),
    }


def linearity(points: Sequence[tuple[float, float]]) -> float:
    """The largest distance of a power from the line of best fit, relative to the line."""
    loads, powers = np.asarray(points).T
    line = np.polynomial.Polynomial.fit(loads, powers, 1)(loads)
    return float(np.max(np.abs(powers / line - 1.0)))


def readings(sweep: EnergySweep, profile: Profile) -> list[dict[str, Any]]:
    """Power, W, and energy, mJ, of the measured batch sizes, with standard errors."""
    return [
        {
            "batch_size": r.batch_size,
            "power_w": r.power.value,
            "power_error_w": r.power.standard_error,
            "total_mj": 1e3 * r.total.value,
            "marginal_mj": 1e3 * r.marginal.value,
            "marginal_error_mj": 1e3 * r.marginal.standard_error,
        }
        for r in sweep.batch_energies(profile.service_times)
    ]


def repeatability(sweep: EnergySweep, profile: Profile) -> dict[int, float]:
    """By batch size, the greatest relative difference of the energy above idle between two consecutive passes."""
    baseline = sweep.baseline(profile.service_times).value
    found = {}
    for point in sweep.points:
        above = [watts - baseline for watts in point.passes]
        found[point.batch_size] = max((abs(b / a - 1.0) for a, b in pairwise(above) if a > 0), default=float("nan"))
    return found


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """A model on a device.

    Attributes:
        executor: runs the batches.
        served: the model.
        meter: of the device.
        about: settings and versions, for a profile's note.
        name: of the device.
    """

    executor: ThreadExecutor
    served: ServedModel
    meter: EnergyMeter
    about: str
    name: str


@contextmanager
def loaded(model: str, device: str, max_batch_size: int, meters: Meters = meter_for) -> Iterator[DeviceUnderTest]:
    """Load a torchvision model with random weights on a device; `meters` gives the device's meter."""
    from server.backends.loading import make_device
    from server.backends.torch_device import device_settings, resolve_device
    from server.models.images.torchvision_source import load_image_model

    place, name = resolve_device(device)
    found = preflight(device)
    served, net = load_image_model(model, "random", max_batch_size)
    devices = make_device([(served, net)], place)
    executor = ThreadExecutor(devices, device)
    try:
        executor.call(devices.load).result()
        versions = ", ".join(f"{package} {number}" for package, number in cache.package_versions().items())
        about = f"{device_settings(place)}, weights random, {versions}; {found.note}"
        yield DeviceUnderTest(executor, served, meters(device), about, name)
    finally:
        executor.close()


def service_time_plan(max_batch_size: int, seconds: float) -> MeasurementPlan:
    """Plan for every bucket, since batches are padded to these, within about this time, s."""
    sizes = bucket_sizes(max_batch_size)
    return replace(full_plan(max_batch_size), sizes=sizes, warm_ups=2 * sizes[::-1], max_time=seconds)


def energy_plan(service_times: Sequence[float], seconds: float) -> EnergyPlan:
    """Plan for powers of two in two passes within about this time, s, with 15 s before idle power is measured."""
    plan = full_energy_plan(service_times)
    sizes = tuple(b for b in plan.sizes if b & (b - 1) == 0 or b == plan.sizes[-1])[-ENERGY_SIZES:]
    return replace(plan, sizes=tuple(sorted({1, plan.checked, *sizes})), passes=PASSES).within(seconds)


def measure_profile(model: str, device: str, max_batch_size: int, seconds: float, meters: Meters = meter_for) -> None:
    """Report a model's profile, the sensor, the energies by size and how well they repeat, within about `seconds`.

    Raises:
        UnmeasuredError: there is no sensor, or it failed; the profile without energies has been reported.
    """
    until = time.monotonic() + seconds
    with loaded(model, device, max_batch_size, meters) as under_test:
        subject = make_subject(under_test.executor, under_test.served, under_test.meter)
        subject, rng = replace(subject, conditions=conditions_of(device)), np.random.default_rng(0)
        left = until - time.monotonic()
        emit("load_s", seconds - left)
        plan = service_time_plan(max_batch_size, _TIMES * left)
        measurement = asyncio.run(measure_service_times(subject, plan, rng, lambda share: None))
        name = f"{subject.model}-{cache.slug(under_test.name).removeprefix('nvidia-')}"
        profile = padded(measurement.profile(name, subject.model, under_test.name, under_test.about))
        emit("profile", json.loads(profile.to_json()))

        def planned(service_times: Sequence[float]) -> EnergyPlan:
            return energy_plan(service_times, until - time.monotonic())

        profile, sweep = with_energy(profile, make_rig(subject, rng), planned, lambda share: None)
        if sweep is None:
            raise UnmeasuredError(f"no energies: {subject.meter.about}")
        emit("profile", json.loads(profile.to_json()))
        emit("sensor", sensor(sweep, profile, subject.meter))
        emit("energy", readings(sweep, profile))
        emit("repeatability", repeatability(sweep, profile))
        emit("windows", windows(sweep))


def windows(sweep: EnergySweep) -> list[dict[str, Any]]:
    """Clocks, temperatures and throttling at the edges of the windows of each load."""
    return [
        {
            "batch_size": point.batch_size,
            "power_w": point.power.value,
            "clock_mhz": [each.clock for each in point.conditions],
            "memory_clock_mhz": [each.memory_clock for each in point.conditions],
            "temperature_c": [each.temperature for each in point.conditions],
            "throttled_by": [reasons_of(each.throttle) for each in point.conditions],
        }
        for point in (*sweep.points, *sweep.part_loads)
    ]
