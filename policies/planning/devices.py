"""Capacity planning: the number of devices of least cost that keeps a response-time bound, and their policy.

Arrivals are split evenly and at random, so that each of n devices has Poisson arrivals at 1/n of the rate. The solver
gives the policy of least power that keeps the bound at this rate. Three properties limit the search:

- Feasibility is monotone in n. At a lower rate a device can act as if additional virtual requests arrived, and is no
  slower, since smaller batches take no longer. The fewest devices are therefore found by bisection.
- With k spare devices the fewest are k more, since the bound has to be kept without them.
- The cost has a lower bound that increases with n: the price and idle power of n devices, plus the arrival rate times
  the least energy per request, min over b of zeta(b) / b. The search ends once this bound exceeds the best cost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from math import floor, inf
from typing import Any

import numpy as np

from policies.catalog import solved
from policies.objectives.bounds import solve_within
from policies.objectives.frontier import Bound, MeanBound, ShareBound, UnreachableError
from policies.objectives.table import ages_json
from policies.objectives.trial import Trial
from policies.percentile.ages import AgeSolution, ResponseBounds
from policies.planning.prices import Price
from policies.profile import Resource
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.fleet import random_routing, run_fleet, shortest_expected_delay
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import Router, Run, Station, estimate, share_within
from policies.solver.model import Problem, build_model
from policies.solver.solver import Solution
from policies.types import BatchKey, Launch, Request, SpecError

_IDLE = 1e-4  # load at which a request is nearly always alone
_MAX_EVALUATIONS = 4_000_000  # of the expected delay of a device, in the simulation of a fleet
MAX_DEVICES = 1000  # that can be simulated
# By routing, the most devices: with more, each serves so few requests that the initial transient would matter.
ROUTINGS = {"random": MAX_DEVICES, "least expected": 100}
_TOLERANCE = 1.01  # of the bound in a simulation, since it was itself chosen by one
_MAX_TRIED = 100  # feasible numbers of devices to evaluate


@dataclass(frozen=True, slots=True)
class FleetCandidate:
    """A number of devices and its evaluation.

    Attributes:
        devices: n.
        solution: the policy of each device, and its averages at 1/n of the rate; if the bound cannot be kept, the
            nearest policy.
        kept: whether the bound is kept.
        percentile: 95th percentile of the response time, by simulation of one device, s.
        power: mean power of all devices, idle power included, W; of another resource cores, or busy devices.
        cost: cost in the unit of the price.
    """

    devices: int
    solution: Solution
    kept: bool
    percentile: float
    power: float
    cost: float


@dataclass(frozen=True)
class CapacityProblem:
    """The problem of capacity planning.

    Attributes:
        problem: the system, with the arrival rate of the whole fleet.
        bound: bound on the response time.
        price: the cost to minimise.
        mixed: whether two tables may be mixed.
        requests: number of requests of each simulation.
        seed: seed of the simulations.
        spare: devices that may be out of service while the others keep the bound.
    """

    problem: Problem
    bound: Bound | ResponseBounds
    price: Price
    mixed: bool
    requests: int
    seed: int
    spare: int = 0

    def per_device(self, devices: int) -> Problem:
        """Return the problem of one of this many devices, which share the arrivals equally."""
        return replace(self.problem, arrival_rate=self.problem.arrival_rate / devices)

    def keep(self, problem: Problem) -> Solution:
        """Return the policy of one device that keeps the bound, chosen by the simulation that evaluates it."""
        return solve_within(problem, self.bound, self.mixed, self.requests, self.seed)

    def least_cost(self, devices: int) -> float:
        """Return the least cost of this many devices under any policy."""
        costs = enumerate(self.problem.truncated_profile.costs, 1)
        least = min(cost / b for b, cost in costs if b >= self.problem.min_batch_size)
        return self.price.cost(devices, self.problem.arrival_rate * least)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The result of capacity planning.

    Attributes:
        best: the candidate of least cost; of equal ones the fewest devices.
        candidates: all evaluated, ascending in the number of devices.
        beyond: number of devices from which on none costs less than the best.
        least_beyond: the least cost of that many.
    """

    best: FleetCandidate
    candidates: tuple[FleetCandidate, ...]
    beyond: int
    least_beyond: float


