"""Results of solving, evaluating and simulating a policy at one arrival rate, with the keys of solve-policy --json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Self

from policies.catalog import ModelPolicy
from policies.command_line.options import SolveOptions
from policies.objectives.bounds import limits_of, solve_within
from policies.objectives.table import ages_json
from policies.percentile.ages import AgeSolution, evaluate_ages
from policies.percentile.response_law import has_response_law, response_law
from policies.profile import Profile, Resource
from policies.queue.lookup import Lookup
from policies.queue.simulator import Estimate, Run, estimate, percentile, share_within
from policies.solver.model import Problem, build_model
from policies.solver.solver import Solution, evaluate, solve
from policies.types import MaxAges, Mix, SpecError

_OF_OTHER_RESOURCES = ("mean_resource", "resource_per_request_s", "resource_lower_bound")


@dataclass(frozen=True)
class PolicyResult:
    """A table of batch sizes by queue length, or of maximum ages, and its exact averages.

    Attributes:
        profile: name of the profile.
        arrival_rate_hz: 1/s.
        load: arrival rate over the largest service rate.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
        method: exact or rvi.
        bound: name and value of the bound that chose w2; None without one.
        average_cost: w1 x mean response time in ms + w2 x mean power in W.
        mean_response_time_ms: ms.
        mean_power_w: W; None where another resource than energy is saved.
        energy_per_request_mj: mJ; None where another resource than energy is saved.
        mean_batch_size: mean over batches.
        batch_size: size to launch for queue length 0, 1, 2, ...; 0 waits, the last repeats. With maximum ages: for
            requests that have just arrived.
        iterations: steps of the solver.
        mix: the second table of a randomised policy; the averages are those of the mix.
        overflow_cost_share: share of the overflow state in the cost; None for the exact method.
        max_ages: the table of maximum ages, for a bound on a percentile; None for a table of batch sizes.
        share_within: the share answered within the limit of each bound on a percentile; None for batch sizes.
        percentiles_ms: p50_ms, p90_ms, p95_ms and p99_ms of an evaluated table of batch sizes, see `percentiles_ms`.
        power_lower_bound_w: W; no policy that decides by the queue length and the age of the oldest request, at most
            twice the largest limit or the longest service time, keeps the bounds with less; None for batch sizes, if no
            policy keeps them, and where another resource is saved.
        resource: that is saved: energy, cpu_time or busy_time. Of energy the next three are None.
        mean_resource: cores, or busy share.
        resource_per_request_s: CPU s, or busy s.
        resource_lower_bound: cores, or busy share; as power_lower_bound_w.
    """

    profile: str
    arrival_rate_hz: float
    load: float
    w1: float
    w2: float
    method: str
    bound: Mapping[str, float | str] | None
    average_cost: float
    mean_response_time_ms: float
    mean_power_w: float | None
    energy_per_request_mj: float | None
    mean_batch_size: float
    batch_size: tuple[int, ...]
    iterations: int
    mix: Mix | None
    overflow_cost_share: float | None
    max_ages: MaxAges | None = None
    share_within: tuple[float, ...] | None = None
    power_lower_bound_w: float | None = None
    percentiles_ms: Mapping[str, float] = field(default_factory=dict)
    resource: Resource = "energy"
    mean_resource: float | None = None
    resource_per_request_s: float | None = None
    resource_lower_bound: float | None = None

    @classmethod
    def of(cls, options: SolveOptions, solution: Solution) -> Self:
        """Return the result of solving or evaluating with these options."""
        problem, resource = options.problem, options.problem.profile.saved
        metered = resource == "energy"
        by_age = solution if isinstance(solution, AgeSolution) else None
        bound = by_age.power_lower_bound if by_age is not None and isfinite(by_age.power_lower_bound) else None
        return cls(
            profile=problem.truncated_profile.name,
            arrival_rate_hz=problem.arrival_rate,
            load=build_model(problem).load,
            w1=problem.w1,
            w2=solution.w2,
            method="exact" if options.scheme is None else "rvi",
            bound=options.bound_entry,
            average_cost=solution.gain,
            mean_response_time_ms=1e3 * solution.mean_response_time,
            mean_power_w=solution.mean_power if metered else None,
            energy_per_request_mj=1e3 * solution.energy_per_request if metered else None,
            mean_batch_size=solution.mean_batch_size,
            batch_size=solution.batch_size,
            iterations=solution.iterations,
            mix=solution.mix,
            overflow_cost_share=solution.overflow_cost_share,
            max_ages=None if by_age is None else by_age.max_ages,
            share_within=None if by_age is None else by_age.share_within,
            power_lower_bound_w=bound if metered else None,
            percentiles_ms={} if options.spec is None else percentiles_ms(problem, solution),
            resource=resource,
            mean_resource=None if metered else solution.mean_power,
            resource_per_request_s=None if metered else solution.energy_per_request,
            resource_lower_bound=None if metered else bound,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without optional fields that are None; with maximum ages in place of batch sizes."""
        fields = {**vars(self), "batch_size": list(self.batch_size)}
        if self.mix is not None:
            fields["mix"] = {"probability": self.mix.probability, "batch_size": list(self.mix.batch_size)}
        del fields["max_ages"], fields["percentiles_ms"]
        if self.resource == "energy":
            del fields["resource"]
        if self.max_ages is not None:
            del fields["batch_size"]
            fields |= ages_json(self.max_ages)
        if self.share_within is not None:
            fields["share_within"] = self.share_within[0] if len(self.share_within) == 1 else list(self.share_within)
        optional = ("bound", "mix", "overflow_cost_share", "share_within", "power_lower_bound_w", *_OF_OTHER_RESOURCES)
        shown = {key: value for key, value in fields.items() if value is not None or key not in optional}
        return shown | dict(self.percentiles_ms)


