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
    full, left = _formed(bins, batch_size)
    batch_times = np.array([*times[full].max(axis=1), *(times[batch].max() for batch in left)])
    ready = [*arrivals[full[:, -1]].tolist(), *[float(arrivals[-1])] * len(left)]
    finishes = np.empty(len(ready))
    free = [0.0] * servers
    for i, (ready_at, batch_time) in enumerate(zip(ready, batch_times.tolist(), strict=True)):
        finishes[i] = finish = max(ready_at, free[0]) + batch_time
        heapq.heapreplace(free, finish)
    requests = np.concatenate([full.ravel(), *left])
    responses = np.repeat(finishes, [batch_size] * len(full) + [len(batch) for batch in left]) - arrivals[requests]
    return CentralRun(responses, batch_times, float(finishes.max() - arrivals[0]))


def _formed(bins: NDArray[np.int64], batch_size: int) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the indices of the requests of each batch.

    Full batches are in order of formation, (batches, batch_size); the others are by bin.
    """
    full: list[NDArray[np.int64]] = []
    left: list[NDArray[np.int64]] = []
    for each in np.unique(bins):
        members = np.flatnonzero(bins == each)
        end = len(members) - len(members) % batch_size
        full.append(members[:end].reshape(-1, batch_size))
        left.extend([members[end:]] if end < len(members) else [])
    formed = np.concatenate(full)
    return formed[np.argsort(formed[:, -1])], left
