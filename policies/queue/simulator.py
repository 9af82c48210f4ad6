"""A Batcher on a virtual clock: what the server would do, at the speed of arithmetic."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.queue.batcher import Batcher
from policies.types import Launch, Request

_BLOCKS = 20  # of batch means: enough to know their spread to a sixth, few enough to be long


@dataclass(frozen=True, slots=True)
class Service:
    """One batch on the device.

    Attributes:
        start: launch, s.
        finish: completion, s.
        launch: what was launched; its requests have gone on since, to another stage or out of the system.
        first_stage: the stage at which they stood.
        finished: who left the system with it.
    """

    start: float
    finish: float
    launch: Launch
    first_stage: int
    finished: Sequence[Request]


def simulate(
    batcher: Batcher, requests: Sequence[Request], service_time: Callable[[Launch], float]
) -> Iterator[Service]:
    """Serve `requests` (in order of arrival) and yield each batch as it completes.

    Where the policy would wait for an arrival that does not come, the rest is drained greedily, as the server does
    when it stops. Requests that expire leave without a trace here; count them by who is missing.

    Args:
        batcher: empty; its policy and monitor are used as they are.
        requests: sorted by arrival, s.
        service_time: of a launch, s.
    """
    now, n, to_come = 0.0, 0, len(requests)
    while n < to_come or len(batcher):
        while n < to_come and requests[n].arrival <= now:
            batcher.arrive(requests[n])
            n += 1
        batcher.expire(now)
        action = batcher.decide(now)
        if isinstance(action, Launch):
            start, stage, now = now, action.requests[0].stage, now + service_time(action)
            while n < to_come and requests[n].arrival <= now:
                batcher.arrive(requests[n])
                n += 1
            batcher.expire(now)
            yield Service(start, now, action, stage, batcher.complete(action))
            continue
        arrival = requests[n].arrival if n < to_come else inf
        wake = min(action.until, arrival, batcher.next_expiry())
        if wake < inf:
            now = wake
        else:
            batcher.drain()


@dataclass(frozen=True)
class Run:
    """What a run did, request by request and batch by batch.

    Attributes:
        scheduled: number of requests that arrived.
        responses: response time of each served request, s, in order of completion.
        arrivals: instant of arrival of each, s.
        waits: waiting time of each, s.
        batch_sizes: size of each batch that was launched, in order of completion; by stages each launch of one counts,
            so that their mean is the mean size in which a stage was run.
        finishes: instant of completion of each batch, or stage of one, s.
        energies: energy of each batch, or stage of one, J; None where the profile has none.
        elapsed: first arrival to last completion, s.
    """

    scheduled: int
    responses: NDArray[np.float64]
    arrivals: NDArray[np.float64]
    waits: NDArray[np.float64]
    batch_sizes: NDArray[np.int64]
    finishes: NDArray[np.float64]
    energies: NDArray[np.float64] | None
    elapsed: float

    @property
    def mean_power(self) -> float | None:
        """Energy of all batches over the elapsed time, W."""
        return None if self.energies is None else float(self.energies.sum()) / self.elapsed


def run(
    batcher: Batcher,
    requests: Sequence[Request],
    service_time: Callable[[Launch], float],
    energy: Callable[[Service], float | None],
) -> Run:
    """Simulate to the end and gather the report of the run.

    Args:
        batcher: empty.
        requests: sorted by arrival, s; at least one.
        service_time: of a launch, s.
        energy: of a service, J.
    """
    responses: list[float] = []
    arrivals: list[float] = []
    waits: list[float] = []
    finishes: list[float] = []
    sizes: list[int] = []
    energies: list[float | None] = []
    last = requests[0].arrival
    for service in simulate(batcher, requests, service_time):
        last = service.finish
        finishes.append(last)
        sizes.append(len(service.launch.requests))
        energies.append(energy(service))
        for request in service.finished:
            responses.append(last - request.arrival)
            arrivals.append(request.arrival)
            waits.append(request.started - request.arrival)
    known = [e for e in energies if e is not None]
    return Run(
        scheduled=len(requests),
        responses=np.array(responses),
        arrivals=np.array(arrivals),
        waits=np.array(waits),
        batch_sizes=np.array(sizes, dtype=np.int64),
        finishes=np.array(finishes),
        energies=np.array(known) if len(known) == len(sizes) else None,
        elapsed=last - requests[0].arrival,
    )


class Estimate(NamedTuple):
    """A figure of a run and its standard error, in the figure's unit; an infinite error says that none is known."""

    value: float
    standard_error: float


def percentile(responses: NDArray[np.float64], share: float) -> Estimate:
    """The response time, s, within which this share (0 to 1) of the requests was answered; as `estimate` says."""
    return estimate(responses, lambda block: float(np.quantile(block, share)))


def share_within(responses: NDArray[np.float64], limit: float) -> Estimate:
    """The share of the requests that was answered within `limit`, s; as `estimate` says."""
    return estimate(responses, lambda block: float(np.mean(block <= limit)))


def estimate(values: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], float]) -> Estimate:
    """A statistic of all values, and its standard error by the method of batch means.

    Response times of neighbours depend on each other, so that their own spread says too little. The run is split into
    20 blocks; the standard error is the standard deviation of the blocks' statistics over sqrt(20).

    Limits: blocks must last many busy periods, else they depend on each other too and the error comes out too small
    (near load 1 no run is long enough); a block should hold some hundred values beyond a percentile, else the blocks'
    percentiles are biased; and 20 blocks tell the error itself to about 16 per cent. That every run begins with an
    empty queue is left in.

    Args:
        values: in order of completion, at least one; with fewer than 20 the error is infinite.
        statistic: of some of the values, in their order.
    """
    if len(values) < _BLOCKS:
        return Estimate(statistic(values), inf)
    blocks = [statistic(block) for block in np.array_split(values, _BLOCKS)]
    return Estimate(statistic(values), float(np.std(blocks, ddof=1)) / sqrt(_BLOCKS))
