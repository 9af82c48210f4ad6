"""A Batcher on a virtual clock: what the server would do, at the speed of arithmetic."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import attrgetter
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


@dataclass(slots=True, eq=False)
class Station:
    """A device and its queue on the virtual clock.

    Attributes:
        batcher: its queue, empty at first; the policy and the monitor are used as they are.
        service_time: of a launch, s.
        energy: of a service, J; None where unknown.
        due: when something happens here by itself, s: the batch in service is complete, or a wait is over.
        serving: since when, what, and from which stage on; None where nothing is in service.
    """

    batcher: Batcher
    service_time: Callable[[Launch], float]
    energy: Callable[[Service], float | None]
    due: float = inf
    serving: tuple[float, Launch, int] | None = None

    def ask(self, now: float) -> None:
        """The device is free: launch, or wait, as the policy says."""
        self.batcher.expire(now)
        action = self.batcher.decide(now)
        if isinstance(action, Launch):
            self.serving = now, action, action.requests[0].stage
            self.due = now + self.service_time(action)
        else:
            self.due = min(action.until, self.batcher.next_expiry())

    def complete(self) -> Service:
        """End the batch in service; the device is to be asked next."""
        assert self.serving is not None
        (start, launch, stage), self.serving = self.serving, None
        self.batcher.expire(self.due)
        return Service(start, self.due, launch, stage, self.batcher.complete(launch))

    def drain(self, now: float) -> None:
        """Nobody else comes: launch what waits for that, from now on greedily, as the server does when it stops."""
        if self.due == inf and len(self.batcher):
            self.batcher.drain()
            self.due = now


Router = Callable[[Request], Station]


def serve(stations: Sequence[Station], requests: Sequence[Request], route: Router) -> Iterator[tuple[Station, Service]]:
    """Serve `requests` by one device or several; yield each batch as it completes, and where.

    Those who arrive at the instant of a decision are seen by it. Requests that expire leave without a trace here; count
    them by who is missing.

    Args:
        stations: the devices with their queues, nobody there yet.
        requests: sorted by arrival, s.
        route: to which of several devices a request goes, asked at its arrival.
    """
    now, n, to_come, alone = 0.0, 0, len(requests), len(stations) == 1
    while True:
        for each in stations if n == to_come else ():
            each.drain(now)
        station = stations[0] if alone else min(stations, key=_due)
        while n < to_come and requests[n].arrival <= station.due:
            to = station if alone else route(requests[n])
            to.batcher.arrive(requests[n])
            if to.serving is None:
                to.due, station = requests[n].arrival, to
            n += 1
        now = station.due
        if now == inf:
            return
        if station.serving is not None:
            yield station, station.complete()
        station.ask(now)


_due = attrgetter("due")


def simulate(
    batcher: Batcher, requests: Sequence[Request], service_time: Callable[[Launch], float]
) -> Iterator[Service]:
    """Serve `requests` by one device and yield each batch as it completes.

    Args:
        batcher: empty; its policy and monitor are used as they are.
        requests: sorted by arrival, s.
        service_time: of a launch, s.
    """
    station = Station(batcher, service_time, lambda _: None)
    return (service for _, service in serve([station], requests, lambda _: station))


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
    station, book = Station(batcher, service_time, energy), Book(requests[0].arrival)
    for _, service in serve([station], requests, lambda _: station):
        book.add(service, energy(service))
    return book.run(len(requests))


class Book:
    """What is kept of each batch for the report of a run: numbers, since so many requests would be much to keep.

    Attributes:
        end: the last completion, s.
    """

    def __init__(self, begin: float) -> None:
        """`begin`: the first arrival, s."""
        self.end = self._begin = begin
        self._responses: list[float] = []
        self._arrivals: list[float] = []
        self._waits: list[float] = []
        self._finishes: list[float] = []
        self._sizes: list[int] = []
        self._energies: list[float] = []

    def add(self, service: Service, energy: float | None) -> None:
        """The next batch to be complete, and its energy, J."""
        self.end = end = service.finish
        self._finishes.append(end)
        self._sizes.append(len(service.launch.requests))
        if energy is not None:
            self._energies.append(energy)
        for request in service.finished:
            self._responses.append(end - request.arrival)
            self._arrivals.append(request.arrival)
            self._waits.append(request.started - request.arrival)

    def run(self, scheduled: int | None = None, end: float | None = None) -> Run:
        """The report.

        Args:
            scheduled: how many arrived; None: as many as were served.
            end: of the run, s; None: the last completion.
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
