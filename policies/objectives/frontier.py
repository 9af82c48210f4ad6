"""Choice of the weight w2: least power within a bound on response times, or least response time within a power cap.

The solved policies, as w2 runs from 0 to infinity, are the vertices of a convex frontier of mean response time W and
mean power P (journal, section VII-B 2). The line through two of them has the slope at which both have the same cost.
Solving for that weight either finds a vertex below the line or proves that the two are neighbours. The search for a
bound therefore takes a few solves, without a grid of weights, and ends at the exact breakpoint of two neighbours.

The paper takes the vertex of the largest weight within the bound. A mix of the two neighbouring tables, drawn at each
decision epoch, meets the bound exactly. At the breakpoint both tables are optimal, hence so is every mix, and the
averages lie on the edge between them. This is optimal for a bound on a mean, and a heuristic for a percentile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot, inf
from operator import attrgetter

import scipy

from policies.objectives.trial import simulated_percentile
from policies.solver.model import Problem, build_model, check_limit
from policies.solver.solver import Solution, evaluate, solve
from policies.types import Mix, ParameterError, SpecError

SHARE = 0.95  # of the requests, which slo_p95_ms bounds
_ON_LINE = 1e-7  # a policy below the line through two others by less than this share is not a vertex of its own
_OFFSET = 1e-6  # relative distance from a breakpoint at which one of its two policies is strictly the best
_ROUNDING = 1e-9  # averages agree to 1e-10
_POWER_ONLY = 1e4  # w2, in units of the order of 1, at which only power matters
_COARSE = 0.1  # resolution of a frontier on which a starting point is sought
_BISECTIONS = 12  # for the probability of a mix, if it is found by simulation


@dataclass(frozen=True, slots=True)
class MeanBound:
    """The mean response time is at most `response_time`, s."""

    response_time: float


@dataclass(frozen=True, slots=True)
class ShareBound:
    """At least `share` of the requests are answered within `response_time`: a bound on a percentile.

    Attributes:
        response_time: s.
        share: above 0 and below 1.
        percentile: returns the time, s, within which that share is answered under a policy, by simulation with common
            random numbers.
    """

    response_time: float
    share: float
    percentile: Callable[[Problem, Solution], float]


@dataclass(frozen=True, slots=True)
class PowerBound:
    """The mean power is at most `power`, W, or of another resource in its unit per second."""

    power: float


Bound = MeanBound | ShareBound | PowerBound


BOUNDS = ("slo_mean_ms", "slo_p95_ms", "slo_share", "power_cap_w", "resource_cap")


def parse_bound(key: str, text: str, measured_over: int = 400_000, seed: int = 0) -> Bound:
    """Parse a bound.

    Args:
        key: one of `BOUNDS`; resource_cap is in the unit of the profile's resource per second.
        text: a number in that unit; for slo_share MS:SHARE.
        measured_over: number of requests simulated to evaluate a share.
        seed: seed of that simulation.

    Raises:
        ParameterError: the text is not a number, or not MS:SHARE, or the bound is out of range.
    """
    has_share = key == "slo_share"
    try:
        limit, *rest = (float(word) for word in (text.split(":") if has_share else [text]))
        if len(rest) != has_share or not 0.0 < limit < inf or not all(0.0 < share < 1.0 for share in rest):
            raise ValueError
    except ValueError:
        usage = "MS:SHARE, with MS above 0 and SHARE between 0 and 1, such as 10:0.95"
        raise ParameterError(
            key, repr(text), f"is not a valid bound; give {usage if has_share else 'a number above 0'}"
        ) from None
    if key in ("power_cap_w", "resource_cap"):
        return PowerBound(limit)
    if key == "slo_mean_ms":
        return MeanBound(limit / 1e3)
    share = rest[0] if rest else SHARE
    return ShareBound(limit / 1e3, share, simulated_percentile(share, measured_over, seed))


class UnreachableError(SpecError):
    """No policy keeps a bound.

    Attributes:
        nearest: the policy nearest to the bound.
    """

    def __init__(self, message: str, nearest: Solution) -> None:
        super().__init__(message)
        self.nearest = nearest


def choose_weight(problem: Problem, bound: Bound, mixed: bool = True) -> Solution:
    """Return the policy of least power within a bound on response times, or of least response time within a power cap.

    Args:
        problem: the system; its w2 is ignored.
        bound: the constraint.
        mixed: whether two neighbouring vertices may be mixed. If not, the result is the vertex of the largest weight
            (for a power cap: the smallest), as in the paper.

    Returns:
        The policy, its averages and its weight. If the bound is not active, this is the policy of least power, with a
        weight at which only power matters (for a power cap: the fastest policy, with w2 = 0).

    Raises:
        UnreachableError: no policy keeps the bound; the message gives the nearest value.
        SpecError: the bound is invalid.
    """
    _check(problem, bound)
    scale = _scale(problem)
    solution, kept = _choose_scaled(scale.problem(problem), scale.bound(bound), mixed)
    found = scale.back(solution)
    if not kept:
        raise UnreachableError(_unreachable(problem, bound, found), found)
    return found


def frontier(problem: Problem, resolution: float = 0.0) -> list[Solution]:
    """Return the vertices of the frontier of mean response time and mean power, the fastest first.

    Args:
        problem: the system; its w2 is ignored.
        resolution: no vertex is sought between two that are nearer than this share of the frontier's width and height.
            With random service times there are hundreds of vertices.
    """
    scale = _scale(problem)
    return [scale.back(solution) for solution in _frontier(scale.problem(problem), resolution)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units in which response time and power are of the order of 1, for any unit of energy and any arrival rate.

    Attributes:
        time: mean time in which a full batch arrives, ms.
        power: power of one batch of the largest energy in that time, W.
        w1: the caller's weight w1.
    """

    time: float
    power: float
    w1: float

    def problem(self, problem: Problem) -> Problem:
        """Convert a problem to these units."""
        costs = tuple(cost / self.power for cost in problem.profile.costs)
        profile = replace(problem.profile.charged, energies=costs)
        return replace(problem, w1=1.0 / self.time, w2=0.0, profile=profile)

    def bound(self, bound: Bound) -> Bound:
        """Convert a bound to these units; times stay in seconds."""
        return replace(bound, power=bound.power / self.power) if isinstance(bound, PowerBound) else bound

    def back(self, solution: Solution) -> Solution:
        """Convert a solution to the caller's units."""
        cost = self.w1 * self.time
        return replace(
            solution,
            w1=self.w1,
            w2=solution.w2 * cost / self.power,
            gain=solution.gain * cost,
            mean_power=solution.mean_power * self.power,
            energy_per_request=solution.energy_per_request * self.power,
        )


