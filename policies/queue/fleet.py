"""Several devices behind one door, each with a queue, a policy and a monitor of its own, on one virtual clock.

A request goes to a device when it arrives, and stays there. The loop is simulator.py's; here stands who goes where.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from policies.profile import Profile
from policies.queue.routing import backlog, soonest
from policies.queue.simulator import Book, Router, Run, Station, serve
from policies.types import Request


@dataclass(frozen=True)
class FleetRun:
    """What a run did.

    Attributes:
        whole: the fleet's, as of one device.
        devices: what each served, in the time of the whole, so that their powers add up.
    """

    whole: Run
    devices: tuple[Run, ...]


def run_fleet(stations: Sequence[Station], requests: Sequence[Request], route: Router) -> FleetRun:
    """Simulate to the end and gather the report of the run.

    Args:
        stations: the devices with their queues, nobody there yet.
        requests: sorted by arrival, s; at least one.
        route: to which device a request goes, asked at its arrival.
    """
    begin = requests[0].arrival
    whole, books = Book(begin), {station: Book(begin) for station in stations}
    for station, service in serve(stations, requests, route):
        energy = station.energy(service)
        whole.add(service, energy)
        books[station].add(service, energy)
    return FleetRun(whole.run(len(requests)), tuple(book.run(end=whole.end) for book in books.values()))


def least_expected(stations: Sequence[Station], profiles: Sequence[Mapping[str, Profile]]) -> Router:
    """To the device that should answer it first, as a server sends it; of equal ones the first.

    Args:
        stations: the devices.
        profiles: of each device, by model.
    """

    def route(request: Request) -> Station:
        now, more = request.arrival, {request.kind.model: 1}
        lefts = (station.due - now if station.serving is not None else 0.0 for station in stations)
        expected = map(backlog, (station.batcher for station in stations), profiles, lefts, [more] * len(stations))
        return stations[soonest(list(expected))]

    return route


def at_random(stations: Sequence[Station], shares: Sequence[float], rng: np.random.Generator) -> Router:
    """To any device, whatever happens there.

    Poisson arrivals stay Poisson at each, with its share of the rate: what the solver says of a device holds exactly.

    Args:
        stations: the devices.
        shares: weight of each, with which it is drawn.
        rng: draws.
    """
    *edges, all_of_them = accumulate(shares)
    return lambda _: stations[bisect_right(edges, all_of_them * rng.random())]