def plan_capacity(planning: CapacityProblem, on_trial: Callable[[int], None] = lambda _: None) -> CapacityPlan:
    """Find the number of devices of least cost that keeps the bound, and their policy.

    Args:
        planning: the problem.
        on_trial: called with each number of devices before it is evaluated.

    Raises:
        SpecError: no number of devices keeps the bound, too many would be needed, or the problem is malformed.
    """
    tried: dict[int, FleetCandidate] = {}

    def at(devices: int) -> FleetCandidate:
        if devices not in tried:
            on_trial(devices)
            tried[devices] = evaluate_devices(planning, devices)
        return tried[devices]

    _check_reachable(planning)
    first = fewest(lambda n: at(n).kept, floor(build_model(planning.problem).load) + 1) + planning.spare
    if first > MAX_DEVICES:
        raise SpecError(
            f"{planning.problem.arrival_rate:g} requests per second need {first} devices, spare ones included, above "
            f"the maximum of {MAX_DEVICES} for a plan: plan for a fraction of the rate and scale the number of devices"
        )
    best = at(first)
    for n in count(first + 1):
        if planning.least_cost(n) >= best.cost:
            return CapacityPlan(best, tuple(tried[key] for key in sorted(tried)), n, planning.least_cost(n))
        if n - first > _MAX_TRIED:
            break
        best = min(best, at(n), key=lambda each: each.cost if each.kept else inf)
    raise SpecError(
        f"{first} to {first + _MAX_TRIED} devices were tried and more may still cost less, since one costs only "
        f"{planning.price.per_device:.4g} ({planning.price.unit}): give its cost by --device-price or --idle-power-w"
    )


def _check_reachable(planning: CapacityProblem) -> None:
    """Check the bound at a load near 0, where it is easiest to keep."""
    alone = replace(planning.problem, arrival_rate=_IDLE * build_model(planning.problem).capacity)
    try:
        planning.keep(_fastest_first(alone))
    except UnreachableError as error:
        alone_ms = 1e3 * planning.problem.profile.service_times[0]
        raise SpecError(
            f"no number of devices is enough: one request alone takes {alone_ms:.4g} ms, and {error}"
        ) from error


def _fastest_first(problem: Problem) -> Problem:
    """Return the problem with costs of 0, for which the fastest policy is the cheapest."""
    profile = problem.profile
    return replace(problem, profile=replace(profile.charged, energies=(0.0,) * profile.max_batch_size))


def fewest(keeps: Callable[[int], bool], low: int) -> int:
    """Return the least feasible number from `low` on, by doubling steps and bisection; feasibility is monotone."""
    missed, found, step = low - 1, low, 1
    while not keeps(found):
        missed, found, step = found, found + step, 2 * step
    while found - missed > 1:
        middle = (missed + found) // 2
        missed, found = (missed, middle) if keeps(middle) else (middle, found)
    return found


def evaluate_devices(planning: CapacityProblem, devices: int) -> FleetCandidate:
    """Return this many devices with the policy that keeps the bound, or else the nearest one."""
    problem, price, kept = planning.per_device(devices), planning.price, True
    try:
        solution = planning.keep(problem)
    except UnreachableError as error:
        solution, kept = error.nearest, False
    responses = Trial(problem, planning.requests, planning.seed).run(solution).responses
    working = devices * solution.mean_power
    return FleetCandidate(
        devices,
        solution,
        kept,
        float(np.quantile(responses, 0.95)),
        devices * price.idle + working,
        price.cost(devices, working),
    )


