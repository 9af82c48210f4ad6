"""Prometheus instruments, in base units, on a registry of their own."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from policies.types import Request
from server.telemetry.batch_record import BatchRecord
from server.telemetry.history import History
from server.telemetry.statistics import Statistics

_SECONDS = [0.0005 * 2**k for k in range(15)]  # 0.5 ms to 8 s
_GAP_SECONDS = [unit * step for unit in (1e-5, 1e-4, 1e-3, 1e-2) for step in (1, 1.5, 2, 3, 5, 7)]  # 10 us to 70 ms
_OUTCOMES = ("ok", "bad_input", "rejected", "expired", "cancelled", "failed")
_REFUSALS = ("queue_full", "too_late", "bytes", "draining")
_CHANGES = ("drift", "objective", "memory")
_REFUSED = (401, 403, 429)  # statuses
_Read = Callable[[], float]
_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


class EnergyReading(Protocol):
    """The last reading of an energy meter.

    Attributes:
        joules: of the meter, J; None where nothing is known.
    """

    joules: float | None

    async def refresh(self) -> None:
        """Read the meter again."""
        ...


class Metrics:
    """What the server counts. Cheap to call; values that exist anyway are read when somebody scrapes.

    Attributes:
        statistics: the same in the Open Inference Protocol's form.
        history: of the last minutes, for the page.
    """

    def __init__(self) -> None:
        """Nothing has happened."""
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
        # kept by `cache`: finding a child costs more than counting, and these two are once a call
        self._outcome = cache(counter("requests", "Requests by what came of them", "model", "outcome").labels)
        self._policies: dict[tuple[str, str], tuple[str, str]] = {}
        self._rejected = counter("rejected", "Requests that were not admitted, by reason", "model", "reason")
        self._missed = counter("deadline_missed", "Requests answered after their deadline", "model")
        self._batches = counter("batches", "Batches launched, by policy and reason", *served, "policy", "reason")
        self._tokens, self._generated = (
            counter("tokens", "Tokens that the device computed, by use: needed, or padding", "model", "use"),
            histogram("generated_tokens", "Tokens that a text's answer has", [*map(float, _SIZES)], "model"),
        )
        self._energy = counter("energy_joules", "Energy of all batches, by the profile", *served, "source")
        self._response = cache(
            histogram("response_seconds", "First byte of a call to its answer", _SECONDS, *served).labels
        )
        self._waiting = histogram("waiting_seconds", "Arrival to launch", _SECONDS, *served)
        self._service = histogram("service_seconds", "Launch to completion of a batch", _SECONDS, *served)
        self._batch_size = histogram("batch_size", "Requests served together", [*map(float, _SIZES)], *served)
        self._idle_gap = histogram(
            "idle_gap_seconds", "Device idle between two batches while requests waited", _GAP_SECONDS, "device"
        )
        self._queue_length = gauge("queue_length", "Requests waiting", "model")
        self._backlog = gauge("backlog_seconds", "Least time in which one of the devices serves all who are on it")
        self._device_up = gauge("device_up", "1 while the device serves, 0 once it is lost", "device")
        self._capacity = gauge(
            "capacity_hertz", "Largest service rate, max over b of b/l(b), of all that serve", "model"
        )
        self._arrival_rate = gauge("arrival_rate_hertz", "Measured arrival rate", "model")
        self._adapted = counter("policy_changes", "Policies swapped by the server itself, by reason", "model", "reason")
        self._refusals = counter("refusals", "Calls refused before a model was asked, by status", "status")
        self._faults = counter("device_faults", "Batches that the device failed on, by exception", "model", "error")
        self._objective = gauge("objective_level", "Steps taken towards faster policies for the objective", *served)
        self._policy_info = gauge("policy_info", "1 for the policy that decides", *served, "policy", "spec")

    def watch(self, model: str, queue_length: _Read, arrival_rate: _Read, capacity: _Read) -> None:
        """Read these when somebody scrapes: number waiting, arrival rate and largest service rate, 1/s.

        What is counted by kind begins at 0: a rate cannot see the first of a kind otherwise.
        """
        self._queue_length.labels(model).set_function(queue_length)
        self._arrival_rate.labels(model).set_function(arrival_rate)
        self._capacity.labels(model).set_function(capacity)
        for outcome in _OUTCOMES:
            self.outcome(model, outcome, 0)
        for counter, reasons in ((self._rejected, _REFUSALS), (self._adapted, _CHANGES)):
            for reason in reasons:
                counter.labels(model, reason)
        for status in _REFUSED:
            self._refusals.labels(status)

    def watch_backlog(self, backlog: _Read) -> None:
        """Read this when somebody scrapes, s."""
        self._backlog.set_function(backlog)

    def watch_device(self, device: str, alive: Callable[[], bool]) -> None:
        """Ask whether the device can serve yet when somebody scrapes."""
        self._device_up.labels(device).set_function(alive)

    def watch_meter(self, device: str, source: str, reading: EnergyReading) -> None:
        """Export the device's energy counter as of the last `read_meters`; `source` is the meter's."""
        self._readings.append(reading)
        self._registry.register(_MeterCollector(device, source, reading))

    async def read_meters(self) -> None:
        """Read the energy counters, before somebody scrapes; one that does not answer keeps its value."""
        for reading in self._readings:
            await reading.refresh()

    def policy(self, model: str, device: str, policy: str, spec: str) -> None:
        """Another policy decides for `model` on a device."""
        place = model, device
        if place in self._policies:
            self._policy_info.remove(*place, *self._policies[place])
        self._policies[place] = policy, spec
        self._policy_info.labels(*place, policy, spec).set(1)

    def adapted(self, model: str, reason: str) -> None:
        """The controller set another policy: drift or objective."""
        self._adapted.labels(model, reason).inc()

    def objective(self, model: str, device: str, level: int) -> None:
        """How many steps the objective has moved towards faster on a device."""
        self._objective.labels(model, device).set(level)

    def batch(self, batch: BatchRecord) -> None:
        """Count a completed batch, or some stages of one; a request is counted with its last stage."""
        labels = batch.model, batch.device
        if batch.whole or batch.finished:
            self.statistics.batch(
                batch.model, len(batch.finished), (batch.size, batch.service) if batch.whole else None
            )
            self._batch_size.labels(*labels).observe(batch.size)
        needed, computed = batch.tokens
        if computed:
            self._tokens.labels(batch.model, "needed").inc(needed)
            self._tokens.labels(batch.model, "padding").inc(computed - needed)
        for length in batch.generated:
            self._generated.labels(batch.model).observe(length)
        self.history.batch(batch)
        self._batches.labels(*labels, batch.policy, batch.launch.reason).inc()
        self._service.labels(*labels).observe(batch.service)
        if batch.energy is not None:
            self._energy.labels(*labels, batch.energy_source).inc(batch.energy)

    def answered(self, device: str, requests: Sequence[Request], now: float) -> None:
        """Requests of one model are served; `now` is the instant of their answers, s."""
        if not requests:
            return
        model = requests[0].kind.model
        waiting = self._waiting.labels(model, device)
        for request in requests:
            waiting.observe(request.started - request.arrival)
        late = sum(now > request.deadline for request in requests)
        if late:
            self._missed.labels(model).inc(late)

    def responded(self, model: str, device: str, seconds: float, n: int) -> None:
        """A call of `n` requests was answered: so long after its first byte had come."""
        response = self._response(model, device)
        for _ in range(n):
            response.observe(seconds)
        self.history.answered(model, [seconds] * n)

    def outcome(self, model: str, outcome: str, n: int = 1) -> None:
        """What came of `n` requests: ok, bad_input, rejected, expired, cancelled or failed."""
        self._outcome(model, outcome).inc(n)

    def rejected(self, model: str, reason: str, n: int) -> None:
        """`n` requests were not admitted."""
        self._rejected.labels(model, reason).inc(n)

    def refused(self, status: int) -> None:
        """A call was answered with this status before a model was asked: its key, its page or its rate was wrong."""
        self._refusals.labels(status).inc()

    def device_fault(self, model: str, error: str) -> None:
        """The device raised on a batch; `error` is the exception's type."""
        self._faults.labels(model, error).inc()

    def idle_gap(self, device: str, seconds: float) -> None:
        """The device stood idle between two batches although requests waited and the policy launched."""
        self._idle_gap.labels(device).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _MeterCollector(Collector):
    """A sensor's counter under its own name, absent where there is no sensor."""

    def __init__(self, device: str, source: str, reading: EnergyReading) -> None:
        self._labels = [device, source]
        self._reading = reading

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(
            "batchwright_device_energy_joules", "Energy by the device's own counter", labels=["device", "source"]
        )
        if self._reading.joules is not None:
            family.add_metric(self._labels, self._reading.joules)
        yield family
