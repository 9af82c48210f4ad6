"""A bound on the response time of a pipeline, split over its models so that they use the least resources.

The models follow one another, and the requests of one model are made together. With bounds t_i that add up to the
pipeline's, a call is late only if some request of some model is later than its t_i, hence with at most the probability
sum_i n_i (1 - s_i) (Boole's inequality), where s_i is the share of the requests of model i within t_i, and n_i their
number in a call. Each of m models gets an equal part of the probability: s_i = 1 - (1 - s) / (m n_i).

The t_i are multiples of a part of the bound, of which one is left for what runs between the models. Those of the least
sum of mean resources are found by dynamic programming over R_i(t), the resource of the policy that keeps t and s_i with
the least of it, solved for Poisson arrivals.

Limits: the requests of one call arrive together and not as a Poisson process; the numbers n_i vary; all devices of a
model have the profile of the first. The first two make responses later than R_i(t) knows, and Boole's inequality is
cautious.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        resource: mean use per second by its devices, in the unit of its profile, at the load that is compared.
    """

    response_time: float
    share: float
    resource: float


def split_bound(
    models: Mapping[str, PipelineModel], response_time: float, share: float, parts: int = PARTS
) -> dict[str, ModelBound]:
    """Return a bound for each model, so that a share of the calls is answered within `response_time`, s.

    Args:
        models: by name, at least one, in the order in which they are called.
        response_time: of a call, s.
        share: of the calls, above 0 and below 1.
        parts: number of parts of the response time, above the number of models.

    Raises:
        SpecError: no split keeps the bound at half of the models' capacity.
    """
    calls = _LOAD * min(each.devices * each.profile.capacity / each.requests for each in models.values())
    late = (1.0 - share) / len(models)
    shares = {name: 1.0 - late / each.requests for name, each in models.items()}
    most = parts - len(models)  # of one model
    used = {
        name: [_resource(each, calls, response_time * count / parts, shares[name]) for count in range(1, most + 1)]
        for name, each in models.items()
    }
    counts = _least_sum([*used.values()], parts - 1)
    if counts is None:
        needed = ", ".join(f"{name} {_first(found, response_time / parts)}" for name, found in used.items())
        raise SpecError(
            f"no bounds of {' and '.join(models)} keep {share:.0%} of the calls within {1e3 * response_time:g} ms at "
            f"half of their capacity; they need at least: {needed}; raise the bound"
        )
    return {
        name: ModelBound(response_time * count / parts, shares[name], found[count - 1])
        for (name, found), count in zip(used.items(), counts, strict=True)
    }


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
