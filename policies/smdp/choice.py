"""Choice of the weight: the policy of least power that keeps a bound on response times, or the fastest within a power.

The solved policies, as w2 runs from 0 to infinity, are the vertices of a convex frontier of mean response time W and
mean power P (journal, section VII-B 2). The line through two of them has the slope at which both would cost the same:
solving for that weight either finds a vertex below the line or proves the two to be neighbours. So a bound is closed
in on in a few solves, without a grid of weights, and the weight found is the exact breakpoint of two neighbours.

The paper stops at the vertex within the bound, that of the largest weight. A mix of the two neighbouring tables, drawn
at each decision epoch, goes on to the bound itself: at the breakpoint both are optimal, hence so is every mix, and the
averages move along the edge between them. That is the optimum where the mean is bounded; where a percentile is, it is
a good heuristic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot, inf

from scipy.optimize import brentq

from policies.smdp.model import Problem, build_model
from policies.smdp.solver import Solution, evaluate, solve
from policies.smdp.trial import simulated_percentile
from policies.types import Mix, SpecError

_SAME = 1e-7  # a policy below the line through two others by less than this share is no third vertex
_BESIDE = 1e-6  # relative distance from a breakpoint at which one of its two policies is the best for certain
_ROUNDING = 1e-9  # averages agree to 1e-10
_HEAVY = 1e4  # w2, in units of the order of 1, at which power is all that counts
_COARSE = 0.1  # resolution at which a frontier is looked over
_SEARCH = 12  # halvings of the probability of a mix where it is found by simulation


@dataclass(frozen=True, slots=True)
class MeanBound:
    """The mean response time is at most `response_time`, s."""

    response_time: float


@dataclass(frozen=True, slots=True)
class ShareBound:
    """At least `share` of the requests are answered within `response_time`, s; a percentile said the other way round.

    Attributes:
        response_time: s.
        share: above 0 and below 1.
        percentile: the time, s, within which that share is answered under a policy: simulated, with the same arrivals
            for each.
    """

    response_time: float
    share: float
    percentile: Callable[[Problem, Solution], float]


@dataclass(frozen=True, slots=True)
class PowerBound:
    """The mean power is at most `power`, W."""

    power: float


Bound = MeanBound | ShareBound | PowerBound


BOUNDS = ("slo_mean_ms", "slo_p95_ms", "slo_share", "power_cap_w")


def parse_bound(key: str, text: str, measured_over: int = 400_000, seed: int = 0) -> Bound:
    """The bound of this name.

    Args:
        key: slo_mean_ms, slo_p95_ms, slo_share or power_cap_w.
        text: a number in that unit; for slo_share MS:SHARE.
        measured_over: requests simulated where a share has to be known.
        seed: of that simulation.

    Raises:
        SpecError: the text is no such number.
    """
    words = text.split(":") if key == "slo_share" else [text]
    try:
        limit, *rest = (float(word) for word in words)
        if len(rest) != (key == "slo_share"):
            raise ValueError
    except ValueError:
        usage = "MS:SHARE, for example 10:0.95" if key == "slo_share" else "a number"
        raise SpecError(f"{key} {text!r} is no bound; give {usage}") from None
    match key:
        case "slo_mean_ms":
            return MeanBound(limit / 1e3)
        case "power_cap_w":
            return PowerBound(limit)
        case _:
            share = rest[0] if rest else 0.95
            return ShareBound(limit / 1e3, share, simulated_percentile(share, measured_over, seed))


class UnreachableError(SpecError):
    """No policy keeps a bound.

    Attributes:
        nearest: the policy that comes nearest.
    """

    def __init__(self, message: str, nearest: Solution) -> None:
        super().__init__(message)
        self.nearest = nearest


def choose(problem: Problem, bound: Bound, mixed: bool = True) -> Solution:
    """The policy of least power within a bound on response times, or of least response time within one on power.

    Args:
        problem: its w2 is not looked at.
        bound: what has to hold.
        mixed: whether two neighbouring vertices may be mixed; if not, the vertex of the largest weight (for a bound on
            power: the smallest) stands, as in the paper.

    Returns:
        The policy, its averages and its weight; where the bound does not bind, the cheapest policy of all, with some
        weight at which nothing but power counts (for a bound on power: the fastest, with w2 = 0).

    Raises:
        UnreachableError: no policy keeps the bound; says what the nearest one reaches.
        SpecError: the bound is none, or the profile has no energies to save.
    """
    _check(problem, bound)
    scale = _scale(problem)
    solution, kept = _choose(scale.problem(problem), scale.bound(bound), mixed)
    found = scale.back(solution)
    if not kept:
        raise UnreachableError(_unreachable(problem, bound, found), found)
    return found


def frontier(problem: Problem, resolution: float = 0.0) -> list[Solution]:
    """The vertices of least response time for their power, the fastest first; the problem's w2 is not looked at.

    Args:
        problem: the system.
        resolution: of two vertices nearer than this share of the frontier's width and height, nothing between them is
            looked for. Where service times vary there are hundreds.

    Raises:
        SpecError: the problem has no energies.
    """
    _check_energies(problem)
    scale = _scale(problem)
    return [scale.back(solution) for solution in _frontier(scale.problem(problem), resolution)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units in which the response time and the power are of the order of 1, so that weights need no bounds.

    Energies may be joules, or money by the millionth; rates from one an hour to a million a second.

    Attributes:
        time: how long a full batch takes to gather, ms.
        power: that a full batch of the largest energy in that time makes, W.
        w1: the caller's.
    """

    time: float
    power: float
    w1: float

    def problem(self, problem: Problem) -> Problem:
        """The problem in these units."""
        energies = tuple(energy / self.power for energy in problem.profile.energies or ())
        return replace(problem, w1=1.0 / self.time, w2=0.0, profile=replace(problem.profile, energies=energies))

    def bound(self, bound: Bound) -> Bound:
        """The bound in these units: times stay seconds."""
        return replace(bound, power=bound.power / self.power) if isinstance(bound, PowerBound) else bound

    def back(self, solution: Solution) -> Solution:
        """A solution in the caller's units."""
        cost = self.w1 * self.time
        return replace(
            solution,
            w1=self.w1,
            w2=solution.w2 * cost / self.power,
            gain=solution.gain * cost,
            mean_power=_power(solution) * self.power,
            energy_per_request=(solution.energy_per_request or 0.0) * self.power,
        )


