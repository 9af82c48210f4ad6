"""A bound on the response time of a pipeline, split over its models so that they use the least resources.

The models follow one another, and the requests of one model are made together. With bounds t_i that add up to the
pipeline's, a call is late only if some request of some model is later than its t_i, hence with at most the probability
sum_i n_i (1 - s_i) (Boole's inequality), where s_i is the share of the requests of model i within t_i, and n_i their
number in a call. Each of m models gets an equal part of the probability: s_i = 1 - (1 - s) / (m n_i).

The t_i are multiples of a part of the bound, of which one is left for what runs between the models. Those of the least
sum of costs are found by dynamic programming over R_i(t), the least cost of keeping t and s_i for Poisson arrivals: for
given devices the mean resource of their policies, for a plan that of the devices that it finds.

Limits: the requests of one call arrive together and not as a Poisson process; the numbers n_i vary; all devices of a
model have the profile of the first. The first two make responses later than R_i(t) knows, and Boole's inequality is
cautious.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from policies.objectives.bounds import solve_within
from policies.objectives.frontier import UnreachableError
from policies.percentile.ages import ResponseBounds
from policies.profile import Profile
from policies.solver.distributions import measured_service
from policies.solver.model import Problem
from policies.types import SpecError

PARTS = 16  # of a bound
_LOAD = 0.5  # of the model with the highest load, at which resources are compared


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A model of a pipeline.

    Attributes:
        profile: of its device.
        requests: number in a call, at least 1.
        devices: number of its devices, among which the requests are spread.
    """

    profile: Profile
    requests: float
    devices: int = 1


@dataclass(frozen=True, slots=True)
class ModelBound:
    """The bound of one model.

    Attributes:
        response_time: s.
        share: of its requests to be within that time.
        cost: of keeping it.
    """

    response_time: float
    share: float
    cost: float


Cost = Callable[[str, float, float], float]  # of a model within a response time, s, for a share; inf: impossible


def split_bound(
    models: Mapping[str, PipelineModel], response_time: float, share: float, parts: int = PARTS
) -> dict[str, ModelBound]:
    """Return a bound for each model, so that a share of the calls is answered within `response_time`, s.

    A model's cost is the mean use per second by its devices, in the unit of its profile, at half of the models'
    capacity.

    Args:
        models: by name, at least one, in the order in which they are called.
        response_time: of a call, s.
        share: of the calls, above 0 and below 1.
        parts: number of parts of the response time, above the number of models.

    Raises:
        SpecError: no split keeps the bound at half of the models' capacity.
    """
    calls = _LOAD * min(each.devices * each.profile.capacity / each.requests for each in models.values())

    def resource(name: str, response_time: float, share: float) -> float:
        return _resource(models[name], calls, response_time, share)

    requests = {name: each.requests for name, each in models.items()}
    return least_cost_split(requests, resource, response_time, share, parts, " at half of their capacity")


def least_cost_split(
    requests: Mapping[str, float], cost: Cost, response_time: float, share: float, parts: int = PARTS, where: str = ""
) -> dict[str, ModelBound]:
    """Return the bounds of the models that cost least.

    Args:
        requests: of a call, by model, in the order in which they are called.
        cost: of a model; it does not rise with the response time.
        response_time: of a call, s.
        share: of the calls, above 0 and below 1.
        parts: number of parts of the response time, above the number of models.
        where: the condition under which costs are compared, for the error.

    Raises:
        SpecError: no split keeps the bound.
    """
    late, most = (1.0 - share) / len(requests), parts - len(requests)
    shares = {name: 1.0 - late / number for name, number in requests.items()}

    def with_parts(name: str, count: int) -> float:
        return cost(name, response_time * count / parts, shares[name])

    costs = {name: _costs_by_parts(partial(with_parts, name), most) for name in requests}
    counts = _least_sum([*costs.values()], parts - 1)
    if counts is None:
        needed = ", ".join(f"{name} {_first(found, response_time / parts)}" for name, found in costs.items())
        raise SpecError(
            f"no bounds of {' and '.join(requests)} keep {share:.0%} of the calls within {1e3 * response_time:g} ms"
            f"{where}; they need at least: {needed}; raise the bound"
        )
    return {
        name: ModelBound(response_time * count / parts, shares[name], found[count - 1])
        for (name, found), count in zip(costs.items(), counts, strict=True)
    }


def _costs_by_parts(cost: Callable[[int], float], most: int) -> list[float]:
    """Costs with 1 to `most` parts; what is between two equal ones is equal."""
    costs = {count: cost(count) for count in {1, most}}
    ranges = [(1, most)]
    while ranges:
        low, high = ranges.pop()
        if costs[low] == costs[high]:
            costs |= dict.fromkeys(range(low, high), costs[low])
        elif high - low > 1:
            middle = (low + high) // 2
            costs[middle] = cost(middle)
            ranges += [(low, middle), (middle, high)]
    return [costs[count] for count in range(1, most + 1)]


def _resource(model: PipelineModel, calls: float, response_time: float, share: float) -> float:
    """Mean use of the model's resource per second at this rate of calls, 1/s; inf if no policy keeps the bound."""
    profile = model.profile
    problem = Problem(profile, calls * model.requests / model.devices, service=measured_service(profile))
    try:
        return model.devices * solve_within(problem, ResponseBounds(((response_time, share),))).mean_power
    except UnreachableError:
        return inf


def _least_sum(used: Sequence[Sequence[float]], parts: int) -> list[int] | None:
    """Parts for each, at least 1 and `parts` in all, with the least finite sum of what they use; None without one."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by the parts given so far
    for found in used:
        following: dict[int, tuple[float, list[int]]] = {}
        for given, (total, counts) in best.items():
            for count, use in enumerate(found, 1):
                at = given + count
                if at <= parts and total + use < following.get(at, (inf, []))[0]:
                    following[at] = total + use, [*counts, count]
        best = following
    return min(best.values(), key=lambda each: each[0])[1] if best else None


def _first(found: Sequence[float], part: float) -> str:
    """The least time with a policy that keeps it, in words."""
    count = next((count for count, use in enumerate(found, 1) if use < inf), None)
    return "more than the bound" if count is None else f"{1e3 * count * part:.4g} ms"