def _scale(problem: Problem) -> _Scale:
    gather = build_model(problem).max_batch_size / problem.arrival_rate
    return _Scale(1e3 * gather, (max(problem.profile.costs) or 1.0) / gather, problem.w1)


def _choose_scaled(problem: Problem, bound: Bound, mixed: bool) -> tuple[Solution, bool]:
    """Return the policy (in scaled units), or the nearest one if none keeps the bound, and whether it keeps it."""
    kept = _keeps(problem, bound)
    fast, cheap = _fastest(problem, bound), solve(replace(problem, w2=_POWER_ONLY))
    inside, outside = (cheap, fast) if isinstance(bound, PowerBound) else (fast, cheap)
    if kept(outside):
        return outside, True
    if not kept(inside):
        return inside, False
    inside, outside = _neighbours(problem, kept, inside, outside)
    return (_mixed(problem, bound, inside, outside) if mixed else inside), True


def _frontier(problem: Problem, resolution: float) -> list[Solution]:
    """Return the frontier in scaled units."""
    ends = solve(replace(problem, w2=0.0)), solve(replace(problem, w2=_POWER_ONLY))
    found, pending = [ends[0]], [ends[1]]
    width, height = _differences(*ends)
    while pending:
        slower, cheaper = _differences(found[-1], pending[-1])
        near = hypot(slower / (width or 1.0), cheaper / (height or 1.0)) < resolution
        between = None if near else _vertex_below(problem, found[-1], pending[-1])
        if between is None:
            found.append(pending.pop())
        else:
            pending.append(between)
    return found


def _differences(fast: Solution, cheap: Solution) -> tuple[float, float]:
    """Return the increase of the mean response time, s, and the decrease of the mean power."""
    return cheap.mean_response_time - fast.mean_response_time, fast.mean_power - cheap.mean_power


def breakpoint_of(fast: Solution, cheap: Solution) -> float:
    """Return the weight w2 at which both policies have the same cost."""
    slower = 1e3 * fast.w1 * (cheap.mean_response_time - fast.mean_response_time)
    return slower / (fast.mean_power - cheap.mean_power)


def _vertex_below(problem: Problem, fast: Solution, cheap: Solution) -> Solution | None:
    """Return a vertex below the line through these two; None if they are neighbours."""
    if not _is_tradeoff(fast, cheap):
        return None
    w2 = breakpoint_of(fast, cheap)
    found = solve(replace(problem, w2=w2))
    on_the_line = 1e3 * fast.w1 * fast.mean_response_time + w2 * fast.mean_power
    return found if found.gain < on_the_line * (1.0 - _ON_LINE) else None


def _is_tradeoff(fast: Solution, cheap: Solution) -> bool:
    """Return whether one is faster and the other cheaper, by more than rounding."""
    slower, cheaper = _differences(fast, cheap)
    return slower > _ROUNDING * fast.mean_response_time and cheaper > _ROUNDING * fast.mean_power


