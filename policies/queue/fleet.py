"""Simulation of several devices, each with its own queue, policy and monitor, and routing of requests to them.

A request is routed once, at its arrival. The event loop is that of simulator.py.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from policies.profile import Profile
from policies.queue.routing import backlog, least_delay
from policies.queue.simulator import Router, Run, RunRecorder, Station, serve
from policies.types import Request


@dataclass(frozen=True)
class FleetRun:
    """The result of a simulation of several devices.

    Attributes:
        whole: the run of the whole fleet.
        devices: the run of each device; all have the elapsed time of the whole, so that their mean powers add up.
    """

    whole: Run
    devices: tuple[Run, ...]


def run_fleet(stations: Sequence[Station], requests: Sequence[Request], route: Router) -> FleetRun:
    """Simulate the fleet until every request has left.

    Args:
        stations: the devices with their empty queues.
        requests: sorted by arrival, s; at least one.
        route: returns the device of a request, called at its arrival.
    """
    begin = requests[0].arrival
    whole, recorders = RunRecorder(begin), {station: RunRecorder(begin) for station in stations}
    for station, service in serve(stations, requests, route):
        energy = station.energy(service)
        whole.add(service, energy)
        recorders[station].add(service, energy)
    return FleetRun(whole.run(len(requests)), tuple(recorder.run(end=whole.end) for recorder in recorders.values()))


def shortest_expected_delay(stations: Sequence[Station], profiles: Sequence[Mapping[str, Profile]]) -> Router:
    """Route to the device with the shortest expected delay, as the server does; to the first of equal ones.

    Args:
        stations: the devices.
        profiles: the profiles of each device, by model.
    """

    def route(request: Request) -> Station:
        now, added = request.arrival, {request.kind.model: 1}
        remaining = (station.due - now if station.serving is not None else 0.0 for station in stations)
        expected = map(backlog, (station.batcher for station in stations), profiles, remaining, [added] * len(stations))
        return stations[least_delay(list(expected))]

    return route


def random_routing(stations: Sequence[Station], shares: Sequence[float], rng: np.random.Generator) -> Router:
    """Route at random, independently of the state of the devices.

    Poisson arrivals then are Poisson at each device, at its share of the rate, and the solver's averages are exact.

    Args:
        stations: the devices.
        shares: weight of each device.
        rng: random generator.
    """
    *edges, total = accumulate(shares)
    return lambda _: stations[bisect_right(edges, total * rng.random())]
