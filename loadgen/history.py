"""History of a live or simulated run, and the time series of its charts. Pure functions without clock or I/O."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from loadgen.report import OK, Record, Report
from policies.queue.simulator import Run

_MAX_WINDOWS = 60
_MIN_PER_WINDOW = 30  # requests per window on average, so that percentiles are meaningful
_MAX_POINTS = 2000  # single requests shown in a chart
_SHARES = np.concatenate([np.linspace(0.0, 0.98, 197), np.linspace(0.98, 1.0, 81)[1:]])
Values = NDArray[np.float64]


@dataclass(frozen=True)
class RunHistory:
    """History of a run; instants are in s after its start.

    Attributes:
        offered: scheduled arrival of each request.
        arrivals: scheduled arrival of each answered request.
        responses: response time of each answered request, s.
        batches: number of batches by size; None if unknown.
        finishes: instants at which energy is counted: completions of batches, or responses.
        energies: energy at each of these instants, J; None if unknown.
    """

    offered: Values
    arrivals: Values
    responses: Values
    batches: Mapping[int, float] | None
    finishes: Values
    energies: Values | None

    @property
    def end(self) -> float:
        """Instant of the last response or arrival, s."""
        instants = (self.offered, self.arrivals + self.responses)
        return max((float(values.max()) for values in instants if len(values)), default=0.0)


class StepFigures(TypedDict):
    """Figures of the requests that arrived in one step of the arrival rate; unknown values are null."""

    start_s: float
    end_s: float
    scheduled: int
    ok: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    energy_per_request_mj: float | None
    mean_power_w: float | None


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        policy: the policy's spec; "" for the server's own.
        report: the report.
        history: the history.
        first_error: the server's own text in the first response whose status is not 200; "" if unknown.
        end: instant of the last response, s, if the run was interrupted or a process died; inf if it is complete.
    """

    policy: str
    report: Report
    history: RunHistory
    first_error: str = ""
    end: float = inf


def history_from_records(records: Sequence[Record]) -> RunHistory:
    """Make the history of a live run.

    A batch of b appears in b responses, so each response counts as 1 / b of a batch with its share of the energy.
    """
    answered = [r for r in records if r.status == OK]
    batches: dict[int, float] = defaultdict(float)
    for size in filter(None, (r.batch_size for r in answered)):
        batches[size] += 1 / size
    energies = [r.energy for r in answered if r.energy is not None]
    sizes_known = len(answered) > 0 and all(r.batch_size for r in answered)
    return RunHistory(
        offered=np.array([r.scheduled for r in records]),
        arrivals=np.array([r.scheduled for r in answered]),
        responses=np.array([r.finished - r.scheduled for r in answered]),
        batches=dict(sorted(batches.items())) if sizes_known else None,
        finishes=np.array([r.finished for r in answered]),
        energies=np.array(energies) if energies and len(energies) == len(answered) else None,
    )


def history_from_run(run: Run, offered: Values) -> RunHistory:
    """Make the history of a simulated run with arrivals at the instants `offered`, s."""
    sizes, counts = np.unique(run.batch_sizes, return_counts=True)
    return RunHistory(
        offered=offered,
        arrivals=run.arrivals,
        responses=run.responses,
        batches=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
        finishes=run.finishes,
        energies=run.energies,
    )


def windows(histories: Sequence[RunHistory]) -> Values:
    """Edges of windows of equal length, s, common to all runs, with enough requests per window for percentiles."""
    fewest = min((len(h.responses) for h in histories if len(h.responses)), default=0)
    end = max((h.end for h in histories), default=0.0)
    return np.linspace(0.0, end or 1.0, min(_MAX_WINDOWS, max(1, fewest // _MIN_PER_WINDOW)) + 1)


def centres(edges: Values) -> Values:
    """Middle of each window, s."""
    middles: Values = (edges[1:] + edges[:-1]) / 2
    return middles


def percentiles(history: RunHistory, edges: Values, shares: Sequence[float]) -> list[Values]:
    """Percentiles of the response times of each window's arrivals, s: a row per share (0 to 1), nan without arrivals.

    Args:
        history: history of a run.
        edges: edges of the windows, s.
        shares: shares of the percentiles, such as 0.95.
    """
    order = np.argsort(history.arrivals, kind="stable")
    cuts = np.searchsorted(history.arrivals[order], edges[1:-1])
    parts = np.split(history.responses[order], cuts)
    return [np.array([np.quantile(part, share) if len(part) else np.nan for part in parts]) for share in shares]


def step_figures(history: RunHistory, edges: Sequence[float], end: float = inf) -> list[StepFigures]:
    """Figures of each step of the arrival rate.

    Response times are those of the step's arrivals. Energy and power are those of the batches that end in the step, and
    the energy is divided by the number of requests answered in it.

    Args:
        history: history of a run.
        edges: edges of at least one step, s.
        end: instant at which the run ended, s; a step that begins later is left out, and one that ends later is cut.
    """
    begun = [start for start in edges[:-1] if start < end]
    if not begun:
        return []
    edges = (*begun, min(end, edges[len(begun)]))
    scheduled = np.histogram(history.offered, edges)[0]
    answered = np.histogram(history.arrivals, edges)[0]
    times = np.array(edges)
    watts = power(history, times)
    if watts is None:
        watts = np.full(len(scheduled), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # no request answered in a step
        joules = watts / rate(history.arrivals + history.responses, times)
    p50, p95, p99, millijoules = (
        [float(1e3 * value) if isfinite(value) else None for value in row]
        for row in (*percentiles(history, times, (0.5, 0.95, 0.99)), joules)
    )
    return [
        {
            "start_s": start,
            "end_s": end,
            "scheduled": int(scheduled[step]),
            "ok": int(answered[step]),
            "p50_ms": p50[step],
            "p95_ms": p95[step],
            "p99_ms": p99[step],
            "energy_per_request_mj": millijoules[step],
            "mean_power_w": float(watts[step]) if isfinite(watts[step]) else None,
        }
        for step, (start, end) in enumerate(pairwise(edges))
    ]


def power(history: RunHistory, edges: Values) -> Values | None:
    """Mean power in each window, W; None if the energies are unknown."""
    if history.energies is None:
        return None
    joules = np.histogram(history.finishes, edges, weights=history.energies)[0]
    watts: Values = joules / np.diff(edges)
    return watts


def rate(instants: Values, edges: Values) -> Values:
    """Rate of the instants in each window, 1/s."""
    per_second: Values = np.histogram(instants, edges)[0] / np.diff(edges)
    return per_second


def response_distribution(history: RunHistory) -> tuple[Values, Values]:
    """Empirical distribution: response times, s, and the shares of requests within them, finer in the tail."""
    if not len(history.responses):
        return np.empty(0), np.empty(0)
    return np.quantile(history.responses, _SHARES, method="inverted_cdf"), _SHARES


def points(history: RunHistory) -> tuple[Values, Values]:
    """Arrival and response time, s, of an evenly spaced subset of the requests."""
    step = -(-len(history.responses) // _MAX_POINTS) or 1
    order = np.argsort(history.arrivals, kind="stable")[::step]
    return history.arrivals[order], history.responses[order]


def batch_shares(history: RunHistory) -> tuple[Values, Values]:
    """Batch sizes from 1 to the largest and the share of batches of each size; empty if unknown."""
    counts = history.batches or {}
    sizes = np.arange(1, max(counts, default=0) + 1)
    shares = np.array([counts.get(size, 0.0) for size in sizes.tolist()]) / (sum(counts.values()) or 1.0)
    return sizes.astype(np.float64), shares