@dataclass(frozen=True)
class SimulationResult:
    """Response times and power of a simulated run.

    Attributes:
        requests: number of requests.
        mean_ms: mean response time, ms.
        p50_ms: median of the response time, ms; the further percentiles alike.
        mean_power_w: energy of all batches over the time from first arrival to last completion, W; None where another
            resource than energy is saved.
        mean_resource: of another resource, the same in cores, or busy share.
        standard_error_ms: standard errors of mean, p50, p90, p95 and p99, ms, by batch means; None for fewer than 20
            requests.
        run: times and sizes of all requests and batches, in s.
    """

    requests: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_power_w: float | None
    mean_resource: float | None
    standard_error_ms: Mapping[str, float | None]
    run: Run = field(repr=False, compare=False)

    @classmethod
    def of(cls, run: Run, profile: Profile) -> Self:
        """Return the result of a run with at least one served request, on a device with this profile."""
        metered = profile.saved == "energy"
        mean = estimate(run.responses, lambda block: float(block.mean()))
        estimates = {"mean": mean} | {f"p{n}": percentile(run.responses, n / 100) for n in (50, 90, 95, 99)}
        return cls(
            requests=run.scheduled,
            **{f"{name}_ms": 1e3 * each.value for name, each in estimates.items()},
            mean_power_w=run.mean_power if metered else None,
            mean_resource=None if metered else run.mean_power,
            standard_error_ms={name: _error(each, 1e3) for name, each in estimates.items()},
            run=run,
        )

    def to_json(self, limits: Sequence[float] = ()) -> dict[str, Any]:
        """Return the JSON object, with the share answered within each of these limits, s, as a list if several."""
        hidden = ("run",) if self.mean_resource is not None else ("run", "mean_resource")
        fields = {key: value for key, value in vars(self).items() if key not in hidden}
        found = [share_within(self.run.responses, limit) for limit in limits]
        shares = [{"share": share.value, "standard_error": _error(share, 1.0)} for share in found]
        return fields | ({"share_within": shares[0] if len(shares) == 1 else shares} if shares else {})


def _error(estimated: Estimate, scale: float) -> float | None:
    return scale * estimated.standard_error if isfinite(estimated.standard_error) else None


def solve_with(options: SolveOptions) -> Solution:
    """Return the policy of least cost, or the one that keeps the bound.

    Raises:
        UnreachableError: no policy keeps the bound.
        SpecError: the load is 1 or more, or an option is invalid.
    """
    if options.bound is None:
        return solve(options.problem, options.scheme)
    return solve_within(options.problem, options.bound, options.mixed)


def percentiles_ms(problem: Problem, solution: Solution) -> dict[str, float]:
    """Return p50_ms, p90_ms, p95_ms and p99_ms of a table of batch sizes, without simulation.

    It is empty where these are not computed: for maximum ages, random service times and very large batches.
    """
    if isinstance(solution, AgeSolution) or not has_response_law(problem):
        return {}
    law = response_law(problem, solution.batch_size, solution.mix)
    return {f"p{n}_ms": 1e3 * law.percentile(n / 100) for n in (50, 90, 95, 99)}


def evaluate_with(options: SolveOptions, chosen: ModelPolicy) -> Solution | None:
    """Return the exact averages of the policy of `options.spec`; None if it is only simulated.

    A table of maximum ages is evaluated if its policy file has the percentiles that it was solved for.

    Raises:
        SpecError: it has no exact averages and is not simulated either, or it is unstable.
    """
    rate = options.problem.arrival_rate
    table = chosen.action_table(rate)
    limits = limits_of((chosen.table.bound or {}) if chosen.table is not None else {})
    row = chosen.policy.row(rate) if isinstance(chosen.policy, Lookup) else None
    if limits and row is not None and row.max_ages is not None:
        try:
            return evaluate_ages(options.problem, row.max_ages, limits)
        except SpecError:
            if not options.simulate:
                raise
            return None
    if table is None and not options.simulate:
        raise SpecError(f"policy {options.spec!r} is not a function of the queue length: add --simulate N")
    try:
        return None if table is None else evaluate(options.problem, table.batch_size, table.mix)
    except SpecError as error:
        raise SpecError(f"policy {options.spec!r}: {error}") from error
