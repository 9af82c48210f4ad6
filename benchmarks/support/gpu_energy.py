"""Energy on a GPU, part of benchmarks/gpu.py: a model's full profile, the sensor's accuracy, joules per request.

One process and one executor, so that cuDNN tunes each batch size once. Requests go to the dispatcher without HTTP, at
loads that one client could not offer over HTTP. Joules per request are the difference of the GPU's energy counter
between two of its ticks, over the requests answered between them; marginal joules are those above idle power.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from policies.catalog import choose
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.types import SpecError
from profiler import cache
from profiler.energy import Instruments, LoadProgress, RunningLoad, Steady, UnmeasuredError, Windows, steady_power
from profiler.energy_plan import EnergyPlan, full_energy_plan
from profiler.energy_sweep import EnergySweep, make_rig, with_energy
from profiler.measure import Subject, full_plan, measure_service_times
from profiler.preflight import preflight
from server.backends.executor import Executor, ThreadExecutor
from server.energy.meters import EnergyMeter, meter_for
from server.errors import ServerError
from server.models.images.codec import synthetic_images
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics

LOADS = (0.2, 0.4, 0.6)
SLO_FACTORS = (1.5, 3.0)  # times greedy's p95 at the same load
FASTEST = 8000.0  # 1/s; requests that one Python process can submit and answer
TIMES = 45.0  # s for a profile's service times, if the minimum takes no longer
ENERGIES = 30.0, 75.0  # s for its energies, at least and at most
JOULES = 75.0  # s for all cells, about
_WINDOWS = Windows(settle=1.0, length=4.0, repeats=1, min_batches=20)
_CAPACITY = 4096  # requests that may wait

PowerMeasurement = Callable[[RunningLoad], Awaitable[Steady]]  # while requests are served; its "batches" are requests


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """A model on a device, inputs for it, and its power measurement.

    Attributes:
        executor: runs the batches.
        profile: of the model on the executor's device.
        samples: decoded inputs; requests take them in turn.
        clock: the executor's, s.
        measure_power: measures power and rate while requests are served.
    """

    executor: Executor
    profile: Profile
    samples: Sequence[Any]
    clock: Callable[[], float]
    measure_power: PowerMeasurement


@dataclass(slots=True)
class _Tally:
    """The requests answered and refused so far."""

    responses: list[float]
    batch_sizes: list[int]
    progress: LoadProgress
    refused: int = 0

    def answered(self, clock: Callable[[], float], due: float, future: "asyncio.Future[list[Sample]]") -> None:
        if future.cancelled() or future.exception() is not None:
            self.refused += 1
            return
        now = clock()
        self.responses.append(now - due)
        self.batch_sizes.append(future.result()[0].batch_size)
        self.progress = LoadProgress(self.progress.batches + 1, now)


async def joules(device: DeviceUnderTest, spec: str, rate: float, seed: int = 1) -> dict[str, Any]:
    """Serve Poisson arrivals under a policy and measure joules per request: in total and above idle power, mJ.

    Args:
        device: serves the requests.
        spec: of the policy.
        rate: arrival rate, 1/s.
        seed: of the arrivals.

    Raises:
        UnmeasuredError: the meter fails, or no request is answered.
    """
    profile = device.profile
    chosen = await asyncio.to_thread(choose, spec, profile)
    metrics = Metrics()
    dispatcher = Dispatcher(device.executor, {profile.model: chosen}, metrics, device.clock, Limits(_CAPACITY))
    tally = _Tally([], [], LoadProgress(0, device.clock()))
    serving = asyncio.create_task(dispatcher.run())
    offer = asyncio.create_task(_offer(device, dispatcher, rate, seed, tally))
    try:
        steady = await device.measure_power(lambda: tally.progress)
    finally:
        await _cancel(offer)
        await dispatcher.drain()
        await _cancel(serving)
    return {"policy": spec, "arrival_rate_hz": rate, "load": rate / profile.capacity, **_cell(tally, steady, profile)}


async def _offer(device: DeviceUnderTest, dispatcher: Dispatcher, rate: float, seed: int, tally: _Tally) -> None:
    """Submit requests until cancelled; response times count from the scheduled instants."""
    began, rng = device.clock(), np.random.default_rng(seed)
    for number, instant in enumerate(poisson(rate, 120.0, rng).tolist()):
        await asyncio.sleep(max(0.0, began + instant - device.clock()))
        sample = device.samples[number % len(device.samples)]
        try:
            future = dispatcher.submit(device.profile.model, [sample])
        except ServerError:
            tally.refused += 1
        else:
            future.add_done_callback(partial(tally.answered, device.clock, began + instant))


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _cell(tally: _Tally, steady: Steady, profile: Profile) -> dict[str, Any]:
    power, rate = steady.power.value, steady.rate.value
    return {
        "answered_hz": rate,
        "refused": tally.refused,
        "mean_ms": 1e3 * float(np.mean(tally.responses)),
        "p95_ms": 1e3 * float(np.percentile(tally.responses, 95)),
        "mean_batch_size": float(1.0 / np.mean(1.0 / np.asarray(tally.batch_sizes))),  # over batches, not requests
        "power_w": power,
        "total_mj": 1e3 * power / rate,
        "marginal_mj": 1e3 * (power - (profile.idle_power or 0.0)) / rate,
    }


async def compare(device: DeviceUnderTest, until: float, record: Callable[[dict[str, Any]], object]) -> None:
    """By load, while there is time: greedy, then the least-energy policies under SLOs of multiples of greedy's p95.

    Args:
        device: serves the requests.
        until: no cell is started after this instant of the device's clock, s.
        record: called with each cell.
    """
    fastest = min(device.profile.capacity, FASTEST / max(LOADS))
    for load in LOADS:
        if device.clock() > until:
            return
        greedy = await joules(device, "greedy", load * fastest)
        record(greedy)
        for factor in SLO_FACTORS:
            if device.clock() > until:
                return
            slo = factor * greedy["p95_ms"]
            try:
                cell = await joules(device, f"smdp:slo_p95_ms={slo:.4f}", load * fastest)
            except SpecError as error:
                cell = {"policy": "smdp", "load": load, "failed": str(error)}
            record({**cell, "slo_p95_ms": slo, "slo_over_greedy": factor, **_saved(cell, greedy, slo)})


def _saved(cell: dict[str, Any], greedy: dict[str, Any], slo: float) -> dict[str, Any]:
    if "failed" in cell:
        return {}
    return {"kept": cell["p95_ms"] <= slo, "marginal_over_greedy": cell["marginal_mj"] / greedy["marginal_mj"]}


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


@dataclass(frozen=True, slots=True)
class Study:
    """The settings of a study.

    Attributes:
        model: a torchvision model.
        device: such as "cuda:0".
        max_batch_size: the largest batch to profile.
        until: instant at which the study ends, s of time.monotonic.
    """

    model: str
    device: str
    max_batch_size: int
    until: float


def run_study(study: Study, save: Callable[[str, Any], object]) -> None:
    """Measure all parts of a model's study, and call `save` with the name and value of each.

    Raises:
        UnmeasuredError: the sensor failed.
    """
    from server.backends.torch_device import device_settings, resolve_device
    from server.backends.torch_images import make_image_device
    from server.models.images.torchvision_source import load_image_model

    place, device_name = resolve_device(study.device)
    found = preflight(study.device)
    save("preflight", asdict(found))
    model, net = load_image_model(study.model, "random", study.max_batch_size)
    executor = ThreadExecutor(make_image_device([(model, net)], place), study.device)
    try:
        samples = list(synthetic_images(model.codec, 16, np.random.default_rng(1)))
        subject = Subject(executor, study.model, samples, meter_for(study.device))
        versions = ", ".join(f"{name} {number}" for name, number in cache.package_versions().items())
        about = f"{device_settings(place)}, weights random, {versions}; {found.note}"
        profile, sweep = measure_profile(subject, study, device_name, about)
        save("profile", profile.to_json())
        if sweep is None:
            raise UnmeasuredError(f"no energies: {subject.meter.about}")
        save("sensor", sensor(sweep, profile, subject.meter))
        save("energy", readings(sweep, profile))
        cells: list[dict[str, Any]] = []

        def record(cell: dict[str, Any]) -> None:
            cells.append(cell)
            save("joules", cells)

        device = DeviceUnderTest(executor, profile, samples, time.monotonic, power_measurement(subject.meter))
        asyncio.run(compare(device, study.until, record))
    finally:
        executor.close()


def measure_profile(subject: Subject, study: Study, device: str, about: str) -> tuple[Profile, EnergySweep | None]:
    """A full profile; its energies get the time that is not needed for joules per request."""
    rng, least, most = np.random.default_rng(0), *ENERGIES
    plan = replace(full_plan(study.max_batch_size), max_time=TIMES)
    measurement = asyncio.run(measure_service_times(subject, plan, rng, lambda share: None))
    profile = measurement.profile(f"{subject.model}-{cache.slug(device)}", subject.model, device, about)

    def planned(service_times: Sequence[float]) -> EnergyPlan:
        left = study.until - time.monotonic() - JOULES
        return full_energy_plan(service_times).within(min(most, max(least, left)))

    return with_energy(profile, make_rig(subject, rng), planned, lambda share: None)


def power_measurement(meter: EnergyMeter) -> PowerMeasurement:
    """A power measurement in a thread, while the event loop serves."""
    instruments = Instruments(meter, time.monotonic, time.sleep)

    async def measure_power(load: RunningLoad) -> Steady:
        return await asyncio.to_thread(steady_power, instruments, load, _WINDOWS)

    return measure_power