def simulate_fleet(planning: CapacityProblem, candidate: FleetCandidate) -> dict[str, Run]:
    """Simulate the fleet with random routing and with routing by shortest expected delay ("least expected").

    The arrivals differ from those by which the policy was chosen. Routing by expected delay is simulated with fewer
    requests on a large fleet, and not at all above 100 devices. The mean power excludes idle power.
    """
    rate, runs = planning.problem.arrival_rate, {}
    for name, most in ROUTINGS.items():
        if candidate.devices <= most:
            n = simulated_requests(name, planning.requests, candidate.devices)
            rng = np.random.default_rng([planning.seed, 4])
            instants = poisson(rate, (n + 10 * n**0.5 + 10) / rate, rng)[:n].tolist()
            stations, route = make_fleet(planning, candidate, name)
            runs[name] = run_fleet(stations, [Request(i, at) for i, at in enumerate(instants)], route).whole
    return runs


def simulated_requests(routing: str, requests: int, devices: int) -> int:
    """Return the number of requests that are simulated with this routing, at most `requests`."""
    return requests if routing == "random" else min(requests, _MAX_EVALUATIONS // devices)


def make_fleet(planning: CapacityProblem, candidate: FleetCandidate, routing: str) -> tuple[list[Station], Router]:
    """Return idle devices, and one of `ROUTINGS` to them."""
    stations = [_station(planning, candidate, i) for i in range(candidate.devices)]
    return stations, _route(routing, planning, stations)


def keeps(run: Run, bound: Bound | ResponseBounds) -> bool:
    """Return whether a simulated run keeps a bound on response times, within 1 per cent and three standard errors."""
    match bound:
        case ResponseBounds(shares, mean):
            pass
        case ShareBound(limit, share):
            shares, mean = ((limit, share),), inf
        case MeanBound(mean):
            shares = ()
        case _:
            raise TypeError(bound)
    average = estimate(run.responses, lambda block: float(block.mean()))
    within = [(share_within(run.responses, _TOLERANCE * limit), share) for limit, share in shares]
    return average.value - 3 * average.standard_error <= _TOLERANCE * mean and all(
        found.value + 3 * found.standard_error >= share for found, share in within
    )


def _route(name: str, planning: CapacityProblem, stations: list[Station]) -> Router:
    if name == "random":
        return random_routing(stations, [1.0] * len(stations), np.random.default_rng([planning.seed, 5]))
    return shortest_expected_delay(stations, [{BatchKey().model: planning.problem.truncated_profile}] * len(stations))


def _station(planning: CapacityProblem, candidate: FleetCandidate, index: int) -> Station:
    profile, solution = planning.problem.truncated_profile.charged, candidate.solution
    rng = np.random.default_rng([planning.seed, 6, index])
    draw = planning.problem.service.sampler(np.array(profile.service_times), rng)
    ages = solution.max_ages if isinstance(solution, AgeSolution) else None
    policy = solved(solution.batch_size, profile, solution.mix, ages).policy

    def service_time(launch: Launch) -> float:
        return draw(len(launch.requests))

    batcher = Batcher(policy, {BatchKey().model: profile.max_batch_size}, NoMonitor())
    return Station(batcher, service_time, lambda service: profile.energy(len(service.launch.requests)))


def candidate_row(candidate: FleetCandidate, resource: Resource) -> dict[str, Any]:
    """Return the JSON object of a candidate, whose power is that of this resource."""
    metered = resource == "energy"
    solution = candidate.solution
    mix = solution.mix and {"probability": solution.mix.probability, "batch_size": list(solution.mix.batch_size)}
    return {
        "devices": candidate.devices,
        "load": solution.load,
        "bound_kept": candidate.kept,
        "w2": solution.w2,
        "batch_size": list(solution.batch_size),
        "mix": mix,
        **(ages_json(solution.max_ages) if isinstance(solution, AgeSolution) else {}),
        "mean_response_time_ms": 1e3 * solution.mean_response_time,
        "p95_ms": 1e3 * candidate.percentile,
        "mean_power_w": candidate.power if metered else None,
        **({} if metered else {"mean_resource": candidate.power}),
        "cost": candidate.cost,
    }
