"""Stage C of benchmarks/gpu.py, without HTTP: policies on a profiled device, their energy and what the model predicts.

One process and one executor. Requests go to the dispatcher directly, at loads that one client could not offer over
HTTP. Joules per request are the difference of the GPU's energy counter between two of its ticks, over the requests
answered between them; marginal joules are those above the profile's idle power.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from batchwright.analysis import simulate
from benchmarks.support.gpu_energy import Meters, loaded
from benchmarks.support.gpu_parts import emit
from loadgen.precise_timer import precise_instants
from policies.catalog import choose
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.types import SpecError
from profiler.energy import Instruments, LoadProgress, RunningLoad, Steady, Windows, steady_power
from profiler.first_profile import cold_copies
from server.backends.buckets import bucket_sizes
from server.backends.executor import Executor
from server.backends.warm_up import warm_up
from server.energy.meters import EnergyMeter, meter_for
from server.errors import ServerError
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics

LOADS = (0.2, 0.4, 0.6)
SLO_FACTORS = (1.5, 3.0)  # times greedy's p95 at the same load
TIMEOUT = "timeout:3"  # MLPerf's server batches for 3 ms
FASTEST = 8000.0  # 1/s; requests that one Python process can submit and answer
CPU_BOUND = 0.95  # share of one processor from which a process may be what limits a cell
_WINDOWS = Windows(settle=1.0, length=4.0, repeats=1, min_batches=20)
_CELL = 12.0  # s that a cell takes, with the solution of its policy
_OFFERED = 60.0  # s for which requests arrive, longer than a cell takes
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
        due: releases a semaphore at each instant.
    """

    executor: Executor
    profile: Profile
    samples: Sequence[Any]
    clock: Callable[[], float]
    measure_power: PowerMeasurement
    due: Callable[[Sequence[float], Callable[[], float]], AbstractContextManager[asyncio.Semaphore]] = precise_instants


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
    began, used = time.perf_counter(), time.process_time()
    serving = asyncio.create_task(dispatcher.run())
    offer = asyncio.create_task(_offer(device, dispatcher, rate, seed, tally))
    try:
        steady = await device.measure_power(lambda: tally.progress)
    finally:
        await _cancel(offer)
        await dispatcher.drain()
        await _cancel(serving)
    processors = (time.process_time() - used) / (time.perf_counter() - began)
    load = {"policy": spec, "arrival_rate_hz": rate, "load": rate / profile.capacity}
    return {**load, **_cell(tally, steady, profile), "processors": processors, "cpu_bound": processors > CPU_BOUND}


async def _offer(device: DeviceUnderTest, dispatcher: Dispatcher, rate: float, seed: int, tally: _Tally) -> None:
    """Submit requests until cancelled; response times count from the scheduled instants."""
    began, rng = device.clock(), np.random.default_rng(seed)
    instants = poisson(rate, _OFFERED, rng).tolist()
    with device.due(instants, lambda: device.clock() - began) as due:
        for number, instant in enumerate(instants):
            await due.acquire()
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


def predicted(profile: Profile, spec: str, rate: float) -> dict[str, float]:
    """Mean response time, ms, and power, W, of a policy at a rate by the model: a simulation."""
    found = simulate(profile, spec, arrival_rate=rate, requests=50_000)
    idle = profile.idle_power or 0.0
    power = {} if found.mean_power_w is None else {"predicted_w": idle + found.mean_power_w}
    return {"predicted_ms": found.mean_ms, **power}


async def compare(device: DeviceUnderTest, until: float, record: Callable[[dict[str, Any]], object]) -> None:
    """By load, while there is time: greedy, a timeout, and least-energy policies under multiples of greedy's p95.

    Args:
        device: serves the requests.
        until: no cell is started after this instant of the device's clock, s.
        record: called with each cell.
    """
    fastest = min(device.profile.capacity, FASTEST / max(LOADS))
    for load in LOADS:
        if device.clock() > until:
            return
        greedy = await _cell_with_prediction(device, "greedy", load * fastest)
        record(greedy)
        if device.clock() > until:
            return
        record(await _cell_with_prediction(device, TIMEOUT, load * fastest))
        for factor in SLO_FACTORS:
            if device.clock() > until:
                return
            slo = factor * greedy["p95_ms"]
            try:
                cell = await _cell_with_prediction(device, f"smdp:slo_p95_ms={slo:.4f}", load * fastest)
            except SpecError as error:
                cell = {"policy": "smdp", "load": load, "failed": str(error)}
            record({**cell, "slo_p95_ms": slo, "slo_over_greedy": factor, **_saved(cell, greedy, slo)})


async def _cell_with_prediction(device: DeviceUnderTest, spec: str, rate: float) -> dict[str, Any]:
    cell = await joules(device, spec, rate)
    return {**cell, **await asyncio.to_thread(predicted, device.profile, spec, rate)}


def _saved(cell: dict[str, Any], greedy: dict[str, Any], slo: float) -> dict[str, Any]:
    if "failed" in cell:
        return {}
    return {"kept": cell["p95_ms"] <= slo, "marginal_over_greedy": cell["marginal_mj"] / greedy["marginal_mj"]}


def measure_policies(model: str, device: str, profile: Profile, seconds: float, meters: Meters = meter_for) -> None:
    """Report the cells of `compare` for a model on its profile, within about `seconds`.

    Raises:
        UnmeasuredError: the meter failed.
    """
    until = time.monotonic() + seconds - _CELL
    with loaded(model, device, profile.max_batch_size, meters) as under_test:
        cells = list[dict[str, Any]]()
        asyncio.run(warm_up(under_test.executor, under_test.served, bucket_sizes(profile.max_batch_size)))
        samples = cold_copies(under_test.served.codec.synthetic_samples(16, np.random.default_rng(1)))

        def record(cell: dict[str, Any]) -> None:
            cells.append(cell)
            emit("joules", cells)

        measured = DeviceUnderTest(
            under_test.executor, profile, samples, time.monotonic, power_measurement(under_test.meter)
        )
        asyncio.run(compare(measured, until, record))


def power_measurement(meter: EnergyMeter) -> PowerMeasurement:
    """A power measurement in a thread, while the event loop serves."""
    instruments = Instruments(meter, time.monotonic, time.sleep)

    async def measure_power(load: RunningLoad) -> Steady:
        return await asyncio.to_thread(steady_power, instruments, load, _WINDOWS)

    return measure_power
