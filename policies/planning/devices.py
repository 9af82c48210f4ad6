"""How many devices, and which policy on each: for a rate, a promise, and what a device costs.

Arrivals are split evenly and at random, so that each of n devices sees Poisson arrivals at an n-th of the rate; the
solver then gives the policy of least power that keeps the promise there. Two facts bound the search:

- The more devices, the easier the promise is kept: a device at the lower rate could act as if phantoms arrived as well,
  and be no slower, since smaller batches take no longer. So the fewest that keep it are found by halving.
- A device costs its price, and what it draws idle, whatever it does; and no policy serves a request for less energy
  than the best batch size, min over b of zeta(b) / b. So n devices cost at least n x the one + rate x the other, and
  once that is more than the best so far, so is everything beyond.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from math import floor, inf
from typing import Any

import numpy as np

from policies.catalog import solved
from policies.planning.prices import Price
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.fleet import random_routing, run_fleet, shortest_expected_delay
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import Router, Run, Station
from policies.smdp.choice import Bound, UnreachableError, choose
from policies.smdp.model import Problem, build_model
from policies.smdp.solver import Solution
from policies.smdp.trial import Trial
from policies.types import Kind, Launch, Request, SpecError

_IDLE = 1e-4  # load at which a request is nearly always alone
_ASKED = 4_000_000  # times that a device is asked when it would answer, in a check of a fleet
_LARGE = 100  # devices; of more, so few requests reach each that the empty queues of the beginning would show
_LARGEST = 1000  # devices that a check can still simulate
_MOST = 100  # numbers of devices that keep the promise and are looked at


@dataclass(frozen=True, slots=True)
class Candidate:
    """So many devices.

    Attributes:
        devices: n.
        solution: the policy of each, and its averages at an n-th of the rate; where the promise is not kept, the
            nearest.
        kept: whether the promise is.
        percentile: 95th of the response time, by simulation of one device, s.
        power: of all, with what they draw idle, W; None where the profile has no energies.
        cost: in the price's unit.
    """

    devices: int
    solution: Solution
    kept: bool
    percentile: float
    power: float | None
    cost: float


@dataclass(frozen=True)
class Demand:
    """What is to be planned for.

    Attributes:
        problem: the system, and the rate of the whole fleet.
        bound: the promise.
        price: what is to be least.
        mixed: whether two tables may be mixed.
        requests: how many are simulated, where simulation is needed.
        seed: of the simulations.
    """

    problem: Problem
    bound: Bound
    price: Price
    mixed: bool
    requests: int
    seed: int

    @property
    def profile(self) -> Profile:
        """Up to the largest batch."""
        return self.problem.profile.truncated(self.problem.max_batch_size)

    def share(self, devices: int) -> Problem:
        """The problem of one of so many devices."""
        return replace(self.problem, arrival_rate=self.problem.arrival_rate / devices)

    def least_cost(self, devices: int) -> float:
        """What so many devices cost at least, whatever their policy."""
        energies = enumerate(self.profile.energies or (), 1)
        least = min((energy / b for b, energy in energies if b >= self.problem.min_batch_size), default=0.0)
        return self.price.cost(devices, self.problem.arrival_rate * least)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        best: of least cost; of equal ones the fewest devices.
        tried: ascending in the number of devices.
        beyond: so many devices, or more, cost no less than the best.
        least_beyond: what that many cost at least.
    """

    best: Candidate
    tried: tuple[Candidate, ...]
    beyond: int
    least_beyond: float


def plan(demand: Demand) -> Plan:
    """The number of devices of least cost that keeps the promise, and their policy.

    Raises:
        SpecError: no number of devices keeps the promise, or too many would be needed, or the problem is malformed.
    """
    tried: dict[int, Candidate] = {}

    def at(devices: int) -> Candidate:
        if devices not in tried:
            tried[devices] = _candidate(demand, devices)
        return tried[devices]

    _check_reachable(demand)
    best = at(_fewest(lambda n: at(n).kept, floor(build_model(demand.problem).load) + 1))
    first = best.devices
    if first > _LARGEST:
        raise SpecError(
            f"{demand.problem.arrival_rate:g} requests per second take {first} devices, plans are for up to "
            f"{_LARGEST}: give a part of the rate; as many parts take as many times the devices"
        )
    for n in count(first + 1):
        if demand.least_cost(n) >= best.cost:
            return Plan(best, tuple(tried[key] for key in sorted(tried)), n, demand.least_cost(n))
        if n - first > _MOST:
            break
        best = min(best, at(n), key=lambda each: each.cost if each.kept else inf)
    raise SpecError(
        f"from {first} to {first + _MOST} devices were tried and more may still pay, for one costs only "
        f"{demand.price.per_device:.4g} ({demand.price.unit}): give what it costs, by --device-price or --idle-power-w"
    )


