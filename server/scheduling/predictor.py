"""Predicted beside measured response times of the models of one device, over the last minute.

A prediction is a simulation of the policies in use, with the service times as learned, varied as those of the last
minute's batches, and with arrivals at the rates and of the lengths of the requests that were answered in that minute.
It is made in a process, off the event loop, and again when one of these has changed, the sooner when the device has
become slower or faster.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from policies.catalog import choose
from policies.planning.prediction import Prediction, Traffic, from_responses
from policies.types import Policy
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.levels import levels_of
from server.telemetry.batch_record import BatchRecord
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.predictor")
_WINDOW = 60.0  # s
_INTERVAL = 5.0  # s between two comparisons
_FEWEST = 100  # requests in the window
_MOST = 20_000  # requests kept
_LENGTHS = 500  # of the latest requests
_STEP = 0.05  # relative change of a rate, length or service time with which the prediction is made again
_LEAST_AGE = 60.0  # s between two predictions, each of which takes a second of a processor
_SOON = 10.0  # s, the same when a service time has changed by more than _APART
_APART, _REPORTS = 0.2, 600.0  # relative difference that is reported, and least time between reports, s
_POISSON = (0.6, 1.6)  # squared coefficient of variation of interarrival times
_SLOWER = 1.1  # measured over learned service times, in the mean
_BATCHES = 2000  # kept
_PART = 0.8  # of a bound, within which requests are to be predicted
Predict = Callable[[Mapping[str, Traffic]], Mapping[str, Prediction]]


@dataclass(slots=True)
class _Window:
    """Requests and batches of the last minute of one model.

    Attributes:
        requests: instant of completion, response time, s, size of the batch, instant of arrival, length, and level.
        batches: instant of completion, size, length of the longest request, and time to the next launch, s.
        ratio: mean of measured over learned service times of these batches, at the last comparison.
        apart_since: instant since which predicted and measured differ, s; None while they do not.
        reported: instant of the last report, s.
    """

    requests: deque[tuple[float, float, int, float, float, int]] = field(default_factory=lambda: deque(maxlen=_MOST))
    batches: deque[tuple[float, int, float, float]] = field(default_factory=lambda: deque(maxlen=_BATCHES))
    ratio: float = 1.0
    apart_since: float | None = None
    reported: float = -_REPORTS


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured figures of a model.

    Attributes:
        predicted: by the simulation.
        measured: over the last minute, from the queue to the end of the batch, without decoding and HTTP.
        rate: answered requests a second in that minute.
        neighbours: the same of the other models of the device.
    """

    predicted: Prediction
    measured: Prediction
    rate: float
    neighbours: Mapping[str, float]


