"""What a goal would save, for a model that is served without one: the resource within a bound on a percentile."""

from dataclasses import dataclass
from math import log10

from policies.catalog import ModelPolicy, has_goal
from policies.objectives.bounds import solve_within
from policies.objectives.frontier import SHARE, UnreachableError
from policies.objectives.solving import LEAST_SAVING
from policies.percentile.ages import ResponseBounds
from policies.solver.distributions import measured_service
from policies.solver.model import LARGEST_LOAD, Problem
from policies.solver.solver import solve

_LEAST_LOAD = 0.02  # below, hardly any requests could share a batch
_LARGEST = 64  # batch size up to which a bound is solved in a second
_LOOSE = 4.0  # times the service time of one request, and more: a bound that leaves room to wait
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)  # of round numbers


@dataclass(frozen=True, slots=True)
class Savings:
    """What a bound on the 95th percentile would save at an arrival rate.

    Attributes:
        limit: the bound, s.
        before: of the resource per second without it, by the policy of least mean response time.
        after: the same by the policy that keeps the bound with the least.
        unit: W, cores, or busy share.
    """

    limit: float
    before: float
    after: float
    unit: str

    def __str__(self) -> str:
        """One line for the page and the log."""
        bound = f"{SHARE:.0%} within {1e3 * self.limit:g} ms"
        if self.after > (1.0 - LEAST_SAVING) * self.before:
            return f"a policy with the bound {bound} would save nothing at the present rate"
        return (
            f"a policy with the bound {bound} would take {self.after:.2g} {self.unit} at the present rate instead of "
            f"{self.before:.2g}: smdp:slo_p95_ms={1e3 * self.limit:g}"
        )


def savings(chosen: ModelPolicy, rate: float) -> Savings | None:
    """Return what a goal would save, where the policy in use is the solved one of least mean response time.

    It is None for other policies and goals, for lengths, at a load near 0 or 1, and where solving takes long.

    Args:
        chosen: the policy and the profile of the model.
        rate: arrivals a second.
    """
    profile = chosen.profile
    if chosen.name not in ("auto", "smdp") or has_goal(chosen.spec) or chosen.defaults or profile.varies_by_length:
        return None
    if profile.max_batch_size > _LARGEST:
        return None
    if not _LEAST_LOAD <= rate / profile.capacity <= LARGEST_LOAD:
        return None
    problem = Problem(profile, rate, service=measured_service(profile))
    fastest = solve(problem)
    limit = _round_up(max(_LOOSE * profile.service_time(1), 2.0 * fastest.mean_response_time))
    try:
        found = solve_within(problem, ResponseBounds(((limit, SHARE),)))
    except UnreachableError:
        return None
    return Savings(limit, fastest.mean_power, found.mean_power, profile.rate_unit)


def _round_up(seconds: float) -> float:
    """Return the next round number, s."""
    unit = 10.0 ** int(log10(seconds) // 1)
    return next(step * unit for step in _STEPS if step * unit >= seconds * (1.0 - 1e-9))