def _check_reachable(demand: Demand) -> None:
    """Alone on a device nobody waits: what fails there fails everywhere."""
    alone = replace(demand.problem, arrival_rate=_IDLE * build_model(demand.problem).capacity)
    try:
        choose(_fastest_first(alone), demand.bound, demand.mixed)
    except UnreachableError as error:
        raise SpecError(f"no number of devices is enough: {error}") from error


def _fastest_first(problem: Problem) -> Problem:
    """The same with energies of 0, so that the fastest policy is the cheapest."""
    profile = problem.profile
    return replace(problem, profile=replace(profile, energies=(0.0,) * profile.max_batch_size))


def _fewest(keeps: Callable[[int], bool], low: int) -> int:
    """The least number from `low` on that keeps, if each above does: by doubling steps, then by halving."""
    missed, found, step = low - 1, low, 1
    while not keeps(found):
        missed, found, step = found, found + step, 2 * step
    while found - missed > 1:
        middle = (missed + found) // 2
        missed, found = (missed, middle) if keeps(middle) else (middle, found)
    return found


def _candidate(demand: Demand, devices: int) -> Candidate:
    problem, price, kept = demand.share(devices), demand.price, True
    known = problem.profile.energies is not None
    try:
        solution = choose(problem if known else _fastest_first(problem), demand.bound, demand.mixed)
    except UnreachableError as error:
        solution, kept = error.nearest, False
    responses = Trial(problem, demand.requests, demand.seed).run(solution).responses
    working = devices * (solution.mean_power or 0.0)
    return Candidate(
        devices,
        solution,
        kept,
        float(np.quantile(responses, 0.95)),
        devices * price.idle + working if known else None,
        price.cost(devices, working),
    )


def check(demand: Demand, candidate: Candidate) -> dict[str, Run]:
    """The fleet simulated, by how requests are sent: at random, and to the least expected response time.

    The arrivals are others than those by which the policy was chosen. Where devices are many, fewer are sent to the
    least expected response time, and above 100 devices none. The mean power is that beyond idle.
    """
    counts = {"random": demand.requests}
    if candidate.devices <= _LARGE:
        counts["least expected"] = min(demand.requests, _ASKED // candidate.devices)
    rate, runs = demand.problem.arrival_rate, {}
    for name, n in counts.items():
        instants = poisson(rate, (n + 10 * n**0.5 + 10) / rate, np.random.default_rng([demand.seed, 4]))[:n].tolist()
        stations = [_station(demand, candidate, i) for i in range(candidate.devices)]
        route = _route(name, demand, stations)
        runs[name] = run_fleet(stations, [Request(i, at) for i, at in enumerate(instants)], route).whole
    return runs


def _route(name: str, demand: Demand, stations: list[Station]) -> Router:
    if name == "random":
        return random_routing(stations, [1.0] * len(stations), np.random.default_rng([demand.seed, 5]))
    return shortest_expected_delay(stations, [{Kind().model: demand.profile}] * len(stations))


def _station(demand: Demand, candidate: Candidate, index: int) -> Station:
    profile, solution = demand.profile, candidate.solution
    rng = np.random.default_rng([demand.seed, 6, index])
    draw = demand.problem.service.sampler(np.array(profile.service_times), rng)
    policy = solved(solution.batch_size, profile, solution.mix).policy

    def service_time(launch: Launch) -> float:
        return draw(len(launch.requests))

    batcher = Batcher(policy, {Kind().model: profile.max_batch_size}, NoMonitor())
    return Station(batcher, service_time, lambda service: profile.energy(len(service.launch.requests)))


def row_of(candidate: Candidate) -> dict[str, Any]:
    """A candidate, as answers tell it."""
    solution = candidate.solution
    mix = solution.mix and {"probability": solution.mix.probability, "batch_size": list(solution.mix.batch_size)}
    return {
        "devices": candidate.devices,
        "load": solution.load,
        "bound_kept": candidate.kept,
        "w2": solution.w2,
        "batch_size": list(solution.batch_size),
        "mix": mix,
        "mean_response_time_ms": 1e3 * solution.mean_response_time,
        "p95_ms": 1e3 * candidate.percentile,
        "mean_power_w": candidate.power,
        "cost": candidate.cost,
    }
