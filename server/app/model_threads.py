"""The number of threads of a model on the CPU, which follows the machine, and with a bound the calls."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import sqrt
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
from server.scheduling.controller import RATE_OVER
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.predictor import Predictor

_log = logging.getLogger("batchwright")
REST = 19.0  # time for other batches after one of these, of its service time
_INTERVAL = 2.0  # s between two looks at what is known
_AGE = 300.0  # s after which the threads are compared again in any case
_CHANGED = 1.5  # relative change of service times with which they are compared again
_RATE_CHANGED, _ERRORS = 0.3, 3.0  # relative change of the mean rate, and its standard errors, with which it is decided
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
    than two. So the number is the one with which a request is answered soonest.

    Where a policy keeps a bound on the response time of a share of the requests and saves CPU time, fewer may be used.
    It is the number of least CPU time of those with which the bound is kept at the present rate, by a simulation of a
    policy that never waits. When the measured share is too low, the soonest number is used for some minutes.
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
        self._device: WorkerDevice | None = None  # that the costs are of
        self._costs: Mapping[int, Cost] = {}  # of one request by number of threads, when last compared
        self._fastest: int | None = None  # the number that fewer are used in place of, to save CPU time; None: none are
        self._since = 0.0  # instant from which these are used
        self._save_from = 0.0  # instant from which CPU time may be saved again, after the bound was missed
        self._before = self._known()
        self._compared, self._settled = monotonic(), 0.0

    async def run(self) -> None:
        """Compare numbers of threads when service times have changed, and every few minutes; decide also by the rate.

        The time of one request follows slowly where all batches are large, and the latest batches differ from the
        profile in use only until that is refitted, so both are looked at. While fewer threads than processors are used
        since all were slower, they are compared all the time: the process that took one may have ended.
        """
        while True:
            await asyncio.sleep(_INTERVAL)
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001  (such as a process that died; it is compared again)
                _log.warning("%s: the number of threads cannot be chosen now: %s", self._model, one_line(error))
                self._settled = monotonic() + _SETTLED

    async def _look(self) -> None:
        """Compare and decide if something calls for it."""
        device, now, at = self._threaded_device(), self._known(), monotonic()
        if device is not self._device:  # the model was loaded again
            self._device, self._costs, self._fastest = device, {}, None
        if device is None:
            return
        if at < self._settled:
            self._before = self._before._replace(alone=now.alone, latest_ratio=now.latest_ratio)
            return
        deprived = self._fastest is None and (device.threads or 0) < available_cpus()
        by_times = have_changed(self._before, now) or at > self._compared + _AGE
        changed, misses = by_times or calls_have_changed(self._before, now), self._misses_bound()
        if not (deprived or changed or misses):
            return
        if misses:
            self._save_from = at + _AGE
        if deprived or by_times or not self._costs:
            async with self._turn:
                await self._compare(device)
            self._compared = monotonic()
        if self._costs:
            await self._decide(device, changed and not misses)
        self._before, self._settled = now, monotonic() + _SETTLED

    def _known(self) -> "Known":
        model, chosen = self._model, self._dispatcher.chosen[self._model]
        times = self._dispatcher.learned(model).service_times[0], self._dispatcher.latest_ratio(model)
        if not saves_cpu_time(chosen):
            return Known(*times)
        return Known(*times, self._dispatcher.mean_rate(model), chosen.slo)

    def _misses_bound(self) -> bool:
        """Whether the bound is missed with the threads that save CPU time."""
        chosen = self._dispatcher.chosen[self._model]
        if self._fastest is None or not saves_cpu_time(chosen):
            return False
        share = self._predictor.share_within(self._model, chosen.slo, self._since)
        return share is not None and share < chosen.share

    async def _compare(self, device: WorkerDevice) -> None:
        """Time one request with several numbers of threads; not while a model is loaded."""
        backend, served, cpus = self._backend, self._inference.models[self._model], available_cpus()
        counts = {max(1, cpus // 2), max(1, cpus - 1), cpus, device.threads or cpus, self._fastest or cpus}
        if saves_cpu_time(self._dispatcher.chosen[self._model]):
            counts.add(1)
        trials: dict[int, list[Cost]] = {count: [] for count in sorted(counts)}
        sample = sample_alone(served, served.codec.middle_length)
        batch = Batch(self._model, uploaded(backend.executor, served.id, sample), id=served.id)
        for _ in range(_TRIALS):
            for count, costs in trials.items():
                if self._dispatcher.accounting.shared or self._threaded_device() is not device:
                    return
                began = monotonic()
                costs.append(await self._between(partial(device.time_with, count, batch)))
                await asyncio.sleep(min(REST * (monotonic() - began), _LONGEST_REST))
        self._costs = {
            count: Cost(median(each.time for each in costs), median(each.cpu_time for each in costs))
            for count, costs in trials.items()
        }

    async def _decide(self, device: WorkerDevice, may_save: bool) -> None:
        """Use the number of threads that the latest comparison calls for, or fewer if they `may_save` CPU time."""
        present, chosen = device.threads, self._dispatcher.chosen[self._model]
        assert present is not None  # of a device whose threads can be set
        times = {count: cost.time for count, cost in self._costs.items()}
        count = fastest = better_threads(times, self._fastest or present)
        if may_save and saves_cpu_time(chosen) and monotonic() >= self._save_from:
            predict = partial(self._predictor.share_without_waiting, self._model)
            count = await cheapest_threads(self._costs, fastest, present, chosen.share, predict)
        if self._threaded_device() is not device:
            return
        self._fastest = fastest if count < fastest else None
        if count == present:
            return
        await self._between(partial(device.use_threads, count))
        self._since = monotonic()
        why = ", which take less CPU time" if self._fastest else ""
        text = ", ".join(
            f"{1e3 * cost.time:.3g} ms ({1e3 * cost.cpu_time:.3g} of CPU time) with {each}"
            for each, cost in self._costs.items()
        )
        _log.info("%s: %d threads instead of %d%s; one request alone takes %s", self._model, count, present, why, text)

    @property
    def _predictor(self) -> Predictor:
        return self._inference.predictors[self._dispatcher.device]

    def _threaded_device(self) -> WorkerDevice | None:
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
        limit: the bound, s; 0 where CPU time is not saved.
    """

    alone: float
    latest_ratio: float
    rate: float = 0.0
    limit: float = 0.0