def _neighbours(
    problem: Problem, kept: Callable[[Solution], bool], inside: Solution, outside: Solution
) -> tuple[Solution, Solution]:
    """Return the last vertex that keeps the bound and the first that does not, each solved near their breakpoint."""
    while True:
        fast, cheap = sorted((inside, outside), key=lambda solution: solution.mean_response_time)
        between = _vertex_below(problem, fast, cheap)
        if between is None:
            break
        inside, outside = (between, outside) if kept(between) else (inside, between)
    if not _is_tradeoff(fast, cheap):
        return inside, inside
    w2 = breakpoint_of(fast, cheap)
    toward = -_OFFSET if inside is fast else _OFFSET
    near, far = (solve(replace(problem, w2=w2 * (1.0 + step))) for step in (toward, -toward))
    return (near, far) if kept(near) and not kept(far) else (inside, outside)  # more than two may tie at w2


def _mixed(problem: Problem, bound: Bound, inside: Solution, outside: Solution) -> Solution:
    """Mix in the outside policy with the largest probability that keeps the bound.

    The averages of a mix of neighbours are on the line between theirs. The solver may take two vertices for neighbours
    although others, which it cannot tell apart, are between them. If their mix is worse than the inside policy, that is
    returned.
    """
    if inside is outside or inside.batch_size[-1] != outside.batch_size[-1]:
        return inside  # different tail sizes: the tail of the mix would have no closed form

    def at(probability: float) -> Solution:
        return evaluate(problem_at, inside.batch_size, Mix(probability, outside.batch_size))

    problem_at = replace(problem, w2=inside.w2)
    match bound:
        case MeanBound(response_time):
            probability = _root(lambda p: at(p).mean_response_time - response_time)
        case PowerBound(power):
            probability = _root(lambda p: at(p).mean_power - power)
        case _:
            probability = _largest_probability(lambda p: _keeps(problem, bound)(at(p)))
    found = at(probability)
    cost = attrgetter("mean_response_time" if isinstance(bound, PowerBound) else "mean_power")
    return found if cost(found) <= cost(inside) else inside


def _root(excess: Callable[[float], float]) -> float:
    """Return the probability at which the bound is met; 0 if the inside policy meets it up to rounding."""
    if not excess(0.0) < 0.0 < excess(1.0):
        return 0.0
    root = float(scipy.optimize.brentq(excess, 0.0, 1.0, xtol=1e-10))
    return max(root - 1e-9, 0.0)  # on the side that keeps the bound


def _largest_probability(kept: Callable[[float], bool]) -> float:
    """Return the largest probability that keeps the bound, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def _fastest(problem: Problem, bound: Bound) -> Solution:
    """Return the policy of least mean response time; if it misses a share bound, the vertex of least percentile."""
    fastest = solve(replace(problem, w2=0.0))
    if isinstance(bound, ShareBound) and not _keeps(problem, bound)(fastest):
        return min(_frontier(problem, _COARSE), key=lambda solution: bound.percentile(problem, solution))
    return fastest


def _keeps(problem: Problem, bound: Bound) -> Callable[[Solution], bool]:
    match bound:
        case MeanBound(response_time):
            return lambda solution: solution.mean_response_time <= response_time
        case PowerBound(power):
            return lambda solution: solution.mean_power <= power
        case ShareBound(response_time, _, percentile):
            return lambda solution: percentile(problem, solution) <= response_time


def _check(problem: Problem, bound: Bound) -> None:
    match bound:
        case PowerBound(power):
            if not 0.0 < power < inf:
                unit = problem.profile.rate_unit
                raise SpecError(f"a bound of {power:g} {unit} is invalid; give a positive number")
        case MeanBound(response_time):
            check_limit(response_time)
        case ShareBound(response_time, share):
            check_limit(response_time, share)


def _unreachable(problem: Problem, bound: Bound, nearest: Solution) -> str:
    at = f"at load {nearest.load:.3g}"
    match bound:
        case MeanBound(response_time):
            least = f"the least {at} is {1e3 * nearest.mean_response_time:.6g} ms"
            return f"no policy keeps the mean response time within {1e3 * response_time:g} ms: {least}; raise the bound"
        case PowerBound(power):
            unit = problem.profile.rate_unit
            least = f"the least {at} is {nearest.mean_power:.6g} {unit}"
            return f"no policy takes at most {power:g} {unit}: {least}; raise the bound"
        case ShareBound(response_time, share, percentile):
            least = f"the least time {at} is {1e3 * percentile(problem, nearest):.4g} ms"
            return f"no policy answers a share of {share:g} within {1e3 * response_time:g} ms: {least}; raise the bound"
