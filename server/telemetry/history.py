"""What happened lately, by model, for the page at /: a point a second for ten minutes, and the last batches.

A batch costs a few microseconds here, a call a fraction of one; everything else is computed once a second.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.telemetry.batch_record import BatchRecord

POINTS = 600  # one a second
WINDOW = 10  # points that a percentile is taken over
BATCHES = 20  # that are remembered one by one
_MOST = 4096  # response times kept of a second; of more, the first ones stand for all


@dataclass(slots=True)
class _Second:
    """The second that runs now; sizes: number of batches and their service time, s, by batch size."""

    arrivals: int = 0
    answered: int = 0
    joules: float | None = None
    sizes: dict[int, list[float]] = field(default_factory=dict)
    responses: list[float] = field(default_factory=list)


class _Model:
    """One model's past."""

    __slots__ = ("batches", "now", "points", "recent", "seq", "since")

    def __init__(self) -> None:
        self.now = _Second()
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.batches: deque[tuple[Any, ...]] = deque(maxlen=BATCHES)
        self.recent: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        self.seq = 0
        self.since = 0.0


class History:
    """The last ten minutes of each model. Everything runs on the event loop."""

    def __init__(self) -> None:
        """Starts empty."""
        self._models: dict[str, _Model] = {}

    def arrived(self, model: str, n: int) -> None:
        """`n` requests were admitted."""
        self._of(model).now.arrivals += n

    def batch(self, batch: BatchRecord) -> None:
        """Add a completed batch."""
        past, service, energy = self._of(batch.model), batch.service, batch.energy
        tally = past.now.sizes.get(batch.size)
        if tally is None:
            past.now.sizes[batch.size] = [1, service]
        else:
            tally[0] += 1
            tally[1] += service
        if energy is not None:
            past.now.joules = energy if past.now.joules is None else past.now.joules + energy
        past.batches.append(
            (time.time() - service, batch.size, batch.launch.reason, batch.policy, batch.waited, service, energy)
        )

    def answered(self, model: str, responses: Sequence[float]) -> None:
        """Requests were answered; their response times, s."""
        now = self._of(model).now
        now.answered += len(responses)
        if len(now.responses) < _MOST:
            now.responses.extend(responses)

    def tick(self, model: str, now: float, queue_length: int, arrival_rate: float) -> None:
        """End the second that runs, at `now`, s of the wall clock; it may have been a longer one.

        Args:
            model: whose.
            now: s since 1970.
            queue_length: how many wait.
            arrival_rate: as the policy sees it, 1/s.
        """
        past = self._of(model)
        second, past.now = past.now, _Second()
        span = now - past.since if past.points else 1.0
        past.since = now
        past.seq += 1
        past.recent.append(np.array(second.responses))
        past.points.append(
            {
                "seq": past.seq,
                "t": round(now, 3),
                "span": round(max(span, 1e-3), 3),
                "arrivals": second.arrivals,
                "answered": second.answered,
                "queue": queue_length,
                "rate": round(arrival_rate, 3),
                "joules": second.joules,
                "sizes": [[size, int(n), 1e3 * total / n] for size, (n, total) in sorted(second.sizes.items())],
                **_response_times(past.recent),
            }
        )

    def points(self, model: str, after: int) -> list[dict[str, Any]]:
        """The points whose number is above `after`; one of another run, or too old, gives all there are."""
        past = self._of(model)
        new = past.seq - after if 0 <= after <= past.seq else POINTS
        return list(past.points)[-new:] if new else []

    def batches(self, model: str) -> list[dict[str, Any]]:
        """The last batches, the newest first."""
        return [
            {
                "t": round(at, 3),
                "size": size,
                "reason": reason,
                "policy": policy,
                "waited_ms": 1e3 * waited,
                "service_ms": 1e3 * service,
                "energy_mj": None if energy is None else 1e3 * energy,
            }
            for at, size, reason, policy, waited, service, energy in reversed(self._of(model).batches)
        ]

    def seq(self, model: str) -> int:
        """The number of the newest point; 0 before there is one."""
        return self._of(model).seq

    def _of(self, model: str) -> _Model:
        past = self._models.get(model)
        if past is None:
            past = self._models[model] = _Model()
        return past


def _response_times(recent: Iterable[NDArray[np.float64]]) -> dict[str, float | None]:
    """Mean and percentiles of the last seconds together, ms; None where nobody was answered."""
    values = np.concatenate([*recent])
    if not len(values):
        return {"mean": None, "p50": None, "p95": None, "p99": None}
    found = 1e3 * np.quantile(values, (0.5, 0.95, 0.99))
    mean = 1e3 * float(values.mean())
    return {"mean": mean, "p50": float(found[0]), "p95": float(found[1]), "p99": float(found[2])}
