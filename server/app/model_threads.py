"""The number of threads of a model on the CPU, which follows the machine, and with a bound the calls."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import monotonic
from typing import NamedTuple, TypeVar

from policies.catalog import ModelPolicy
from policies.cpus import available_cpus
from server.api.inference import Inference
from server.app.backend import Backend, executor_between, sample_alone
from server.backends.executor import Batch, uploaded
from server.backends.worker_device import Cost, WorkerDevice, more_threads_pay
from server.errors import BatchTimeoutError, one_line
from server.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("batchwright")
REST = 19.0  # time for other batches after one of these, of its service time
_INTERVAL = 2.0  # s between two looks at what is known
_AGE = 300.0  # s after which the threads are compared again in any case
_CHANGED, _RATE_CHANGED = 1.5, 1.3  # relative change of service times and of the rate with which it is decided again
_LIMIT_CHANGED = 1.1  # the same of the time within which requests have to be answered
_SETTLED = 15.0  # s after a decision in which changes of service times do not count, since they follow from it
_TRIALS = 3  # of each number of threads, of which the median counts
_FEWER = 1.5  # time with the number in use over that with fewer, from which those are used
_SAVING = 0.9  # CPU time with fewer threads over that with the fastest number, up to which they are worth it
_LONGEST_REST = 1.0  # s after a trial, so that a device that is slowed down many times is not left so for minutes

_T = TypeVar("_T")


class ModelThreads:
    """Chooses the threads of one model.

    Threads of a batch wait for each other: while another process takes a processor, a batch on all processors can take
    several times as long as one on fewer. They also spin while they wait: one thread takes less CPU time for a batch
    than two. So the number is the one with which a request is answered soonest; with a bound on the response time of a
    share of the requests, and where no energy is measured, it is the number of least CPU time of those with which a
    simulation of a policy that never waits keeps that bound at the present rate.
    """

    def __init__(
        self, model: str, dispatcher: Dispatcher, backend: Backend, inference: Inference, turn: asyncio.Lock
    ) -> None:
        """`turn` is held while batches of the device are timed."""
        self._model = model
        self._dispatcher = dispatcher
        self._backend = backend
        self._inference = inference
        self._turn = turn
        self._costs: Mapping[int, Sequence[Cost]] = {}  # of one request by number of threads, when last compared
        self._saves = False  # whether fewer threads are in use to save CPU time

    async def run(self) -> None:
        """Compare numbers of threads when service times have changed, and every few minutes; decide also by the rate.

        The time of one request follows slowly where all batches are large, and the latest batches differ from the
        profile in use only until that is refitted, so both are looked at. Until all processors are used again, or CPU
        time is saved, they are compared all the time, since the process that took one may have ended.
        """
        before, compared, settled = self._known(), monotonic(), 0.0
        while True:
            await asyncio.sleep(_INTERVAL)
            now = self._known()
            if monotonic() < settled:
                before, by_times = before._replace(alone=now.alone, latest_ratio=now.latest_ratio), False
            else:
                by_times = self._deprived() or have_changed(before, now) or monotonic() > compared + _AGE
            if not by_times and not calls_have_changed(before, now):
                continue
            try:
                if by_times or not self._costs:
                    async with self._turn:
                        await self._compare()
                    compared = monotonic()
                await self._decide()
            except Exception as error:  # noqa: BLE001  (such as a process that died; it is compared again)
                _log.warning("%s: the number of threads cannot be chosen now: %s", self._model, one_line(error))
            before, settled = now, monotonic() + _SETTLED

    def _known(self) -> "Known":
        model, chosen = self._model, self._dispatcher.chosen[self._model]
        times = self._dispatcher.learned(model).service_times[0], self._dispatcher.latest_ratio(model)
        if not saves_cpu_time(chosen):
            return Known(*times)
        return Known(*times, self._dispatcher.mean_rate(model), chosen.slo)

    def _deprived(self) -> bool:
        """Whether a model uses fewer threads than there are processors, because all of them were slower."""
        device = self._device()
        return device is not None and (device.threads or 0) < available_cpus() and not self._saves

    async def _compare(self) -> None:
        """Time one request with several numbers of threads; not while a model is loaded."""
        backend, served, cpus = self._backend, self._inference.models[self._model], available_cpus()
        device = self._device()
        if device is None or device.threads is None:
            return
        counts = {max(1, cpus // 2), max(1, cpus - 1), cpus, device.threads}
        if saves_cpu_time(self._dispatcher.chosen[self._model]):
            counts.add(1)
        costs: dict[int, list[Cost]] = {count: [] for count in sorted(counts)}
        sample = sample_alone(served, served.codec.middle_length)
        batch = Batch(self._model, uploaded(backend.executor, served.id, sample), id=served.id)
        for _ in range(_TRIALS):
            for count, found in costs.items():
                if self._dispatcher.accounting.shared or backend.devices.of(served.id) is not device:
                    return
                began = monotonic()
                found.append(await self._between(partial(device.time_with, count, batch)))
                await asyncio.sleep(min(REST * (monotonic() - began), _LONGEST_REST))
        self._costs = costs

    async def _decide(self) -> None:
        """Use the number of threads that the latest comparison, the rate and the bound call for."""
        device = self._device()
        if device is None or (present := device.threads) is None or present not in self._costs:
            return
        times, chosen = _medians(self._costs, "time"), self._dispatcher.chosen[self._model]
        count = fastest = better_threads(times, present)
        if saves_cpu_time(chosen):
            predict = self._inference.predictors[self._dispatcher.device].share_without_waiting
            costs = {each: Cost(times[each], cpu) for each, cpu in _medians(self._costs, "cpu_time").items()}
            count = await cheapest_threads(costs, fastest, present, chosen.share, partial(predict, self._model))
        self._saves = count < fastest
        if count == present:
            return
        await self._between(partial(device.use_threads, count))
        cpu, why = _medians(self._costs, "cpu_time"), ", which take less CPU time" if self._saves else ""
        text = ", ".join(f"{1e3 * times[each]:.3g} ms ({1e3 * cpu[each]:.3g} of CPU time) with {each}" for each in cpu)
        _log.info("%s: %d threads instead of %d%s; one request alone takes %s", self._model, count, present, why, text)

    def _device(self) -> WorkerDevice | None:
        """The device of the model; None if its threads cannot be set."""
        device = self._backend.devices.of(self._inference.models[self._model].id)
        return device if isinstance(device, WorkerDevice) and device.threads is not None else None

    async def _between(self, work: Callable[[], _T]) -> _T:
        """Call a function between batches; if it takes longer than a batch may, the model is loaded again.

        Raises:
            BatchTimeoutError: it took longer.
        """
        executor = self._backend.executor
        limit = executor_between(self._backend, self._model, REST).timeout
        try:
            return await asyncio.wait_for(asyncio.wrap_future(executor.call_between(work)), limit)
        except TimeoutError:
            error = BatchTimeoutError(f"a batch did not finish within {limit:g} s")
            await executor.restart(self._model, error)
            raise error from None


class Known(NamedTuple):
    """What the number of threads depends on.

    Attributes:
        alone: service time of one request as it is learned, s.
        latest_ratio: of the latest service times over those of the profile in use.
        rate: mean arrival rate, 1/s; 0 where CPU time is not saved.
        limit: time within which requests have to be answered where it is, s.
    """

    alone: float
    latest_ratio: float
    rate: float = 0.0
    limit: float = 0.0


def saves_cpu_time(chosen: ModelPolicy) -> bool:
    """Whether a policy is to keep a bound on the response time of a share of the requests with the least CPU time."""
    return chosen.bounds_share and chosen.profile.saved == "cpu_time"


def have_changed(before: Known, now: Known) -> bool:
    """Whether service times have changed since threads were compared.

    The latest batches count once new ones were served: their ratio is exactly the same until then.
    """
    latest = _differ(1.0, now.latest_ratio, _CHANGED) and now.latest_ratio != before.latest_ratio
    return latest or _differ(before.alone, now.alone, _CHANGED)


def calls_have_changed(before: Known, now: Known) -> bool:
    """Whether the rate or the bound has changed since the number of threads was decided."""
    return _differ(before.rate, now.rate, _RATE_CHANGED) or _differ(before.limit, now.limit, _LIMIT_CHANGED)


async def cheapest_threads(
    costs: Mapping[int, Cost],
    fastest: int,
    present: int,
    share: float,
    predict: Callable[[float], Awaitable[float]],
) -> int:
    """The number of threads of least CPU time with which a share of the requests keeps its bound, else the fastest one.

    A number that is not in use has to save a tenth, and halfway to no late answers is required of it, so that it is not
    left again at once.

    Args:
        costs: of one request by number of threads.
        fastest: the number with which a request is answered soonest.
        present: the number in use.
        share: of the requests that the bound is for.
        predict: the share that keeps it while batches take so many times as long as now.
    """
    for count in sorted(costs, key=lambda each: costs[each].cpu_time):
        in_use = count == present
        saving = costs[count].cpu_time <= (1.0 if in_use else _SAVING) * costs[fastest].cpu_time
        if count < fastest and saving:
            kept = await predict(costs[count].time / costs[present].time)
            if kept >= (share if in_use else (1.0 + share) / 2.0):
                return count
    return fastest


def _differ(before: float, now: float, factor: float) -> bool:
    return before != now and not before / factor < now < before * factor


def _medians(costs: Mapping[int, Sequence[Cost]], what: str) -> dict[int, float]:
    return {count: median(getattr(each, what) for each in found) for count, found in costs.items()}


def better_threads(times: Mapping[int, float], present: int) -> int:
    """The number of threads with which a request is answered soonest, by the time of one with each number, s.

    Fewer are used if the present number takes 1.5 times as long: a processor that other work takes for a moment should
    not be given up. More are used if `more_threads_pay`. Each change is to a faster number, so that the same times
    never lead back.
    """
    worth = {
        count: times[present] / time
        for count, time in times.items()
        if (times[present] > _FEWER * time if count < present else more_threads_pay(times[present], time))
    }
    return max(worth, key=lambda count: worth[count], default=present)