class Predictor:
    """Compares predicted with measured response times of one device."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, predict: Predict, pool: Executor) -> None:
        """`predict` is called in a thread of `pool`."""
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._predict = predict
        self._pool = pool
        self._windows: dict[str, _Window] = {model: _Window() for model in dispatcher.chosen}
        self._before: _Inputs | None = None
        self._made = -inf  # instant of the last prediction, s
        self._found: Mapping[str, Prediction] = {}
        self._comparisons: dict[str, Comparison] = {}

    def completed(self, batch: BatchRecord) -> None:
        """Add a completed batch."""
        window = self._windows[batch.model]
        for request in batch.finished:
            length, response = request.payload.length, batch.ended - request.arrival
            window.requests.append((batch.ended, response, batch.size, request.arrival, length, request.level))
        if batch.whole:
            longest = max([request.payload.length for request in batch.launch.requests])
            window.batches.append((batch.ended, batch.size, longest, batch.cycle))

    def comparison(self, model: str) -> Comparison | None:
        """The comparison of a model; None without enough requests in the last minute."""
        return self._comparisons.get(model)

    def share_within(self, model: str, seconds: float, since: float) -> float | None:
        """Share of the last minute's requests that were answered within a time, s; None for fewer than 100.

        Those count that arrived after `since`, an instant, s.
        """
        responses = [each[1] for each in self._windows[model].requests if each[3] >= since]
        return None if len(responses) < _FEWEST else float(np.mean(np.array(responses) <= seconds))

    async def share_without_waiting(self, model: str, slower: float) -> float | None:
        """Share of the requests of the last minute within the model's bound, were its batches slower by a factor.

        It is simulated for a policy that never waits, and for 0.8 of the bound: response times are measured with
        decoding and HTTP, and are up to a sixth longer than predicted. The rate is the higher one of the last minute's
        answers and of the latest arrivals. None without requests, and where stages are served one by one.
        """
        known = {name: self._traffic(name, self._dispatcher.clock()) for name in self._windows}
        traffic = known[model]
        if not traffic.rate or traffic.profile.stages > 1:
            return None
        soonest = choose("length-aware" if traffic.profile.varies_by_length else "greedy", traffic.profile)
        known[model] = replace(
            traffic,
            chosen=replace(soonest, slo=_PART * traffic.chosen.slo),
            rate=max(traffic.rate, self._dispatcher.mean_rate(model)),
            ratios=tuple(slower * each for each in traffic.ratios),
        )
        work = partial(self._predict, known)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        return found[model].within if model in found else None

    async def run(self) -> None:
        """Compare every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            try:
                await self._compare(self._dispatcher.clock())
            except Exception:  # noqa: BLE001  (such as a process that was killed for its memory)
                _log.exception("%s: response times cannot be predicted now", self._dispatcher.device)
                self._comparisons, self._before = {}, None
                await asyncio.sleep(_REPORTS)

    async def _compare(self, now: float) -> None:
        known = {model: self._traffic(model, now) for model in self._windows}
        enough = any(len(window.requests) >= _FEWEST for window in self._windows.values())
        if not enough or any(each.profile.stages > 1 for each in known.values()):
            self._comparisons = {}  # stages are not simulated
            return
        inputs = _inputs(known)
        if inputs.outdate(self._before, now - self._made):
            self._before, self._made = inputs, now
            work, former = partial(self._predict, known), self._found
            self._found = await asyncio.get_running_loop().run_in_executor(self._pool, work)
            for model, found in self._found.items():
                if found.savings is not None and (model not in former or former[model].savings is None):
                    _log.info("%s: %s", model, found.savings)
        self._comparisons = {}
        for model, each in known.items():
            measured, predicted = self._measured(model), self._found.get(model)
            if measured is None or predicted is None:
                self._windows[model].apart_since = None
                continue
            neighbours = {name: other.rate for name, other in known.items() if name != model and other.rate > 0.0}
            self._comparisons[model] = Comparison(predicted, measured, each.rate, neighbours)
            self._metrics.predicted(model, self._dispatcher.device, predicted)
            self._report(model, predicted, measured, now)

    def _traffic(self, model: str, now: float) -> Traffic:
        """What was answered in the last minute."""
        window = self._windows[model]
        for each in (window.requests, window.batches):
            while each and each[0][0] < now - _WINDOW:
                each.popleft()
        requests, profile = window.requests, self._dispatcher.learned(model)
        span = min(_WINDOW, max(now - requests[0][3], 1.0)) if requests else _WINDOW
        lengths = tuple(request[4] for request in list(requests)[-_LENGTHS:]) if profile.varies_by_length else ()
        ratios = np.array(
            [
                took / profile.service_time(size, longest)
                for _, size, longest, took in window.batches
                if size <= profile.max_batch_size
            ]
            or [1.0]
        )
        window.ratio = float(ratios.mean())
        varied = tuple((ratios / window.ratio).tolist())
        chosen, levels = self._dispatcher.chosen[model], self._levels(model)
        return Traffic(chosen, profile, len(requests) / span, lengths, varied, levels)

    def _levels(self, model: str) -> Sequence[tuple[float, float]]:
        """Share and longest wait, s, of each priority level in the last minute; empty for one level."""
        levels, requests = levels_of(self._dispatcher.levels, model), self._windows[model].requests
        if levels.count == 1:
            return ()
        counts, total = Counter(request[5] for request in requests), max(len(requests), 1)
        return [(counts[level] / total, levels.max_wait(level)) for level in range(1, levels.count + 1)]

    def _measured(self, model: str) -> Prediction | None:
        window = self._windows[model].requests
        if len(window) < _FEWEST:
            return None
        batches = sum(1.0 / request[2] for request in window)
        levels = [request[5] for request in window] if model in self._dispatcher.levels else []
        return from_responses([request[1] for request in window], levels, len(window) / batches)

    def _report(self, model: str, predicted: Prediction, measured: Prediction, now: float) -> None:
        """Log a line when the means have differed for a minute, at most every ten minutes."""
        window = self._windows[model]
        if abs(measured.mean / predicted.mean - 1.0) <= _APART:
            window.apart_since = None
            return
        window.apart_since = now if window.apart_since is None else window.apart_since
        if now < window.apart_since + _WINDOW or now < window.reported + _REPORTS:
            return
        window.reported = now
        _log.warning(
            "%s: a mean response time of %.3g ms is predicted, and %.3g ms is measured%s",
            model,
            1e3 * predicted.mean,
            1e3 * measured.mean,
            self._reason(model),
        )

    def _reason(self, model: str) -> str:
        window = self._windows[model]
        gaps = np.diff(np.sort([request[3] for request in window.requests]))
        variation = float(gaps.var() / gaps.mean() ** 2) if gaps.any() else inf
        if not _POISSON[0] < variation < _POISSON[1]:
            return f": arrivals are not Poisson, the squared coefficient of variation of their gaps is {variation:.2g}"
        if window.ratio > _SLOWER:
            return f": batches take {window.ratio:.2f} times as long as learned, other work may share the device"
        return "; the reason is not known"


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a prediction depends on.

    Attributes:
        policies: the policies by model.
        traffic: rates, mean lengths, and shares of priority levels.
        times: service times, s, at the length of the profiles.
    """

    policies: Mapping[str, Policy]
    traffic: Sequence[float]
    times: Sequence[float]

    def outdate(self, before: "_Inputs | None", age: float) -> bool:
        """Whether a prediction of other inputs and this age, s, is to be made again."""
        if before is None:
            return True
        if len(before.times) != len(self.times):  # the largest batch is another one
            return age >= _SOON
        slower = _change(before.times, self.times)
        if age < (_SOON if slower > _APART else _LEAST_AGE):
            return False
        swapped = any(policy is not before.policies[model] for model, policy in self.policies.items())
        return swapped or max(slower, _change(before.traffic, self.traffic)) > _STEP


def _change(before: Sequence[float], now: Sequence[float]) -> float:
    """The largest relative change of a number, over the larger value."""
    pairs = zip(before, now, strict=True)
    return max((abs(new - old) / max(new, old) for old, new in pairs if new != old), default=0.0)


def _inputs(models: Mapping[str, Traffic]) -> _Inputs:
    traffic, times = list[float](), list[float]()
    for each in models.values():
        largest = each.profile.max_batch_size
        traffic += [each.rate, float(np.mean(each.lengths)) if each.lengths else 0.0]
        traffic += [1.0 + share for share, _ in each.levels]  # so that a change of 0.05 counts
        times += [each.profile.service_time(size) for size in sorted({1, min(2, largest), largest})]
    return _Inputs({model: each.chosen.policy for model, each in models.items()}, traffic, times)
