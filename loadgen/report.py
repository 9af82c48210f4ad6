"""Report of a live or simulated run. Pure functions without clock or I/O."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from policies.queue.simulator import Run, Service, Station

Status = int | Literal["connection", "timeout", "interrupted"]
OK = 200


@dataclass(frozen=True, slots=True)
class Record:
    """Record of one request at the client. Instants are s after the start of the run; None if the response lacks it.

    Attributes:
        scheduled: instant at which it was scheduled.
        sent: instant at which it was sent.
        finished: instant at which the response was complete, or the request failed.
        status: HTTP status, or why there was no response.
        batch_size: size of its batch.
        waiting: waiting time measured by the server, arrival to launch, s.
        service: service time measured by the server, launch to completion, s.
        energy: its share of the batch's energy, J.
        cpu_time: its share of the batch's CPU time, s.
        level: its priority level; None where none was sent.
    """

    scheduled: float
    sent: float
    finished: float
    status: Status
    batch_size: int | None = None
    waiting: float | None = None
    service: float | None = None
    energy: float | None = None
    cpu_time: float | None = None
    level: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line of the --output file; unknown values are null, response_ms is finished minus scheduled."""
        return {
            "scheduled_s": self.scheduled,
            "sent_s": self.sent,
            "finished_s": self.finished,
            "status": self.status,
            "response_ms": (self.finished - self.scheduled) * 1e3,
            "batch_size": self.batch_size,
            "waiting_ms": _scaled(self.waiting),
            "service_ms": _scaled(self.service),
            "energy_mj": _scaled(self.energy),
            "cpu_ms": _scaled(self.cpu_time),
            **({} if self.level is None else {"level": self.level}),
        }


@dataclass(frozen=True, slots=True)
class RunObjective:
    """Criteria of a run: a response time objective, and the papers' weighted cost.

    Attributes:
        slo: response time objective, s; inf for none.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
    """

    slo: float = inf
    w1: float = 1.0
    w2: float = 0.0

    def cost(self, mean_ms: float | None, power: float | None) -> float | None:
        """w1 x mean response time (ms) + w2 x mean power (W); None if a term with a positive weight is unknown."""
        if mean_ms is None or (power is None and self.w2 > 0):
            return None
        return self.w1 * mean_ms + self.w2 * (power or 0.0)


_NO_OBJECTIVE = RunObjective()


class LevelReport(TypedDict):
    """Response times of the answered requests of one priority level, and the share of them within the SLO."""

    level: int
    ok: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    slo_attainment: float | None


