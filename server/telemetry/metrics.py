"""Prometheus metrics of the server, in base units, on a registry of their own."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import inf
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from policies.planning.prediction import Prediction
from policies.types import Request
from server.errors import RejectedError, ServerError
from server.telemetry.batch_record import BatchRecord
from server.telemetry.history import History
from server.telemetry.statistics import Statistics

_log = logging.getLogger("batchwright.metrics")
_STEPS = (1, 1.5, 2, 3, 5, 7)  # within a power of ten
_SECONDS = [0.0005, 0.0007, *(step * unit / 1000 for unit in (1, 10, 100, 1000) for step in _STEPS), 10.0]
_GAP_SECONDS = [step * unit / 1e5 for unit in (1, 10, 100, 1000) for step in _STEPS]  # 10 us to 70 ms
_TIMED = ("ok", "expired", "cancelled")  # outcomes that miss the objective if they come later
_POLICY_CHANGES = ("drift", "objective", "memory", "sizes", "levels", "rate")
_DENIED_STATUSES = (401, 403, 429)
_Read = Callable[[], float]
_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


class EnergyReading(Protocol):
    """The last reading of an energy meter.

    Attributes:
        joules: the counter, J; None if there is no reading.
    """

    joules: float | None

    async def refresh(self) -> None:
        """Read the meter again."""
        ...


class Metrics:
    """The metrics of the server. Gauges of existing values are computed at each scrape, by callback.

    Attributes:
        statistics: the statistics of the Open Inference Protocol.
        history: the last ten minutes, for the dashboard.
    """

    def __init__(self) -> None:
        """Register all metrics, without samples."""
        self.statistics, self.history = Statistics(), History()
        self._readings: list[EnergyReading] = []
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"batchwright_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: list[float], *labels: str) -> Histogram:
            return Histogram(f"batchwright_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"batchwright_{name}", text, labels, registry=registry)

        served = ("model", "device")
        # `cache` on `labels`: the lookup of a child costs more than counting, and these two are used in every call
        self._outcome = cache(counter("requests", "Requests by outcome", "model", "outcome").labels)
        self._policies: dict[tuple[str, str], tuple[str, str]] = {}
        self._observers: dict[str, Callable[[str, float, int], None]] = {}
        self._batch_observers: dict[str, Callable[[BatchRecord], None]] = {}
        self._rejected = counter("rejected", "Requests rejected by admission control, by reason", "model", "reason")
        self._late = counter(
            "deadline_missed",
            "Requests not answered within the objective of their model, or failed; not those rejected",
            "model",
        )
        self._objectives: dict[str, float] = {}  # s, of the models that have one
        self._objective = gauge(
            "objective_seconds", "Objective: response time promised for a share of the requests, s", "model"
        )
        self._objective_share = gauge(
            "objective_share", "Objective: share of the requests within objective_seconds", "model"
        )
        self._batches = counter("batches", "Batches launched, by policy and reason", *served, "policy", "reason")
        self._cpu_time = counter("cpu_seconds", "User and system time of the device's process for batches, s", *served)
        self._energy = counter("energy_joules", "Energy of all batches by the profile, J", *served, "source")
        self._response = cache(
            histogram(
                "response_seconds", "Response time, first byte of a call to its response, s", _SECONDS, *served
            ).labels
        )
        self._level_response = histogram(
            "level_response_seconds",
            "Response time by priority level, of models with several, s",
            _SECONDS,
            "model",
            "level",
        )
        self._waiting = histogram("waiting_seconds", "Waiting time, arrival to launch, s", _SECONDS, *served)
        self._service = histogram(
            "service_seconds", "Service time of a batch, launch to completion, s", _SECONDS, *served
        )
        self._batch_size = histogram("batch_size", "Requests per batch", [*map(float, _SIZES)], *served)
        self._idle_gap = histogram(
            "idle_gap_seconds",
            "Idle time of the device between two batches with requests queued, s",
            _GAP_SECONDS,
            "device",
        )
        self._queue_length = gauge("queue_length", "Queued requests", "model")
        self._backlog = gauge(
            "backlog_seconds", "Time to serve all requests on a device, the least over serving devices, s"
        )
        self._device_up = gauge("device_up", "1 while the device works, 0 while it is unavailable or lost", "device")
        self._capacity = gauge(
            "capacity_hertz", "Largest service rate, max over b of b/l(b), summed over serving devices, 1/s", "model"
        )
        self._arrival_rate = gauge("arrival_rate_hertz", "Measured arrival rate, 1/s", "model")
        self._adapted = counter("policy_changes", "Policy swaps by the controller, by reason", "model", "reason")
        self._denied = counter(
            "refusals", "Calls rejected by API key, rate limit or browser protection, by status", "status"
        )
        self._faults = counter("device_faults", "Batches that failed on the device, by exception", "model", "error")
        self._restarts = counter("worker_restarts", "Processes of models started again", "device", "reason")
        self._objective_level = gauge("objective_level", "Steps towards faster policies to meet the objective", *served)
        self._objective_margin = gauge(
            "objective_margin_seconds",
            "Time by which the bound of maximum ages is reduced to meet the objective, s",
            *served,
        )
        self._predicted = gauge(
            "predicted_response_seconds",
            "Predicted response time from the queue to the end of the batch: mean, and p95, s",
            *served,
            "statistic",
        )
        self._predicted_size = gauge("predicted_batch_size", "Predicted mean batch size", *served)
        self._random_weights = gauge("random_weights", "1 if the model runs with random weights, else 0", "model")
        pipeline = ("pipeline", "step")
        self._pipeline_steps = histogram(
            "pipeline_step_seconds", "Response time of a request of a pipeline, s", _SECONDS, *pipeline
        )
        self._pipeline_calls = gauge("pipeline_open_calls", "Samples that a pipeline serves now", "pipeline")
        self._policy_info = gauge("policy_info", "1 for the policy in use", *served, "policy", "spec")

    def predicted(self, model: str, device: str, found: Prediction) -> None:
        """Set the predicted figures of a model on a device."""
        self._predicted.labels(model, device, "mean").set(found.mean)
        self._predicted.labels(model, device, "p95").set(found.p95)
        self._predicted_size.labels(model, device).set(found.batch_size)

    def watch(self, model: str, queue_length: _Read, arrival_rate: _Read, capacity: _Read) -> None:
        """Export gauges by callback: queue length, arrival rate and largest service rate, 1/s.

        The labelled counters of the model start at 0, since PromQL's rate() misses the first increment of a new series.
        """
        self._queue_length.labels(model).set_function(queue_length)
        self._arrival_rate.labels(model).set_function(arrival_rate)
        self._capacity.labels(model).set_function(capacity)
        self._start_counters(model)

    def watch_pipeline(self, name: str, open_calls: _Read) -> None:
        """Export the number of open calls of a pipeline by callback; its counters start at 0, as in `watch`."""
        self._pipeline_calls.labels(name).set_function(open_calls)
        self._start_counters(name)

    def pipeline_step(self, pipeline: str, step: str, seconds: float) -> None:
        """Observe the response time of a request of a pipeline, s; `step` is the model's name."""
        self._pipeline_steps.labels(pipeline, step).observe(seconds)

    def _start_counters(self, model: str) -> None:
        self._late.labels(model)
        for outcome in sorted({"ok", "cancelled", *(kind.outcome for kind in ServerError.kinds())}):
            self.outcome(model, outcome, 0)
        for reason in sorted({kind.reason for kind in RejectedError.kinds()} - {""}):
            self._rejected.labels(model, reason)
        for reason in _POLICY_CHANGES:
            self._adapted.labels(model, reason)
        for status in _DENIED_STATUSES:
            self._denied.labels(status)

    def weights(self, model: str, random: bool) -> None:
        """Export whether a model runs with random weights, so that its answers mean nothing."""
        self._random_weights.labels(model).set(random)

    def watch_backlog(self, backlog: _Read) -> None:
        """Export the backlog by callback, s."""
        self._backlog.set_function(backlog)

    def watch_device(self, device: str, alive: Callable[[], bool]) -> None:
        """Export by callback whether the device works."""
        self._device_up.labels(device).set_function(alive)

    def watch_meter(self, device: str, source: str, reading: EnergyReading) -> None:
        """Export the device's energy counter as of the last `read_meters`; `source` names the meter."""
        self._readings.append(reading)
        self._registry.register(_MeterCollector(device, source, reading))

    async def read_meters(self) -> None:
        """Read the energy counters, before a scrape; one that cannot be read keeps its value."""
        for reading in self._readings:
            await reading.refresh()

    def policy(self, model: str, device: str, policy: str, spec: str) -> None:
        """Export the policy that `model` now uses on a device."""
        served = model, device
        if served in self._policies:
            self._policy_info.remove(*served, *self._policies[served])
        self._policies[served] = policy, spec
        self._policy_info.labels(*served, policy, spec).set(1)

    def adapted(self, model: str, reason: str) -> None:
        """Count a policy swap by the controller; `reason` is one of `_POLICY_CHANGES`."""
        self._adapted.labels(model, reason).inc()

    def objective(self, model: str, seconds: float, share: float) -> None:
        """Export the objective of a model, by which late requests are counted from now on; inf removes it."""
        if seconds < inf:
            self._objectives[model] = seconds
            self._objective.labels(model).set(seconds)
            self._objective_share.labels(model).set(share)
        elif self._objectives.pop(model, None) is not None:
            self._objective.remove(model)
            self._objective_share.remove(model)

    def objective_level(self, model: str, device: str, level: int) -> None:
        """Export the number of steps towards faster policies on a device."""
        self._objective_level.labels(model, device).set(level)

    def objective_margin(self, model: str, device: str, seconds: float) -> None:
        """Export the time by which the bound of maximum ages is reduced on a device, s."""
        self._objective_margin.labels(model, device).set(seconds)

    def observe_responses(self, device: str, observer: Callable[[str, float, int], None]) -> None:
        """Call an observer for each call that a device has answered.

        Args:
            device: the device.
            observer: called with the model, the time from the end of the call's body to its answer, s, and the number
                of its requests.
        """
        self._observers[device] = observer

    def observe_batches(self, device: str, observer: Callable[[BatchRecord], None]) -> None:
        """Call an observer for each batch that a device has completed."""
        self._batch_observers[device] = observer

    def batch_completed(self, batch: BatchRecord) -> None:
        """Count a completed batch, or some stages of one; requests are counted with their last stage."""
        labels = batch.model, batch.device
        if batch.whole or batch.finished:
            self.statistics.batch_completed(
                batch.model, len(batch.finished), (batch.size, batch.service) if batch.whole else None
            )
            self._batch_size.labels(*labels).observe(batch.size)
        self.history.batch_completed(batch)
        self._batches.labels(*labels, batch.policy, batch.launch.reason).inc()
        self._service.labels(*labels).observe(batch.service)
        if batch.energy is not None:
            self._energy.labels(*labels, batch.energy_source).inc(batch.energy)
        if batch.cpu_time is not None:
            self._cpu_time.labels(*labels).inc(batch.cpu_time)
        if (observer := self._batch_observers.get(batch.device)) is not None:
            try:
                observer(batch)
            except Exception:  # noqa: BLE001  (a bug in it must not lose the rest of the accounting)
                _log.exception("batches of %s are not observed any more", batch.device)
                del self._batch_observers[batch.device]

    def requests_completed(self, device: str, requests: Sequence[Request]) -> None:
        """Observe the waiting times of completed requests of one model."""
        if not requests:
            return
        model = requests[0].kind.model
        waiting = self._waiting.labels(model, device)
        for request in requests:
            waiting.observe(request.started - request.arrival)

    def call_completed(
        self, model: str, device: str, seconds: float, n: int, since_body: float, level: int | None = None
    ) -> None:
        """Observe the response time of a call, once per request.

        Args:
            model: the model.
            device: the device that answered.
            seconds: time from the first byte of the call to its answer, s.
            n: number of requests of the call.
            since_body: time from the end of its body to the answer, s.
            level: its priority level; None where the model has one. The objective is that of level 1.
        """
        if level is not None:
            for _ in range(n):
                self._level_response.labels(model, level).observe(seconds)
        response = self._response(model, device)
        for _ in range(n):
            response.observe(seconds)
        self.history.requests_completed(model, [seconds] * n)
        if level in (None, 1) and (observer := self._observers.get(device)) is not None:
            observer(model, since_body, n)

    def outcome(self, model: str, outcome: str, n: int = 1, seconds: float = 0.0, level: int = 1) -> None:
        """Count `n` requests by outcome, and those that missed the objective of their model.

        Args:
            model: the model's name.
            outcome: ok, bad_input, rejected, expired, cancelled or failed. A failed request misses the objective at any
                time, a rejected one or one of bad input never.
            n: number of requests.
            seconds: time from the end of the request body to the end of the request, s.
            level: their priority level; the objective is that of level 1.
        """
        self._outcome(model, outcome).inc(n)
        objective = self._objectives.get(model) if level == 1 else None
        if objective is not None and (outcome == "failed" or (seconds > objective and outcome in _TIMED)):
            self._late.labels(model).inc(n)

    def rejected(self, model: str, reason: str, n: int) -> None:
        """Count `n` requests that admission control rejected."""
        self._rejected.labels(model, reason).inc(n)

    def access_denied(self, status: int) -> None:
        """Count a call rejected by its API key, its rate limit or the browser protections."""
        self._denied.labels(status).inc()

    def device_fault(self, model: str, error: str) -> None:
        """Count a batch that failed on the device; `error` is the exception's type."""
        self._faults.labels(model, error).inc()

    def restarted(self, device: str, reason: str) -> None:
        """Count a process of a model that is started again because it `died` or `hung`."""
        self._restarts.labels(device, reason).inc()

    def idle_gap(self, device: str, seconds: float) -> None:
        """Observe the idle time of a device between two batches while requests waited and the policy launched, s."""
        self._idle_gap.labels(device).observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _MeterCollector(Collector):
    """Exports an energy meter's counter; no sample while there is no reading."""

    def __init__(self, device: str, source: str, reading: EnergyReading) -> None:
        self._labels = [device, source]
        self._reading = reading

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(
            "batchwright_device_energy_joules", "Energy by the device's own counter, J", labels=["device", "source"]
        )
        if self._reading.joules is not None:
            family.add_metric(self._labels, self._reading.joules)
        yield family