def _scale(problem: Problem) -> _Scale:
    size, energies = build_model(problem).max_batch_size, problem.profile.energies or ()
    gather = size / problem.arrival_rate
    return _Scale(1e3 * gather, (max(energies) or 1.0) / gather, problem.w1)


def _choose(problem: Problem, bound: Bound, mixed: bool) -> tuple[Solution, bool]:
    """In units of the order of 1: the policy, or the nearest one where none keeps the bound; and whether it does."""
    kept = _keeps(problem, bound)
    fast, cheap = _fastest(problem, bound), solve(replace(problem, w2=_HEAVY))
    inside, outside = (cheap, fast) if isinstance(bound, PowerBound) else (fast, cheap)
    if kept(outside):
        return outside, True
    if not kept(inside):
        return inside, False
    inside, outside = _neighbours(problem, kept, inside, outside)
    return (_mixed(problem, bound, inside, outside) if mixed else inside), True


def _frontier(problem: Problem, resolution: float) -> list[Solution]:
    """In units of the order of 1."""
    ends = solve(replace(problem, w2=0.0)), solve(replace(problem, w2=_HEAVY))
    found, ahead = [ends[0]], [ends[1]]
    width, height = _apart(*ends)
    while ahead:
        slower, cheaper = _apart(found[-1], ahead[-1])
        near = hypot(slower / (width or 1.0), cheaper / (height or 1.0)) < resolution
        between = None if near else _below(problem, found[-1], ahead[-1])
        if between is None:
            found.append(ahead.pop())
        else:
            ahead.append(between)
    return found


def _apart(fast: Solution, cheap: Solution) -> tuple[float, float]:
    """How much slower, s, and how much cheaper the second is."""
    return cheap.mean_response_time - fast.mean_response_time, _power(fast) - _power(cheap)


def breakpoint_of(fast: Solution, cheap: Solution) -> float:
    """The weight w2 at which both cost the same."""
    slower = 1e3 * fast.w1 * (cheap.mean_response_time - fast.mean_response_time)
    return slower / (_power(fast) - _power(cheap))


def _below(problem: Problem, fast: Solution, cheap: Solution) -> Solution | None:
    """A vertex between these two, below the line through them; None where they are neighbours."""
    if not _saves(fast, cheap):
        return None
    w2 = breakpoint_of(fast, cheap)
    found = solve(replace(problem, w2=w2))
    on_the_line = 1e3 * fast.w1 * fast.mean_response_time + w2 * _power(fast)
    return found if found.gain < on_the_line * (1.0 - _SAME) else None


def _saves(fast: Solution, cheap: Solution) -> bool:
    """Whether there is a line through the two: one faster, the other cheaper, by more than rounding."""
    slower, cheaper = _apart(fast, cheap)
    return slower > _ROUNDING * fast.mean_response_time and cheaper > _ROUNDING * _power(fast)