class Report(TypedDict):
    """The object that --json prints; unknown values are null."""

    scheduled: int
    ok: int
    errors: dict[str, int]
    arrival_rate_hz: float | None
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    throughput_hz: float | None
    mean_batch_size: float | None
    energy_per_request_mj: float | None
    cpu_per_request_ms: NotRequired[float]
    mean_power_w: float | None
    slo_attainment: float | None
    send_lag_p99_ms: float | None
    slo_violations: int | None
    cost: float | None
    levels: NotRequired[list[LevelReport]]


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run in SI units, from which the report is made.

    Attributes:
        scheduled: number of scheduled requests.
        responses: response time of each answered request, from its scheduled arrival, s.
        errors: number of requests that were not answered, by status.
        elapsed: time from the first arrival to the last response, s; 0 without a response.
        mean_batch_size: mean over batches; None if unknown.
        energy: energy of all answered requests, J; None if unknown.
        cpu_time: mean CPU time of a request at its device, s, over those of which it is known; None if of none.
        send_lags: instant sent minus instant scheduled, s; None in a simulation.
        levels: by priority level, the response times, s; empty where none was sent.
    """

    scheduled: int
    responses: NDArray[np.float64]
    errors: Mapping[str, int]
    elapsed: float
    mean_batch_size: float | None
    energy: float | None
    cpu_time: float | None = None
    send_lags: NDArray[np.float64] | None = None
    levels: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)


def simulated_records(services: Iterable[tuple[Station, Service]]) -> Iterator[Record]:
    """Make a record of each request of a simulated run, in order of completion, from the services of its devices."""
    energies: dict[int, float] = {}  # J by request, up to its current stage
    for station, service in services:
        size, energy = len(service.launch.requests), station.energy(service)
        for request in service.launch.requests if energy is not None else ():
            energies[request.id] = energies.get(request.id, 0.0) + (energy or 0.0) / size
        for request in service.finished:
            yield Record(
                scheduled=request.arrival,
                sent=request.arrival,
                finished=service.finish,
                status=OK,
                batch_size=size,
                waiting=request.started - request.arrival,
                service=service.finish - request.started,
                energy=energies.pop(request.id, None),
                level=None if station.batcher.level_shares(request.kind.model) is None else request.level,
            )


def outcome_from_records(records: Sequence[Record]) -> RunOutcome:
    """Make the outcome of a live run.

    A batch of b appears in b responses, so batches are counted by summing 1 / b over the responses.
    """
    answered = [r for r in records if r.status == OK]
    sizes = [r.batch_size for r in answered if r.batch_size]
    energies = [r.energy for r in answered if r.energy is not None]
    cpu_times = [r.cpu_time for r in answered if r.cpu_time is not None]
    first = min((r.scheduled for r in records), default=0.0)
    return RunOutcome(
        scheduled=len(records),
        responses=np.array([r.finished - r.scheduled for r in answered]),
        errors=Counter(str(r.status) for r in records if r.status != OK),
        elapsed=max((r.finished for r in answered), default=first) - first,
        mean_batch_size=len(sizes) / sum(1 / b for b in sizes) if sizes and len(sizes) == len(answered) else None,
        energy=sum(energies) if energies and len(energies) == len(answered) else None,
        cpu_time=sum(cpu_times) / len(cpu_times) if cpu_times else None,
        send_lags=np.array([r.sent - r.scheduled for r in records]),
        levels={
            level: np.array([r.finished - r.scheduled for r in answered if r.level == level])
            for level in sorted({r.level for r in answered if r.level is not None})
        },
    )


def outcome_from_run(run: Run, by_level: bool = False) -> RunOutcome:
    """Make the outcome of a simulated run, also by priority level where its requests have several."""
    levels = run.levels if by_level else None
    return RunOutcome(
        scheduled=run.scheduled,
        responses=run.responses,
        errors={},
        elapsed=run.elapsed,
        mean_batch_size=float(run.batch_sizes.mean()) if len(run.batch_sizes) else None,
        energy=None if run.energies is None else float(run.energies.sum()),
        levels={} if levels is None else {int(each): run.responses[levels == each] for each in np.unique(levels)},
    )


def make_report(outcome: RunOutcome, duration: float, objective: RunObjective = _NO_OBJECTIVE) -> Report:
    """Make the report of a run.

    Args:
        outcome: outcome of the run.
        duration: scheduled time of arrivals, s.
        objective: SLO and weights of the cost.
    """
    ok, ms = len(outcome.responses), outcome.responses * 1e3
    mean_ms, energy = float(ms.mean()) if ok else None, outcome.energy
    power = None if energy is None else _ratio(energy, outcome.elapsed)
    within_slo = None if objective.slo == inf else int((outcome.responses <= objective.slo).sum())
    report: Report = {
        "scheduled": outcome.scheduled,
        "ok": ok,
        "errors": dict(sorted(outcome.errors.items())),
        "arrival_rate_hz": _ratio(outcome.scheduled, duration),
        "mean_ms": mean_ms,
        "p50_ms": _percentile(ms, 50),
        "p90_ms": _percentile(ms, 90),
        "p95_ms": _percentile(ms, 95),
        "p99_ms": _percentile(ms, 99),
        "max_ms": _percentile(ms, 100),
        "throughput_hz": _ratio(ok, outcome.elapsed),
        "mean_batch_size": outcome.mean_batch_size,
        "energy_per_request_mj": None if energy is None else _ratio(energy * 1e3, ok),
        "mean_power_w": power,
        "slo_attainment": None if within_slo is None else _ratio(within_slo, outcome.scheduled),
        "send_lag_p99_ms": None if outcome.send_lags is None else _percentile(outcome.send_lags * 1e3, 99),
        "slo_violations": None if within_slo is None else outcome.scheduled - within_slo,
        "cost": objective.cost(mean_ms, power),
    }
    if outcome.cpu_time is not None:
        report["cpu_per_request_ms"] = 1e3 * outcome.cpu_time
    if outcome.levels:
        report["levels"] = [_of_level(level, found, objective.slo) for level, found in outcome.levels.items()]
    return report


def _of_level(level: int, responses: NDArray[np.float64], slo: float) -> LevelReport:
    p50, p95, p99 = np.percentile(1e3 * responses, (50, 95, 99)).tolist()
    return {
        "level": level,
        "ok": len(responses),
        "mean_ms": 1e3 * float(responses.mean()),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "slo_attainment": None if slo == inf else float((responses <= slo).mean()),
    }


def _ratio(dividend: float, divisor: float) -> float | None:
    quotient = dividend / divisor if divisor > 0 else inf
    return quotient if isfinite(quotient) else None


def _percentile(values: NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _scaled(value: float | None) -> float | None:
    return None if value is None else value * 1e3
