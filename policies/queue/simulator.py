"""Discrete-event simulation of a Batcher on a virtual clock: the same decisions as in the server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.queue.batcher import Batcher
from policies.types import Launch, Request

_BLOCKS = 20  # of the method of batch means, see `estimate`


@dataclass(frozen=True, slots=True)
class Service:
    """One completed launch.

    Attributes:
        start: instant of launch, s.
        finish: instant of completion, s.
        launch: the launch; its requests have since advanced to another stage or left the system.
        first_stage: the stage of the requests at the launch.
        finished: requests that left the system at its completion.
    """

    start: float
    finish: float
    launch: Launch
    first_stage: int
    finished: Sequence[Request]


@dataclass(slots=True, eq=False)
class Station:
    """A device and its queue on the virtual clock.

    Attributes:
        batcher: its queue, empty at first; the policy and the monitor are used as they are.
        service_time: returns the service time of a launch, s.
        energy: returns the energy of a service, J; None where unknown.
        due: instant of the next event, s: completion of the batch in service, end of a wait, or an expiry.
        serving: start, launch and first stage of the batch in service; None if the device is idle.
    """

    batcher: Batcher
    service_time: Callable[[Launch], float]
    energy: Callable[[Service], float | None]
    due: float = inf
    serving: tuple[float, Launch, int] | None = None

    def decide(self, now: float) -> None:
        """Launch or wait, as the policy decides; the device must be idle."""
        self.batcher.expire(now)
        action = self.batcher.decide(now)
        if isinstance(action, Launch):
            self.serving = now, action, action.requests[0].stage
            self.due = now + self.service_time(action)
        else:
            self.due = min(action.until, self.batcher.next_expiry())

    def complete(self) -> Service:
        """Complete the batch in service; a decision must follow."""
        assert self.serving is not None
        (start, launch, stage), self.serving = self.serving, None
        self.batcher.expire(self.due)
        return Service(start, self.due, launch, stage, self.batcher.complete(launch))

    def drain(self, now: float) -> None:
        """After the last arrival, switch to greedy launches, as the server does at shutdown."""
        if self.due == inf and len(self.batcher):
            self.batcher.drain()
            self.due = now


Router = Callable[[Request], Station]


def serve(stations: Sequence[Station], requests: Sequence[Request], route: Router) -> Iterator[tuple[Station, Service]]:
    """Serve `requests` on one or several devices; yield each completed batch with its device.

    A decision takes into account the arrivals at its own instant. Expired requests are in no batch.

    Args:
        stations: the devices with their empty queues.
        requests: sorted by arrival, s.
        route: returns the device of a request, called at its arrival if there are several devices.
    """
    now, n, total, single = 0.0, 0, len(requests), len(stations) == 1
    while True:
        for each in stations if n == total else ():
            each.drain(now)
        station = stations[0] if single else min(stations, key=_due)
        while n < total and requests[n].arrival <= station.due:
            target = station if single else route(requests[n])
            target.batcher.arrive(requests[n])
            if target.serving is None:
                target.due, station = requests[n].arrival, target
            n += 1
        now = station.due
        if now == inf:
            return
        if station.serving is not None:
            yield station, station.complete()
        station.decide(now)


_due = attrgetter("due")


def simulate(
    batcher: Batcher, requests: Sequence[Request], service_time: Callable[[Launch], float]
) -> Iterator[Service]:
    """Serve `requests` on one device and yield each completed batch.

    Args:
        batcher: an empty queue; its policy and monitor are used as they are.
        requests: sorted by arrival, s.
        service_time: returns the service time of a launch, s.
    """
    station = Station(batcher, service_time, lambda _: None)
    return (service for _, service in serve([station], requests, lambda _: station))


@dataclass(frozen=True)
class Run:
    """The result of a simulation, by request and by batch.

    Attributes:
        scheduled: number of requests that arrived.
        responses: response time of each served request, s, in order of completion.
        arrivals: instant of arrival of each served request, s.
        waits: waiting time of each served request, s.
        batch_sizes: size of each launch, in order of completion; where batches run stage by stage, each stage counts.
        finishes: instant of completion of each launch, s.
        energies: energy of each launch, J; None where the profile has none.
        elapsed: first arrival to last completion, s.
        levels: priority level of each served request, in order of completion; None where they were not recorded.
    """

    scheduled: int
    responses: NDArray[np.float64]
    arrivals: NDArray[np.float64]
    waits: NDArray[np.float64]
    batch_sizes: NDArray[np.int64]
    finishes: NDArray[np.float64]
    energies: NDArray[np.float64] | None
    elapsed: float
    levels: NDArray[np.int64] | None = None

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
    """Simulate one device until every request has left.

    Args:
        batcher: an empty queue.
        requests: sorted by arrival, s; at least one.
        service_time: returns the service time of a launch, s.
        energy: returns the energy of a service, J; None where unknown.
    """
    station, recorder = Station(batcher, service_time, energy), RunRecorder(requests[0].arrival)
    for _, service in serve([station], requests, lambda _: station):
        recorder.add(service, energy(service))
    return recorder.run(len(requests))


class RunRecorder:
    """Records the figures of each batch, without keeping the requests themselves.

    Attributes:
        end: instant of the last completion, s.
    """

    def __init__(self, begin: float) -> None:
        """Begin at the instant of the first arrival, s."""
        self.end = self._begin = begin
        self._responses: list[float] = []
        self._arrivals: list[float] = []
        self._waits: list[float] = []
        self._levels: list[int] = []
        self._finishes: list[float] = []
        self._sizes: list[int] = []
        self._energies: list[float] = []

    def add(self, service: Service, energy: float | None) -> None:
        """Record a completed batch and its energy, J; batches are in order of completion."""
        self.end = end = service.finish
        self._finishes.append(end)
        self._sizes.append(len(service.launch.requests))
        if energy is not None:
            self._energies.append(energy)
        for request in service.finished:
            self._responses.append(end - request.arrival)
            self._arrivals.append(request.arrival)
            self._waits.append(request.started - request.arrival)
            self._levels.append(request.level)

    def run(self, scheduled: int | None = None, end: float | None = None) -> Run:
        """Return the result.

        Args:
            scheduled: number of arrivals; None: the number of served requests.
            end: end of the run, s; None: the last completion.
        """
        return Run(
            scheduled=len(self._responses) if scheduled is None else scheduled,
            responses=np.array(self._responses),
            arrivals=np.array(self._arrivals),
            waits=np.array(self._waits),
            batch_sizes=np.array(self._sizes, dtype=np.int64),
            finishes=np.array(self._finishes),
            energies=np.array(self._energies) if len(self._energies) == len(self._sizes) else None,
            elapsed=(self.end if end is None else end) - self._begin,
            levels=np.array(self._levels, dtype=np.int64),
        )


class Estimate(NamedTuple):
    """A statistic of a run and its standard error, in the same unit; the error is infinite if unknown."""

    value: float
    standard_error: float


def percentile(responses: NDArray[np.float64], share: float) -> Estimate:
    """Estimate the response time, s, within which this share (0 to 1) of the requests was answered."""
    return estimate(responses, lambda block: float(np.quantile(block, share)))


def share_within(responses: NDArray[np.float64], limit: float) -> Estimate:
    """Estimate the share of the requests that was answered within `limit`, s."""
    return estimate(responses, lambda block: float(np.mean(block <= limit)))


def estimate(values: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], float]) -> Estimate:
    """Estimate a statistic of all values, with its standard error by the method of batch means.

    Consecutive response times are correlated, so the standard error of independent values would be too small. The run
    is split into 20 blocks; the standard error is the standard deviation of the blocks' statistics over sqrt(20).

    Limits: blocks must last many busy periods, otherwise they are correlated too and the error is too small (near load
    1 no run is long enough). A block should have some hundred values beyond a percentile, otherwise the blocks'
    percentiles are biased. 20 blocks give the error itself to about 16 per cent. The initial transient from an empty
    queue is included.

    Args:
        values: in order of completion, at least one; with fewer than 20 the error is infinite.
        statistic: computes the statistic of consecutive values.
    """
    if len(values) < _BLOCKS:
        return Estimate(statistic(values), inf)
    blocks = [statistic(block) for block in np.array_split(values, _BLOCKS)]
    return Estimate(statistic(values), float(np.std(blocks, ddof=1)) / sqrt(_BLOCKS))
