"""What is learned in pauses of the calls: service times of batches that calls do not make, and threads of models."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

from policies.cpus import available_cpus
from server.api.inference import Inference
from server.app.backend import Backend, ProfileSource, executor_between, sample_alone, synthetic_batches
from server.backends.executor import Batch, uploaded
from server.backends.worker_device import WorkerDevice
from server.errors import one_line
from server.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("batchwright")
_POLL_INTERVAL = 0.25  # s, at which a pause of the calls is noticed
_FEW, _WORTH = 4, 1.1  # size from which larger batches are tried only if it has this many times the rate of one
_LONGEST = 4.0  # time of a batch that is tried, of that of one request of the greatest length: a call may wait for it
_REST = 19.0  # time for other batches after one of these, of its service time
_THREADS_INTERVAL = 5.0  # s between two looks at the service time of one request
_THREADS_AGE = 300.0  # s after which the threads are compared again in any case: other work may have ended
_CHANGED = 1.3  # relative change of that time with which they are compared again
_SETTLED = 30.0  # s after a comparison in which that time is learned with the threads in use
_TRIALS = 5  # of each number of threads, of which the median counts
_FASTER = 1.25  # time with the present number of threads over that with another, from which the other is used


class Exploration:
    """Learns in pauses of the calls, and between their batches in at most a twentieth of a device's time."""

    def __init__(
        self, inference: Inference, backends: Mapping[Dispatcher, Backend], profile_source: ProfileSource
    ) -> None:
        """`backends` are the devices by their dispatchers; `profile_source` keeps what was learned."""
        self._inference = inference
        self._backends = backends
        self._profile_source = profile_source
        self._pool = ThreadPoolExecutor(1, "exploration")

    async def run(self) -> None:
        """Learn, until cancelled."""
        await asyncio.gather(*(self._run(dispatcher, backend) for dispatcher, backend in self._backends.items()))

    async def _run(self, dispatcher: Dispatcher, backend: Backend) -> None:
        for model in sorted(backend.estimated):
            await self._guarded(model, "no more batches of synthetic samples are served", self._learn, dispatcher)
        settings = backend.plan.settings
        if settings.model_threads is not None or available_cpus() == 1:
            return
        await asyncio.gather(
            *(self._guarded(model, "its threads stay", self._follow_threads, dispatcher) for model in backend.loaded)
        )

    async def _guarded(
        self, model: str, so: str, work: Callable[[str, Dispatcher], Awaitable[None]], dispatcher: Dispatcher
    ) -> None:
        """Do some work; if it fails, the model is served by what is known."""
        try:
            await work(model, dispatcher)
        except Exception as error:  # noqa: BLE001
            _log.warning("%s: %s: %s", model, so, one_line(error))

    async def _learn(self, model: str, dispatcher: Dispatcher) -> None:
        """Serve synthetic samples of sizes and lengths that calls may not make, and cache the profile."""
        backend = self._backends[dispatcher]
        for length, samples in synthetic_batches(backend, model):
            await self._try_batch(dispatcher, backend, model, length, samples)
        if self._is_first(model):
            keep = partial(self._profile_source.keep, backend.plan.settings, dispatcher.learned(model))
            await asyncio.get_running_loop().run_in_executor(self._pool, keep)

    async def _try_batch(
        self, dispatcher: Dispatcher, backend: Backend, model: str, length: float, samples: list[Any]
    ) -> None:
        """Run a batch in a pause, and learn from it, unless it is not worth it or the model was replaced."""
        known, size = dispatcher.learned(model), len(samples)
        half = size // 2
        if size > known.max_batch_size:
            return
        if known.service_time(size, length) > _LONGEST * known.service_time(1, max(known.lengths or (0,))):
            return
        if half >= _FEW and half * known.service_time(1, length) < _WORTH * known.service_time(half, length):
            return
        while dispatcher.open_calls or dispatcher.shared:  # noqa: ASYNC110  (it has no event, and need not be exact)
            await asyncio.sleep(_POLL_INTERVAL)
        if not self._is_first(model):
            return
        completion = await executor_between(backend, model, _REST).run(Batch(model, samples))
        if dispatcher.on_served is not None and self._is_first(model):
            dispatcher.on_served(model, size, completion.finished - completion.started, length)

    def _is_first(self, model: str) -> bool:
        """Whether the model that the server started with is still in service."""
        return self._inference.models[model].id == model and model not in self._inference.fleet.unloaded

    async def _follow_threads(self, model: str, dispatcher: Dispatcher) -> None:
        """Compare numbers of threads when the time of one request has changed, and every few minutes.

        Threads of a batch wait for each other: while another process takes a processor, a batch on all processors can
        take several times as long as one on fewer.
        """
        backend = self._backends[dispatcher]
        while True:
            known, compared = dispatcher.learned(model).service_times[0], monotonic()
            while (  # noqa: ASYNC110  (of the time there is no event)
                1.0 / _CHANGED < dispatcher.learned(model).service_times[0] / known < _CHANGED
                and monotonic() < compared + _THREADS_AGE
            ):
                await asyncio.sleep(_THREADS_INTERVAL)
            device = backend.devices.of(self._inference.models[model].id)
            if isinstance(device, WorkerDevice) and device.threads is not None and not dispatcher.shared:
                await self._compare_threads(model, backend, device, device.threads)
            await asyncio.sleep(_SETTLED)

    async def _compare_threads(self, model: str, backend: Backend, device: WorkerDevice, present: int) -> None:
        cpus, executor = available_cpus(), backend.executor
        batch = Batch(model, uploaded(executor, model, sample_alone(backend.loaded[model].served)))
        times: dict[int, list[float]] = {count: [] for count in sorted({max(1, cpus // 2), cpus - 1, cpus, present})}
        for _ in range(_TRIALS):
            for count, took in times.items():
                began = monotonic()
                took.append(await asyncio.wrap_future(executor.call_between(partial(device.time_with, count, batch))))
                await asyncio.sleep(_REST * (monotonic() - began))
        count = better_threads(times, present)
        if count != present:
            await asyncio.wrap_future(executor.call_between(partial(device.use_threads, count)))
            text = ", ".join(f"{1e3 * median(took):.3g} ms with {each}" for each, took in times.items())
            _log.info("%s: %d threads instead of %d; one request alone takes %s", model, count, present, text)


def better_threads(times: Mapping[int, Sequence[float]], present: int) -> int:
    """The number of threads with the least median time, s, unless `present` is nearly as fast, which then stays."""
    medians = {count: median(each) for count, each in times.items()}
    best = min(medians, key=lambda count: (medians[count], count))
    return best if medians[present] > _FASTER * medians[best] else present
