"""Energy on a GPU, part of `make gpu`: a model's full profile, what its sensor is worth, and joules per request.

All of it in one process and through one executor, so that cuDNN tunes each batch size once. Requests go to the
dispatcher itself, without HTTP: it is the device's energy under a policy that is compared, at loads that one client
could not offer over HTTP. Joules are the GPU's own counter over a window between two of its ticks, by the requests
answered in it; marginal ones are those above idle power.
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
from profiler.energy import Instruments, Load, Progress, Steady, UnmeasuredError, Windows, steady_power
from profiler.energy_plan import EnergyPlan, full_energy_plan
from profiler.measure import Subject, full_plan, measure
from profiler.preflight import preflight
from profiler.sweep import Sweep, rig_of, with_energy
from server.backends.executor import Executor, ThreadExecutor
from server.energy.meters import EnergyMeter, meter_for
from server.errors import ServerError
from server.models.images import synthetic_images
from server.scheduling.admission import Limits
from server.scheduling.calls import Answer
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics

LOADS = (0.2, 0.4, 0.6)
SLO_FACTORS = (1.5, 3.0)  # times greedy's p95 at the same load
FASTEST = 8000.0  # 1/s; what one Python process offers to itself and answers
TIMES = 45.0  # s for a profile's service times, if the least that is owed takes no longer
ENERGIES = 30.0, 75.0  # s for its energies, at least and at most
JOULES = 75.0  # s that all cells take, about
_WINDOWS = Windows(settle=1.0, length=4.0, repeats=1, min_batches=20)
_CAPACITY = 4096  # requests that may wait

Watch = Callable[[Load], Awaitable[Steady]]  # measures while requests are served; "batches" are requests here


@dataclass(frozen=True, slots=True)
class Served:
    """What serves: a profile's model on a device, and inputs for it.

    Attributes:
        executor: runs the batches.
        profile: of the model on it.
        samples: decoded inputs; requests take them in turn.
        clock: the executor's, s.
        watch: measures power and rate while requests are served.
    """

    executor: Executor
    profile: Profile
    samples: Sequence[Any]
    clock: Callable[[], float]
    watch: Watch


@dataclass(slots=True)
class _Tally:
    """What came of the requests so far."""

    responses: list[float]
    batch_sizes: list[int]
    progress: Progress
    refused: int = 0

    def answered(self, clock: Callable[[], float], due: float, future: "asyncio.Future[list[Answer]]") -> None:
        if future.cancelled() or future.exception() is not None:
            self.refused += 1
            return
        now = clock()
        self.responses.append(now - due)
        self.batch_sizes.append(future.result()[0].batch_size)
        self.progress = Progress(self.progress.batches + 1, now)


async def joules(served: Served, spec: str, rate: float, seed: int = 1) -> dict[str, Any]:
    """Serve Poisson arrivals under a policy while it is watched; energies are total and above idle, mJ a request.

    Args:
        served: what serves.
        spec: of the policy.
        rate: arrivals, 1/s.
        seed: the same one, the same arrivals.

    Raises:
        UnmeasuredError: the meter tells nothing, or no request is answered.
    """
    profile = served.profile
    chosen = await asyncio.to_thread(choose, spec, profile)
    metrics = Metrics()
    dispatcher = Dispatcher(served.executor, {profile.model: chosen}, metrics, served.clock, Limits(_CAPACITY))
    tally = _Tally([], [], Progress(0, served.clock()))
    loop, offer = (
        asyncio.create_task(dispatcher.run()),
        asyncio.create_task(_offer(served, dispatcher, rate, seed, tally)),
    )
    try:
        steady = await served.watch(lambda: tally.progress)
    finally:
        await _end(offer)
        await dispatcher.drain()
        await _end(loop)
    return {"policy": spec, "arrival_rate_hz": rate, "load": profile.load(rate), **_told(tally, steady, profile)}


async def _offer(served: Served, dispatcher: Dispatcher, rate: float, seed: int, tally: _Tally) -> None:
    """Until cancelled; response times count from the scheduled instants."""
    began, rng = served.clock(), np.random.default_rng(seed)
    for number, instant in enumerate(poisson(rate, 120.0, rng).tolist()):
        await asyncio.sleep(max(0.0, began + instant - served.clock()))
        sample = served.samples[number % len(served.samples)]
        try:
            future = dispatcher.submit(served.profile.model, [sample])
        except ServerError:
            tally.refused += 1
        else:
            future.add_done_callback(partial(tally.answered, served.clock, began + instant))


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _told(tally: _Tally, steady: Steady, profile: Profile) -> dict[str, Any]:
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


async def compare(served: Served, until: float, note: Callable[[dict[str, Any]], object]) -> None:
    """Load by load while there is time: greedy, then the least-energy policies under SLOs of multiples of its p95.

    Args:
        served: what serves.
        until: no cell is begun after this instant of its clock, s.
        note: told of each cell.
    """
    fastest = min(served.profile.capacity, FASTEST / max(LOADS))
    for load in LOADS:
        if served.clock() > until:
            return
        greedy = await joules(served, "greedy", load * fastest)
        note(greedy)
        for factor in SLO_FACTORS:
            if served.clock() > until:
                return
            slo = factor * greedy["p95_ms"]
            try:
                cell = await joules(served, f"smdp:slo_p95_ms={slo:.4f}", load * fastest)
            except SpecError as error:
                cell = {"policy": "smdp", "load": load, "failed": str(error)}
            note({**cell, "slo_p95_ms": slo, "slo_over_greedy": factor, **_saved(cell, greedy, slo)})


def _saved(cell: dict[str, Any], greedy: dict[str, Any], slo: float) -> dict[str, Any]:
    if "failed" in cell:
        return {}
    return {"kept": cell["p95_ms"] <= slo, "marginal_over_greedy": cell["marginal_mj"] / greedy["marginal_mj"]}


def sensor(sweep: Sweep, profile: Profile, meter: EnergyMeter) -> dict[str, Any]:
    """What the sensor shows: its step, idle power with the context open, and whether power is linear in the load."""
    checks = sweep.checks(profile.service_times)
    busy = {r.batch_size: r.power.value for r in sweep.readings(profile.service_times)}[sweep.plan.checked]
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
    """The largest distance of a power from the line that fits all of them best, relative to the line."""
    loads, powers = np.asarray(points).T
    line = np.polynomial.Polynomial.fit(loads, powers, 1)(loads)
    return float(np.max(np.abs(powers / line - 1.0)))


def readings(sweep: Sweep, profile: Profile) -> list[dict[str, Any]]:
    """The sizes whose energy was measured: W and mJ, with standard errors."""
    return [
        {
            "batch_size": r.batch_size,
            "power_w": r.power.value,
            "power_error_w": r.power.standard_error,
            "total_mj": 1e3 * r.total.value,
            "marginal_mj": 1e3 * r.marginal.value,
            "marginal_error_mj": 1e3 * r.marginal.standard_error,
        }
        for r in sweep.readings(profile.service_times)
    ]


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be studied: a torchvision model on a device ("cuda:0"), up to a batch size, until an instant (s)."""

    model: str
    device: str
    max_batch_size: int
    until: float


