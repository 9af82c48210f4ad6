"""Capacity planning of a pipeline: the devices of least cost of each of its models that keep its percentile.

The bound is split over the models as for a server (pipeline_bounds.py), here by the cost of the devices that a model
needs for its part (devices.py). The simulation has the requests of a call arrive together, and those of the next model
when the last of them is answered, which the split only bounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from policies.objectives.frontier import UnreachableError
from policies.percentile.ages import ResponseBounds
from policies.planning.devices import (
    ROUTINGS,
    CapacityProblem,
    FleetCandidate,
    evaluate_devices,
    make_fleet,
    plan_capacity,
    simulated_requests,
)
from policies.planning.pipeline_bounds import ModelBound, least_cost_split
from policies.queue.arrivals import poisson
from policies.queue.simulator import serve
from policies.types import Request, SpecError

_SIMULATED = 20_000  # requests, of each number of devices that is tried


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A model of a pipeline: the planning of its devices, whose bound is chosen here, and its requests in a call."""

    planning: CapacityProblem
    requests: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The devices of one model.

    Attributes:
        bound: its part of the pipeline's.
        planning: the problem, with that bound.
        fleet: its devices.
    """

    bound: ModelBound
    planning: CapacityProblem
    fleet: FleetCandidate


def parse_steps(text: str) -> list[tuple[str, float]]:
    """Parse PROFILE:REQUESTS,PROFILE:REQUESTS, the profiles of a pipeline's models and their requests in a call.

    The list is empty if the text is no such list, but one profile.

    Raises:
        SpecError: a number of requests is missing or not positive.
    """
    entries = [entry.rpartition(":") for entry in text.split(",")]
    if len(entries) == 1 and not entries[0][1]:
        return []
    try:
        steps = [(name, float(number)) for name, _, number in entries]
    except ValueError:
        steps = []
    if not steps or not all(name and 0.0 < number < inf for name, number in steps):
        raise SpecError(
            f"{text!r} is not the models of a pipeline; write PROFILE:REQUESTS,PROFILE:REQUESTS with the requests of a "
            "call, above 0"
        )
    return steps


def plan_pipeline(
    steps: Mapping[str, PipelineStep],
    response_time: float,
    share: float,
    on_trial: Callable[[str], None] = lambda _: None,
) -> dict[str, StepPlan]:
    """Find the devices of each model that together cost least, and the split with which they use the least resources.

    Args:
        steps: by model, in the order in which they are called; the problems' rates are those of its requests.
        response_time: of a call, s.
        share: of the calls to be answered within it.
        on_trial: called with a model before it is solved for one part of the bound.

    Raises:
        SpecError: no number of devices keeps the bound, or a problem is malformed.
    """
    requests = {name: step.requests for name, step in steps.items()}

    def bounded(name: str, response_time: float, share: float) -> CapacityProblem:
        return replace(steps[name].planning, bound=ResponseBounds(((response_time, share),)), requests=_SIMULATED)

    @cache
    def fleet(name: str, response_time: float, share: float) -> FleetCandidate:
        on_trial(name)
        return plan_capacity(bounded(name, response_time, share)).best

    def cost(name: str, response_time: float, share: float) -> float:
        try:
            return fleet(name, response_time, share).cost
        except SpecError:
            return inf

    def resource(name: str, response_time: float, share: float) -> float:
        on_trial(name)
        planning, devices = bounded(name, response_time, share), fleets[name].devices - steps[name].planning.spare
        try:
            return devices * planning.keep(planning.per_device(devices)).mean_power
        except UnreachableError:
            return inf

    for name, number in requests.items():
        try:
            fleet(name, response_time, 1.0 - (1.0 - share) / len(requests) / number)
        except SpecError as error:  # says why the model alone is impossible
            raise SpecError(f"{name}: {error}") from error
    cheapest = least_cost_split(requests, cost, response_time, share)
    fleets = {name: fleet(name, bound.response_time, bound.share) for name, bound in cheapest.items()}
    split = least_cost_split(requests, resource, response_time, share)
    plans = {}
    for name, bound in split.items():
        planning = bounded(name, bound.response_time, bound.share)
        plans[name] = StepPlan(bound, planning, evaluate_devices(planning, fleets[name].devices))
    return plans


def simulate_pipeline(
    plans: Sequence[StepPlan], requests: Sequence[float], rate: float, calls: int, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Simulate calls; return their response times, s, by routing.

    Args:
        plans: of the models, in the order in which they are called.
        requests: of each in a call. Of a number that is not whole the calls get one more at random.
        rate: of the calls, 1/s.
        calls: number of calls.
        seed: seed of the arrivals.
    """
    return {
        routing: _simulate(plans, requests, rate, calls, seed, routing)
        for routing, most in ROUTINGS.items()
        if all(each.fleet.devices <= most for each in plans)
    }


def _simulate(
    plans: Sequence[StepPlan], requests: Sequence[float], rate: float, calls: int, seed: int, routing: str
) -> NDArray[np.float64]:
    rng = np.random.default_rng([seed, 7])
    calls = min(
        simulated_requests(routing, calls, each.fleet.devices * max(1, round(number)))
        for each, number in zip(plans, requests, strict=True)
    )
    arrived = poisson(rate, (calls + 10 * calls**0.5 + 10) / rate, rng)[:calls]
    ready = arrived.copy()
    for step, number in zip(plans, requests, strict=True):
        counts = int(number) + (rng.random(calls) < number % 1.0)
        order = np.argsort(ready, kind="stable")
        call = np.repeat(order, counts[order])  # of each request
        finished = np.empty(len(call))
        stations, route = make_fleet(step.planning, step.fleet, routing)
        for _, service in serve(stations, [Request(i, at) for i, at in enumerate(ready[call].tolist())], route):
            finished[[request.id for request in service.finished]] = service.finish
        np.maximum.at(ready, call, finished)
    return ready - arrived