def _neighbours(
    problem: Problem, kept: Callable[[Solution], bool], inside: Solution, outside: Solution
) -> tuple[Solution, Solution]:
    """The last vertex that keeps the bound and the first that does not, each solved beside their breakpoint."""
    while True:
        fast, cheap = sorted((inside, outside), key=lambda solution: solution.mean_response_time)
        between = _below(problem, fast, cheap)
        if between is None:
            break
        inside, outside = (between, outside) if kept(between) else (inside, between)
    if not _saves(fast, cheap):
        return inside, inside
    w2 = breakpoint_of(fast, cheap)
    toward = -_BESIDE if inside is fast else _BESIDE
    near, far = (solve(replace(problem, w2=w2 * (1.0 + step))) for step in (toward, -toward))
    return (near, far) if kept(near) and not kept(far) else (inside, outside)  # three may meet in one point


def _mixed(problem: Problem, bound: Bound, inside: Solution, outside: Solution) -> Solution:
    """As much of the outside policy as the bound allows."""
    if inside is outside or inside.batch_size[-1] != outside.batch_size[-1]:
        return inside  # sizes of one throughput, told apart by the weight: the tail of a mix would have no closed form

    def at(probability: float) -> Solution:
        return evaluate(problem_at, inside.batch_size, Mix(probability, outside.batch_size))

    problem_at = replace(problem, w2=inside.w2)
    match bound:
        case MeanBound(response_time):
            return at(_root(lambda p: at(p).mean_response_time - response_time))
        case PowerBound(power):
            return at(_root(lambda p: _power(at(p)) - power))
        case ShareBound():
            return at(_largest(lambda p: _keeps(problem, bound)(at(p))))


def _root(excess: Callable[[float], float]) -> float:
    """The probability at which the bound is met; 0 where rounding alone keeps the inside policy from it."""
    if not excess(0.0) < 0.0 < excess(1.0):
        return 0.0
    return max(float(brentq(excess, 0.0, 1.0, xtol=1e-10)) - 1e-9, 0.0)  # on the side that keeps the bound


def _largest(kept: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_SEARCH):
        middle = (low + high) / 2.0
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def _fastest(problem: Problem, bound: Bound) -> Solution:
    """The policy of least mean response time; for a share, the vertex of least percentile if that fails."""
    fastest = solve(replace(problem, w2=0.0))
    if isinstance(bound, ShareBound) and not _keeps(problem, bound)(fastest):
        return min(_frontier(problem, _COARSE), key=lambda solution: bound.percentile(problem, solution))
    return fastest


def _keeps(problem: Problem, bound: Bound) -> Callable[[Solution], bool]:
    match bound:
        case MeanBound(response_time):
            return lambda solution: solution.mean_response_time <= response_time
        case PowerBound(power):
            return lambda solution: _power(solution) <= power
        case ShareBound(response_time, _, percentile):
            return lambda solution: percentile(problem, solution) <= response_time


def _power(solution: Solution) -> float:
    assert solution.mean_power is not None  # checked where a choice begins
    return solution.mean_power


def _check(problem: Problem, bound: Bound) -> None:
    power = isinstance(bound, PowerBound)
    limit = bound.power if isinstance(bound, PowerBound) else bound.response_time
    if not 0.0 < limit < inf:
        said = f"{limit:g} {problem.profile.power_unit}" if power else f"{1e3 * limit:g} ms"
        raise SpecError(f"a bound of {said} cannot be; give a positive number")
    if isinstance(bound, ShareBound) and not 0.0 < bound.share < 1.0:
        raise SpecError(f"a share of {bound.share:g} of the requests is not between 0 and 1; give for example 0.95")
    _check_energies(problem)


def _check_energies(problem: Problem) -> None:
    if problem.profile.energies is None:
        raise SpecError(
            f"profile {problem.profile.name!r} has no energies, so no policy can be chosen by its power; "
            "leave the bound out (w2 = 0 is the fastest), or take a profile with energy_j"
        )


def _unreachable(problem: Problem, bound: Bound, nearest: Solution) -> str:
    at = f"at load {nearest.load:.3g}"
    match bound:
        case MeanBound(response_time):
            least = f"the least {at} is {1e3 * nearest.mean_response_time:.6g} ms"
            return f"no policy keeps the mean response time within {1e3 * response_time:g} ms: {least}; allow that"
        case PowerBound(power):
            unit = problem.profile.power_unit
            least = f"the least {at} is {_power(nearest):.6g} {unit}"
            return f"no policy keeps the mean power within {power:g} {unit}: {least}; allow that"
        case ShareBound(response_time, share, percentile):
            least = f"the least time {at} is {1e3 * percentile(problem, nearest):.4g} ms"
            return f"no policy answers a share of {share:g} within {1e3 * response_time:g} ms: {least}; allow that"