def study(what: Study, save: Callable[[str, Any], object]) -> None:
    """The whole study of a model; `save` is told of each part as soon as it is there.

    Raises:
        UnmeasuredError: the sensor failed.
    """
    from server.backends.torch_images import make_image_device, resolve_device, settings
    from server.models.torchvision_source import load_image_model

    place, device_name = resolve_device(what.device)
    found = preflight(what.device)
    save("preflight", asdict(found))
    model, net = load_image_model(what.model, "random", what.max_batch_size)
    executor = ThreadExecutor(make_image_device([(model, net)], place), what.device)
    try:
        samples = list(synthetic_images(model.codec, 16, np.random.default_rng(1)))
        subject = Subject(executor, what.model, samples, meter_for(what.device))
        versions = ", ".join(f"{name} {number}" for name, number in cache.versions().items())
        about = f"{settings(place)}, weights random, {versions}; {found.note}"
        profile, sweep = profiled(subject, what, device_name, about)
        save("profile", profile.to_json())
        if sweep is None:
            raise UnmeasuredError(f"no energies: {subject.meter.about}")
        save("sensor", sensor(sweep, profile, subject.meter))
        save("energy", readings(sweep, profile))
        cells: list[dict[str, Any]] = []

        def note(cell: dict[str, Any]) -> None:
            cells.append(cell)
            save("joules", cells)

        served = Served(executor, profile, samples, time.monotonic, watching(subject.meter))
        asyncio.run(compare(served, what.until, note))
    finally:
        executor.close()


def profiled(subject: Subject, what: Study, device: str, about: str) -> tuple[Profile, Sweep | None]:
    """A full profile, its energies in the time that joules per request leave."""
    rng, least, most = np.random.default_rng(0), *ENERGIES
    plan = replace(full_plan(what.max_batch_size), max_time=TIMES)
    measurement = asyncio.run(measure(subject, plan, rng, lambda share: None))
    profile = measurement.profile(f"{subject.model}-{cache.slug(device)}", subject.model, device, about)

    def planned(service_times: Sequence[float]) -> EnergyPlan:
        left = what.until - time.monotonic() - JOULES
        return full_energy_plan(service_times).within(min(most, max(least, left)))

    return with_energy(profile, rig_of(subject, rng), planned, lambda share: None)


def watching(meter: EnergyMeter) -> Watch:
    """Measure in a thread, while the event loop serves."""
    instruments = Instruments(meter, time.monotonic, time.sleep)

    async def watch(load: Load) -> Steady:
        return await asyncio.to_thread(steady_power, instruments, load, _WINDOWS)

    return watch
