"""What is learned beside the calls: service times of batches that they do not make, and threads of models."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from policies.cpus import available_cpus
from server.api.inference import Inference
from server.app.backend import Backend, ProfileSource, executor_between, sample_alone, synthetic_batches
from server.backends.executor import Batch, uploaded
from server.backends.worker_device import WorkerDevice, more_threads_pay
from server.errors import BatchTimeoutError, one_line
from server.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("batchwright")
_POLL_INTERVAL = 0.25  # s, at which a pause of the calls is noticed
_FEW, _WORTH = 4, 1.1  # size from which larger batches are tried only if it has this many times the rate of one
_LONGEST = 4.0  # largest expected time of a batch that is tried, over that of one request: a call may have to wait
_REST = 19.0  # time for other batches after one of these, of its service time
_THREADS_INTERVAL = 2.0  # s between two looks at the service times
_THREADS_AGE = 300.0  # s after which the threads are compared again in any case
_CHANGED = 1.5  # relative change of service times with which they are compared again
_SETTLED = 15.0  # s after a comparison in which that time is learned with the threads in use
_TRIALS = 3  # of each number of threads, of which the median counts
_FEWER = 1.5  # time with the number in use over that with fewer, from which those are used
_LONGEST_REST = 1.0  # s after a trial, so that a device that is slowed down many times is not left so for minutes

_T = TypeVar("_T")


class Exploration:
    """Learns beside the calls, in a twentieth of each device's time; a bit more while that device is slowed down."""

    def __init__(
        self, inference: Inference, backends: Mapping[Dispatcher, Backend], profile_source: ProfileSource
    ) -> None:
        """`backends` are the devices by their dispatchers; `profile_source` keeps what was learned."""
        self._inference = inference
        self._backends = backends
        self._profile_source = profile_source
        self._turns = {dispatcher: asyncio.Lock() for dispatcher in backends}
        self._pool = ThreadPoolExecutor(1, "exploration")

    async def run(self) -> None:
        """Learn, until cancelled or nothing is left to learn."""
        async with asyncio.TaskGroup() as tasks:
            for dispatcher, backend in self._backends.items():
                tasks.create_task(self._learn_estimated(dispatcher))
                if backend.plan.settings.model_threads is None and available_cpus() > 1:
                    for model in backend.loaded:
                        tasks.create_task(self._follow_threads(model, dispatcher))

    async def _learn_estimated(self, dispatcher: Dispatcher) -> None:
        for model in sorted(self._backends[dispatcher].estimated):
            try:
                await self._learn(model, dispatcher)
            except Exception as error:  # noqa: BLE001  (the model is served by what is known)
                _log.warning("%s: no more batches of synthetic samples are served: %s", model, one_line(error))

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
        while dispatcher.open_calls or dispatcher.accounting.shared:  # noqa: ASYNC110  (it has no event, and need not be exact)
            await asyncio.sleep(_POLL_INTERVAL)
        if not self._is_first(model):
            return
        async with self._turns[dispatcher]:
            completion = await executor_between(backend, model, _REST).run(Batch(model, samples))
        if dispatcher.accounting.on_served is not None and self._is_first(model):
            took = completion.finished - completion.started
            dispatcher.accounting.on_served(model, size, took, length, completion.cpu_time)

    def _is_first(self, model: str) -> bool:
        """Whether the model that the server started with is still in service."""
        return self._inference.models[model].id == model and model not in self._inference.fleet.unloaded

    async def _follow_threads(self, model: str, dispatcher: Dispatcher) -> None:
        """Compare numbers of threads when service times have changed, and every few minutes.

        The time of one request follows slowly where all batches are large, and the latest batches differ from the
        profile in use only until that is refitted, so both are looked at.

        Threads of a batch wait for each other: while another process takes a processor, a batch on all processors can
        take several times as long as one on fewer. Until all are used again, they are compared all the time, since the
        other process may have ended.
        """
        while True:
            before, compared = _times_of(model, dispatcher), monotonic()
            while (  # noqa: ASYNC110  (no event signals that the times have changed)
                not self._fewer(model, dispatcher)
                and not have_changed(before, _times_of(model, dispatcher))
                and monotonic() < compared + _THREADS_AGE
            ):
                await asyncio.sleep(_THREADS_INTERVAL)
            try:
                async with self._turns[dispatcher]:
                    await self._compare_threads(model, dispatcher)
            except Exception as error:  # noqa: BLE001  (such as a process that died; it is compared again)
                _log.warning("%s: numbers of threads could not be compared: %s", model, one_line(error))
            await asyncio.sleep(_SETTLED)

    def _fewer(self, model: str, dispatcher: Dispatcher) -> bool:
        """Whether a model uses fewer threads than there are processors."""
        device = self._device(model, dispatcher)
        return device is not None and device.threads is not None and device.threads < available_cpus()

    async def _compare_threads(self, model: str, dispatcher: Dispatcher) -> None:
        """Time one request with several numbers of threads, and use a better one; not while a model is loaded."""
        backend, served, cpus = self._backends[dispatcher], self._inference.models[model], available_cpus()
        device = self._device(model, dispatcher)
        if device is None or (present := device.threads) is None:
            return
        counts = sorted({max(1, cpus // 2), max(1, cpus - 1), cpus, present})
        times: dict[int, list[float]] = {count: [] for count in counts}
        sample = sample_alone(served, served.codec.middle_length)
        batch = Batch(model, uploaded(backend.executor, served.id, sample), id=served.id)
        for _ in range(_TRIALS):
            for count, took in times.items():
                if dispatcher.accounting.shared or backend.devices.of(served.id) is not device:
                    return
                began = monotonic()
                took.append(await _between(backend, model, partial(device.time_with, count, batch)))
                await asyncio.sleep(min(_REST * (monotonic() - began), _LONGEST_REST))
        count = better_threads(times, present)
        if count != present:
            await _between(backend, model, partial(device.use_threads, count))
            text = ", ".join(f"{1e3 * median(took):.3g} ms with {each}" for each, took in times.items())
            _log.info("%s: %d threads instead of %d; one request alone takes %s", model, count, present, text)

    def _device(self, model: str, dispatcher: Dispatcher) -> WorkerDevice | None:
        """The device of a model; None if its threads cannot be set."""
        device = self._backends[dispatcher].devices.of(self._inference.models[model].id)
        return device if isinstance(device, WorkerDevice) and device.threads is not None else None


class KnownTimes(NamedTuple):
    """Service times of a model: that of one request as it is learned, s, and the latest over those of the profile."""

    alone: float
    latest_ratio: float


def _times_of(model: str, dispatcher: Dispatcher) -> KnownTimes:
    return KnownTimes(dispatcher.learned(model).service_times[0], dispatcher.latest_ratio(model))


def have_changed(before: KnownTimes, now: KnownTimes) -> bool:
    """Whether service times have changed since threads were compared.

    The latest batches count once new ones were served: their ratio is exactly the same until then.
    """
    alone, latest = now.alone / before.alone, now.latest_ratio
    changed = not 1.0 / _CHANGED < latest < _CHANGED and latest != before.latest_ratio
    return changed or not 1.0 / _CHANGED < alone < _CHANGED


async def _between(backend: Backend, model: str, work: Callable[[], _T]) -> _T:
    """Call a function between batches; if it takes longer than a batch may, its model is loaded again.

    Raises:
        BatchTimeoutError: it took longer.
    """
    limit = executor_between(backend, model, _REST).timeout
    try:
        return await asyncio.wait_for(asyncio.wrap_future(backend.executor.call_between(work)), limit)
    except TimeoutError:
        error = BatchTimeoutError(f"a batch did not finish within {limit:g} s")
        await backend.executor.restart(model, error)
        raise error from None


def better_threads(times: Mapping[int, Sequence[float]], present: int) -> int:
    """The number of threads to use, by the median times of each, s.

    Fewer are used if the present number takes 1.5 times as long: a processor that other work takes for a moment should
    not be given up. More are used if `more_threads_pay`. Each change is to a faster number, so that the same times
    never lead back.
    """
    medians = {count: median(each) for count, each in times.items()}
    worth = {
        count: medians[present] / time
        for count, time in medians.items()
        if (medians[present] > _FEWER * time if count < present else more_threads_pay(medians[present], time))
    }
    return max(worth, key=lambda count: worth[count], default=present)
