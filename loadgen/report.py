"""From what was recorded, live or simulated, to one report of the run. Pure: no clock, no I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from policies.queue.simulator import Run

Status = int | Literal["connection", "timeout", "interrupted"]
OK = 200


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the client saw it. Instants are s after the start of the run; None: the answer does not say.

    Attributes:
        scheduled: when it was to be sent.
        sent: when it was sent.
        finished: when the whole answer was there, or when there was none to wait for any more.
        status: the HTTP code, or why there was no answer.
        batch_size: of the batch that served it.
        waiting: arrival to launch as the server saw it, s.
        service: launch to completion, s.
        energy: its share of the batch's, J.
    """

    scheduled: float
    sent: float
    finished: float
    status: Status
    batch_size: int | None = None
    waiting: float | None = None
    service: float | None = None
    energy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the output file: instants in s, spans in ms, energy in mJ."""
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
        }


class Report(TypedDict):
    """What --json prints; null where a value is unknown or nothing was answered."""

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
    mean_power_w: float | None
    slo_attainment: float | None
    send_lag_p99_ms: float | None


@dataclass(frozen=True)
class Outcome:
    """What a report is made of, in SI units.

    Attributes:
        scheduled: number of requests.
        responses: response time of each request that was answered, from its scheduled arrival, s.
        errors: how many were not answered, by status.
        elapsed: first arrival to last answer, s; 0 if there is none.
        mean_batch_size: over batches.
        energy: of all answered requests, J.
        send_lags: sent minus scheduled, s; None where nothing was sent.
    """

    scheduled: int
    responses: NDArray[np.float64]
    errors: Mapping[str, int]
    elapsed: float
    mean_batch_size: float | None
    energy: float | None
    send_lags: NDArray[np.float64] | None = None


def from_records(records: Sequence[Record]) -> Outcome:
    """What a live run came to.

    A batch of b appears in b answers, so that batches are counted by summing 1 / b over the answers.
    """
    answered = [r for r in records if r.status == OK]
    sizes = [r.batch_size for r in answered if r.batch_size]
    energies = [r.energy for r in answered if r.energy is not None]
    first = min((r.scheduled for r in records), default=0.0)
    return Outcome(
        scheduled=len(records),
        responses=np.array([r.finished - r.scheduled for r in answered]),
        errors=Counter(str(r.status) for r in records if r.status != OK),
        elapsed=max((r.finished for r in answered), default=first) - first,
        mean_batch_size=len(sizes) / sum(1 / b for b in sizes) if sizes and len(sizes) == len(answered) else None,
        energy=sum(energies) if energies and len(energies) == len(answered) else None,
        send_lags=np.array([r.sent - r.scheduled for r in records]),
    )


def from_run(run: Run) -> Outcome:
    """What a simulated run came to."""
    return Outcome(
        scheduled=run.scheduled,
        responses=run.responses,
        errors={},
        elapsed=run.elapsed,
        mean_batch_size=float(run.batch_sizes.mean()) if len(run.batch_sizes) else None,
        energy=None if run.energies is None else float(run.energies.sum()),
    )


def report(outcome: Outcome, duration: float, slo: float = inf) -> Report:
    """The report of a run.

    Args:
        outcome: what the run came to.
        duration: the time for which arrivals were asked, s.
        slo: promised response time, s; inf where there is none.
    """
    ok, ms = len(outcome.responses), outcome.responses * 1e3
    energy = outcome.energy
    return {
        "scheduled": outcome.scheduled,
        "ok": ok,
        "errors": dict(sorted(outcome.errors.items())),
        "arrival_rate_hz": _ratio(outcome.scheduled, duration),
        "mean_ms": float(ms.mean()) if ok else None,
        "p50_ms": _percentile(ms, 50),
        "p90_ms": _percentile(ms, 90),
        "p95_ms": _percentile(ms, 95),
        "p99_ms": _percentile(ms, 99),
        "max_ms": _percentile(ms, 100),
        "throughput_hz": _ratio(ok, outcome.elapsed),
        "mean_batch_size": outcome.mean_batch_size,
        "energy_per_request_mj": None if energy is None else _ratio(energy * 1e3, ok),
        "mean_power_w": None if energy is None else _ratio(energy, outcome.elapsed),
        "slo_attainment": None if slo == inf else _ratio(int((outcome.responses <= slo).sum()), outcome.scheduled),
        "send_lag_p99_ms": None if outcome.send_lags is None else _percentile(outcome.send_lags * 1e3, 99),
    }


def _ratio(dividend: float, divisor: float) -> float | None:
    quotient = dividend / divisor if divisor > 0 else inf
    return quotient if isfinite(quotient) else None


def _percentile(values: NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _scaled(value: float | None) -> float | None:
    return None if value is None else value * 1e3


_ROWS: Mapping[str, tuple[str, str]] = {  # words and unit of each value, in the order of the table
    "arrival_rate_hz": ("arrival rate", "1/s"),
    "throughput_hz": ("throughput", "1/s"),
    "mean_ms": ("response time, mean", "ms"),
    "p50_ms": ("median", "ms"),
    "p90_ms": ("90 % within", "ms"),
    "p95_ms": ("95 % within", "ms"),
    "p99_ms": ("99 % within", "ms"),
    "max_ms": ("longest", "ms"),
    "mean_batch_size": ("mean batch size", ""),
    "energy_per_request_mj": ("energy per request", "mJ"),
    "mean_power_w": ("mean power", "W"),
    "slo_attainment": ("answered within the SLO", ""),
    "send_lag_p99_ms": ("sent late, 99 % within", "ms"),
}
_COLUMNS: Mapping[str, str] = {
    "mean_ms": "mean ms",
    "p50_ms": "median",
    "p95_ms": "95 %",
    "p99_ms": "99 %",
    "mean_batch_size": "batch",
    "energy_per_request_mj": "mJ each",
    "mean_power_w": "W",
    "slo_attainment": "in SLO",
}


def table(content: Report) -> Table:
    """The report of one run, for people; what is unknown is left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    grid.add_row("requests", str(content["scheduled"]), "")
    grid.add_row("answered", str(content["ok"]), "")
    for status, count in content["errors"].items():
        grid.add_row(f"not answered: {status}", str(count), "")
    values: Mapping[str, Any] = {**content}
    for key, (words, unit) in _ROWS.items():
        if values[key] is not None:
            grid.add_row(words, _text(values[key]), unit)
    return grid


def comparison(rows: Mapping[str, Report]) -> Table:
    """One row a policy, by its spec, for people: the same arrivals under each."""
    grid = Table(box=None, pad_edge=False)  # 80 columns have to do
    grid.add_column("policy", overflow="fold")
    for words in _COLUMNS.values():
        grid.add_column(words, justify="right", no_wrap=True)
    for spec, content in rows.items():
        values: Mapping[str, Any] = {**content}
        grid.add_row(spec, *(_text(values[key]) for key in _COLUMNS))
    return grid


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
