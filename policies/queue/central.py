"""Bins in front of one central queue and several servers (Multi-Bin Batching, algorithm 1 and figure 6).

A bin forms batches of exactly B in order of arrival; a formed batch joins the queue, and the first formed is the first
served by whichever server is free. A batch takes as long as its longest request would.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CentralRun:
    """What a run did.

    Attributes:
        responses: response time of each request, s, in order of formation of the batches.
        batch_times: service time of each batch, s, in the same order.
        elapsed: first arrival to last completion, s.
    """

    responses: _Floats
    batch_times: _Floats
    elapsed: float

    @property
    def throughput(self) -> float:
        """Requests over the elapsed time, 1/s."""
        return len(self.responses) / self.elapsed


def serve(arrivals: _Floats, times: _Floats, bins: NDArray[np.int64], batch_size: int, servers: int = 1) -> CentralRun:
    """Serve every request; what is left in the bins when arrivals end forms the last, smaller batches.

    Args:
        arrivals: instants, sorted, at least one, s.
        times: of a batch in which this request is the longest, s.
        bins: of each request.
        batch_size: B.
        servers: how many take batches from the queue.
    """
    batches = _formed(bins, batch_size)
    batch_times = np.array([times[batch].max() for batch in batches])
    finishes = np.empty(len(batches))
    free = [0.0] * servers
    for i, batch in enumerate(batches):
        ready = arrivals[batch[-1]] if len(batch) == batch_size else arrivals[-1]
        finishes[i] = max(ready, free[0]) + batch_times[i]
        heapq.heapreplace(free, finishes[i])
    responses = [finish - arrivals[batch] for finish, batch in zip(finishes, batches, strict=True)]
    return CentralRun(np.concatenate(responses), batch_times, float(finishes.max() - arrivals[0]))


def _formed(bins: NDArray[np.int64], batch_size: int) -> list[NDArray[np.int64]]:
    """Indices of the requests of each batch, in order of formation; then what is left, by bin."""
    full: list[NDArray[np.int64]] = []
    left: list[NDArray[np.int64]] = []
    for each in np.unique(bins):
        members = np.flatnonzero(bins == each)
        end = len(members) - len(members) % batch_size
        full.extend(members[:end].reshape(-1, batch_size))
        left.extend([members[end:]] if end < len(members) else [])
    return sorted(full, key=lambda batch: int(batch[-1])) + left
