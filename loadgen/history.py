"""What a run did over time, live or simulated, and the series that pictures show of it. Pure: no clock, no I/O."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.report import OK, Record, Report
from policies.queue.simulator import Run

_WINDOWS = 60  # at most: more cannot be told apart
_PER_WINDOW = 30  # requests, on average: fewer have no percentiles
_POINTS = 2000  # single requests that a picture shows
_SHARES = np.concatenate([np.linspace(0.0, 0.98, 197), np.linspace(0.98, 1.0, 81)[1:]])
Values = NDArray[np.float64]


@dataclass(frozen=True)
class RunHistory:
    """What a run did over time; instants are s after its start.

    Attributes:
        offered: when each request was to arrive.
        arrivals: of each request that was answered.
        responses: its response time, s.
        batches: number of batches by their size; None where the answers do not tell.
        finishes: when energy was booked: ends of batches, or answers.
        energies: how much each time, J; None where unknown.
    """

    offered: Values
    arrivals: Values
    responses: Values
    batches: Mapping[int, float] | None
    finishes: Values
    energies: Values | None

    @property
    def end(self) -> float:
        """The last answer or arrival, s."""
        instants = (self.offered, self.arrivals + self.responses)
        return max((float(values.max()) for values in instants if len(values)), default=0.0)


@dataclass(frozen=True)
class RunResult:
    """A run as it is shown: under which policy ("": the server's own), its figures, and how it went."""

    policy: str
    report: Report
    history: RunHistory


def history_from_records(records: Sequence[Record]) -> RunHistory:
    """How a live run went.

    A batch of b appears in b answers, so that each answer counts as 1 / b of a batch and brings its share of energy.
    """
    answered = [r for r in records if r.status == OK]
    batches: dict[int, float] = defaultdict(float)
    for size in filter(None, (r.batch_size for r in answered)):
        batches[size] += 1 / size
    energies = [r.energy for r in answered if r.energy is not None]
    told = len(answered) > 0 and all(r.batch_size for r in answered)
    return RunHistory(
        offered=np.array([r.scheduled for r in records]),
        arrivals=np.array([r.scheduled for r in answered]),
        responses=np.array([r.finished - r.scheduled for r in answered]),
        batches=dict(sorted(batches.items())) if told else None,
        finishes=np.array([r.finished for r in answered]),
        energies=np.array(energies) if energies and len(energies) == len(answered) else None,
    )


def history_from_run(run: Run, offered: Values) -> RunHistory:
    """How a simulated run went, whose requests arrived at the instants `offered`, s."""
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
    """Edges of windows of equal length, s, the same for all runs, with enough requests in each for percentiles."""
    fewest = min((len(h.responses) for h in histories if len(h.responses)), default=0)
    end = max((h.end for h in histories), default=0.0)
    return np.linspace(0.0, end or 1.0, min(_WINDOWS, max(1, fewest // _PER_WINDOW)) + 1)


def centres(edges: Values) -> Values:
    """The middle of each window, s."""
    middles: Values = (edges[1:] + edges[:-1]) / 2
    return middles


def percentiles(history: RunHistory, edges: Values, shares: Sequence[float]) -> list[Values]:
    """Response times, s, of those who arrive in each window: a row a share (0 to 1); nan where nobody arrives."""
    order = np.argsort(history.arrivals, kind="stable")
    cuts = np.searchsorted(history.arrivals[order], edges[1:-1])
    parts = np.split(history.responses[order], cuts)
    return [np.array([np.quantile(part, share) if len(part) else np.nan for part in parts]) for share in shares]


def power(history: RunHistory, edges: Values) -> Values | None:
    """Mean power in each window, W; None where the energies are unknown."""
    if history.energies is None:
        return None
    joules = np.histogram(history.finishes, edges, weights=history.energies)[0]
    watts: Values = joules / np.diff(edges)
    return watts


def rate(instants: Values, edges: Values) -> Values:
    """How many instants fall into each window, 1/s."""
    per_second: Values = np.histogram(instants, edges)[0] / np.diff(edges)
    return per_second


def response_distribution(history: RunHistory) -> tuple[Values, Values]:
    """Response times, s, and the shares of the requests answered within them; finer towards the end."""
    if not len(history.responses):
        return np.empty(0), np.empty(0)
    return np.quantile(history.responses, _SHARES, method="inverted_cdf"), _SHARES


def points(history: RunHistory) -> tuple[Values, Values]:
    """Arrival and response time, s, of some requests, evenly taken out of all."""
    step = -(-len(history.responses) // _POINTS) or 1
    order = np.argsort(history.arrivals, kind="stable")[::step]
    return history.arrivals[order], history.responses[order]


def batch_shares(history: RunHistory) -> tuple[Values, Values]:
    """Batch sizes from 1 to the largest, and the share of the batches that have them; empty where unknown."""
    counts = history.batches or {}
    sizes = np.arange(1, max(counts, default=0) + 1)
    shares = np.array([counts.get(size, 0.0) for size in sizes.tolist()]) / (sum(counts.values()) or 1.0)
    return sizes.astype(np.float64), shares
