"""Bounds from flags and specs, and the policy that keeps them: a table of maximum ages, or of batch sizes.

Percentiles are kept by a table of maximum ages (ages.py), which needs the least power. A table of batch sizes
(frontier.py) keeps every other bound, and a percentile where that form is asked for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from policies.objectives.frontier import (
    BOUNDS,
    Bound,
    MeanBound,
    ShareBound,
    UnreachableError,
    choose_weight,
    parse_bound,
)
from policies.objectives.trial import simulated_percentile
from policies.percentile.ages import AgeSolution, ResponseBounds, solve_ages
from policies.profile import Profile
from policies.solver.model import LARGEST_LOAD, Problem, build_model, is_within_largest_load
from policies.solver.solver import Solution
from policies.types import ParameterError, SpecError

FORMS = ("max-ages", "batch-size")  # of the policy that keeps a percentile
_COMPARED = 50_000  # requests simulated for a table of batch sizes in place of one of maximum ages
_LARGEST = 256  # B_max above which one percentile is kept by a table of batch sizes: ages take many seconds a load


def check_form(form: str) -> str:
    """Return the form.

    Raises:
        ParameterError: it is unknown.
    """
    if form not in FORMS:
        raise ParameterError("policy_form", repr(form), f"is neither {' nor '.join(FORMS)}; give one of them")
    return form


def parse_bounds(
    named: Sequence[tuple[str, str]], form: str = FORMS[0], measured_over: int = 400_000, seed: int = 0
) -> Bound | ResponseBounds:
    """Parse one or several bounds that are to be kept together.

    Args:
        named: key and text of each, see `parse_bound`.
        form: of the policy that keeps a percentile, one of `FORMS`.
        measured_over: number of requests simulated to evaluate a share under tables of batch sizes.
        seed: seed of that simulation.

    Raises:
        SpecError: a text is malformed, or the bounds cannot be combined.
    """
    bounds = [parse_bound(key, text, measured_over, seed) for key, text in named]
    shares = tuple((bound.response_time, bound.share) for bound in bounds if isinstance(bound, ShareBound))
    means = [bound.response_time for bound in bounds if isinstance(bound, MeanBound)]
    if len(bounds) == 1 and (form == "batch-size" or not shares):
        return bounds[0]
    if form == "batch-size" or not shares or len(shares) + len(means) < len(bounds) or len(means) > 1:
        first, second = (f"{key.replace('_', '-')} {text}" for key, text in named[:2])
        raise SpecError(
            f"{first} and {second} cannot be kept together; give one of them, or several percentiles and at most one "
            "mean without the batch-size form"
        )
    return ResponseBounds(shares, *means)


def check_power(keys: Collection[str], profile: Profile) -> None:
    """Check that a bound on the power is given for a profile that saves energy.

    Raises:
        SpecError: the profile saves another resource.
    """
    if "power_cap_w" in keys and profile.saved != "energy":
        raise SpecError(
            f"power_cap_w is in W, but profile {profile.name!r} saves {profile.saved}; give resource_cap, in "
            f"{profile.rate_unit}, or a profile with energy_j"
        )


def limits_of(bounds: Mapping[str, float | str]) -> tuple[float, ...]:
    """Return the response times, s, of the percentiles among the bounds of a policy file.

    Raises:
        SpecError: a bound is malformed.
    """
    named = [(key, word) for key, value in bounds.items() if key in BOUNDS for word in str(value).split()]
    found = [parse_bound(key, text) for key, text in named]
    return tuple(bound.response_time for bound in found if isinstance(bound, ShareBound))


def solve_within(
    problem: Problem,
    bound: Bound | ResponseBounds,
    mixed: bool = True,
    requests: int = _COMPARED,
    seed: int = 0,
    least_saving: float = 0.0,
) -> Solution:
    """Return the policy of least power within a bound (for a power cap: of least mean response time).

    A table of maximum ages always launches all requests, at most a largest batch: B_max, the size of the highest
    throughput, or that of the least power a request, whichever takes the least power. If none of these keeps the bound,
    it is the largest power of 2 that does. Above a B_max of 256 or a load of 0.98 one percentile is kept by a table of
    batch sizes.

    Args:
        problem: the system; its w2 is ignored.
        bound: the constraint.
        mixed: whether two tables may be mixed.
        requests: number of requests simulated to evaluate a table of batch sizes in place of one of maximum ages.
        seed: seed of that simulation.
        least_saving: of `solve_ages`, for each of these largest batches; tables of batch sizes do not use it.

    Raises:
        UnreachableError: no policy keeps the bound.
        SpecError: the bound is invalid.
    """
    if not isinstance(bound, ResponseBounds):
        return choose_weight(problem, bound, mixed)
    large = problem.truncated_profile.max_batch_size > _LARGEST or not is_within_largest_load(problem)
    if large and len(bound.shares) == 1 and bound.mean == inf:
        limit, share = bound.shares[0]
        return choose_weight(problem, ShareBound(limit, share, simulated_percentile(share, requests, seed)), mixed)
    profile = problem.truncated_profile
    sizes = range(problem.min_batch_size, profile.max_batch_size + 1)
    fastest = min(sizes, key=lambda b: profile.service_time(b) / b)
    cheapest = min(sizes, key=lambda b: profile.costs[b - 1] / b)
    stable = {b for b in sizes if problem.arrival_rate * profile.service_time(b) <= LARGEST_LOAD * b}
    first = {fastest} | stable & {sizes[-1], cheapest}

    def up_to(largest: int) -> tuple[AgeSolution, bool]:
        """Solve for batches of at most `largest`; the load of the result is that of the problem."""
        if largest == profile.max_batch_size:
            return solve_ages(problem, bound, mixed, least_saving)
        solution, kept = solve_ages(replace(problem, max_batch_size=largest), bound, mixed, least_saving)
        ages = replace(solution.max_ages, max_batch_size=largest)
        return replace(solution, max_ages=ages, load=build_model(problem).load), kept

    found = [up_to(largest) for largest in sorted(first, reverse=True)]
    for power in reversed(range(sizes[-1].bit_length())):
        if any(kept for _, kept in found):
            break
        if 2**power in stable - first:
            found.append(up_to(2**power))
    within = [solution for solution, kept in found if kept]
    if within:
        return min(within, key=lambda solution: solution.mean_power)
    nearest = min((solution for solution, _ in found), key=lambda solution: bound.excess(solution.bounded))
    raise UnreachableError(_unreachable(bound, nearest), nearest)


def _unreachable(bounds: ResponseBounds, nearest: AgeSolution) -> str:
    largest = f"the largest at load {nearest.load:.3g}"
    missed = [
        f"a share of {share:g} within {1e3 * limit:g} ms ({largest} is {round(found, 6):.4g})"
        for (limit, share), found in zip(bounds.shares, nearest.share_within, strict=True)
        if found < share - 1e-9
    ]
    if nearest.mean_response_time > bounds.mean:
        has = f"the nearest policy at load {nearest.load:.3g} has {1e3 * nearest.mean_response_time:.6g} ms"
        missed.append(f"a mean response time of {1e3 * bounds.mean:g} ms ({has})")
    return f"no policy keeps {' and '.join(missed)}; raise the bound"
