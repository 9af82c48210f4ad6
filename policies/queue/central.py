"""Simulation of Multi-Bin Batching with one central queue of formed batches (algorithm 1 and figure 6 of the paper).

A bin forms batches of exactly B in order of arrival. Formed batches are served first come, first served by the first
free of several servers. The service time of a batch is that of its longest request.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CentralRun:
    """The result of a simulation.

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
    """Serve every request; requests left in the bins after the last arrival form smaller batches.

    Args:
        arrivals: instants of arrival, sorted, at least one, s.
        times: for each request, the service time of a batch in which it is the longest, s.
        bins: the bin of each request.
        batch_size: B.
        servers: number of servers.
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
    """Return the indices of the requests of each batch in order of formation, then the incomplete batches by bin."""
    full: list[NDArray[np.int64]] = []
    left: list[NDArray[np.int64]] = []
    for each in np.unique(bins):
        members = np.flatnonzero(bins == each)
        end = len(members) - len(members) % batch_size
        full.extend(members[:end].reshape(-1, batch_size))
        left.extend([members[end:]] if end < len(members) else [])
    return sorted(full, key=lambda batch: int(batch[-1])) + left