def saves_cpu_time(chosen: ModelPolicy) -> bool:
    """Whether a policy is to keep a bound on the response time of a share of all requests with the least CPU time."""
    bounds_all = chosen.bounds_share and "priority_weights" not in chosen.parameters
    return bounds_all and chosen.profile.saved == "cpu_time"


def have_changed(before: Known, now: Known) -> bool:
    """Whether service times have changed since threads were compared.

    The latest batches count once new ones were served: their ratio is exactly the same until then.
    """
    latest = _differ(1.0, now.latest_ratio, _CHANGED) and now.latest_ratio != before.latest_ratio
    return latest or _differ(before.alone, now.alone, _CHANGED)


def calls_have_changed(before: Known, now: Known) -> bool:
    """Whether the rate, beyond its noise, or the bound has changed since the number of threads was decided."""
    change = max(_RATE_CHANGED * before.rate, _ERRORS * sqrt(before.rate / RATE_OVER))
    return abs(now.rate - before.rate) > change or now.limit != before.limit


async def cheapest_threads(
    costs: Mapping[int, Cost],
    fastest: int,
    present: int,
    share: float,
    predict: Callable[[float], Awaitable[float | None]],
) -> int:
    """The number of threads of least CPU time with which a share of the requests keeps its bound, else the fastest one.

    A number that is not in use has to save a tenth, also of the time with that in use, and halfway to no late answers
    is required of it, so that it is not left again at once.

    Args:
        costs: of one request by number of threads.
        fastest: the number with which a request is answered soonest.
        present: the number in use.
        share: of the requests that the bound is for.
        predict: the share that keeps it while batches take so many times as long as now; None: `present` is kept.
    """
    for count in sorted(costs, key=lambda each: costs[each].cpu_time):
        in_use, cpu_time = count == present, costs[count].cpu_time
        most = costs[fastest].cpu_time if in_use else _SAVING * min(costs[each].cpu_time for each in (fastest, present))
        if count < fastest and cpu_time <= most:
            kept = await predict(costs[count].time / costs[present].time)
            if kept is None:
                return present
            if kept >= (share if in_use else (1.0 + share) / 2.0):
                return count
    return fastest


def _differ(before: float, now: float, factor: float) -> bool:
    return before != now and not before / factor < now < before * factor


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
