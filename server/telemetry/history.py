"""Time series of each model for the dashboard: one point per second for ten minutes, and the last batches.

Recording a batch takes a few microseconds and a call a fraction of one. Percentiles are computed once a second.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.telemetry.batch_record import BatchRecord

POINTS = 600  # kept per model, one per second
WINDOW = 10  # points per percentile
BATCHES = 20  # kept per model
_MAX_RESPONSES = 4096  # response times kept per second; later ones are left out of the percentiles


@dataclass(slots=True)
class _Second:
    """Totals of the current second; `sizes` maps a batch size to number and total service time, s, of its batches."""

    arrivals: int = 0
    answered: int = 0
    joules: float | None = None
    cpu_time: float | None = None
    sizes: dict[int, list[float]] = field(default_factory=dict)
    responses: list[float] = field(default_factory=list)


class _Series:
    """The points and batches of one model."""

    __slots__ = ("batches", "now", "points", "recent", "seq", "since")

    def __init__(self) -> None:
        self.now = _Second()
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.batches: deque[dict[str, Any]] = deque(maxlen=BATCHES)
        self.recent: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        self.seq = 0
        self.since = 0.0


class History:
    """The last ten minutes of each model. Not thread-safe: all methods run on the event loop."""

    def __init__(self) -> None:
        """Start without points."""
        self._models: dict[str, _Series] = {}

    def arrived(self, model: str, n: int) -> None:
        """Count `n` admitted requests."""
        self._of(model).now.arrivals += n

    def batch_completed(self, batch: BatchRecord) -> None:
        """Add a completed batch."""
        series, service, energy, cpu_time = self._of(batch.model), batch.service, batch.energy, batch.cpu_time
        tally = series.now.sizes.get(batch.size)
        if tally is None:
            series.now.sizes[batch.size] = [1, service]
        else:
            tally[0] += 1
            tally[1] += service
        if energy is not None:
            series.now.joules = energy + (series.now.joules or 0.0)
        if cpu_time is not None:
            series.now.cpu_time = cpu_time + (series.now.cpu_time or 0.0)
        series.batches.append({"t": round(time.time() - service, 3), **batch.facts()})

    def requests_completed(self, model: str, responses: Sequence[float]) -> None:
        """Add the response times of completed requests, s."""
        now = self._of(model).now
        now.answered += len(responses)
        if len(now.responses) < _MAX_RESPONSES:
            now.responses.extend(responses)

    def tick(self, model: str, now: float, queue_length: int, arrival_rate: float) -> None:
        """Add the point of the current second, which may have lasted longer, and start the next one.

        Args:
            model: the model's name.
            now: Unix time, s.
            queue_length: number of queued requests.
            arrival_rate: measured arrival rate, 1/s.
        """
        series = self._of(model)
        second, series.now = series.now, _Second()
        span = now - series.since if series.points else 1.0
        series.since = now
        series.seq += 1
        series.recent.append(np.array(second.responses))
        series.points.append(
            {
                "seq": series.seq,
                "t": round(now, 3),
                "span": round(max(span, 1e-3), 3),
                "arrivals": second.arrivals,
                "answered": second.answered,
                "queue": queue_length,
                "rate": round(arrival_rate, 3),
                "joules": second.joules,
                "cpu_s": second.cpu_time,
                "sizes": [[size, int(n), 1e3 * total / n] for size, (n, total) in sorted(second.sizes.items())],
                **_response_times(series.recent),
            }
        )

    def points(self, model: str, after: int) -> list[dict[str, Any]]:
        """Return the points with a number above `after`; all points if `after` is too old or of another run."""
        series = self._of(model)
        new = series.seq - after if 0 <= after <= series.seq else POINTS
        return list(series.points)[-new:] if new else []

    def batches(self, model: str) -> list[dict[str, Any]]:
        """Return the facts of the last batches with the instants of their launch, s since 1970, newest first."""
        return list(reversed(self._of(model).batches))

    def seq(self, model: str) -> int:
        """Return the number of the newest point; 0 before the first."""
        return self._of(model).seq

    def _of(self, model: str) -> _Series:
        series = self._models.get(model)
        if series is None:
            series = self._models[model] = _Series()
        return series


def _response_times(recent: Iterable[NDArray[np.float64]]) -> dict[str, float | None]:
    """Return mean and percentiles over the last seconds, ms; None without responses."""
    values = np.concatenate([*recent])
    if not len(values):
        return {"mean": None, "p50": None, "p95": None, "p99": None}
    found = 1e3 * np.quantile(values, (0.5, 0.95, 0.99))
    mean = 1e3 * float(values.mean())
    return {"mean": mean, "p50": float(found[0]), "p95": float(found[1]), "p99": float(found[2])}
