"""Solving, evaluating and simulating policies from Python: what solve-policy does, with its flags as keywords."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from threadpoolctl import threadpool_limits

from policies.catalog import ModelPolicy, choose, in_stages, solved
from policies.command_line.options import SolveOptions, bounds_of, check_options, rate_of, reject_if, scheme_of
from policies.command_line.results import PolicyResult, SimulationResult, evaluate_with, solve_with
from policies.objectives.bounds import FORMS, check_form
from policies.objectives.trial import Trial
from policies.planning.simulation import simulate_policy
from policies.profile import Profile, resource_of
from policies.queue.monitor import ForgettingMonitor, rate_time_constant
from policies.solver.distributions import distribution
from policies.solver.model import Problem, build_model
from policies.types import Policy, SpecError


def solve(
    profile: Profile,
    *,
    arrival_rate: float | None = None,
    load: float | None = None,
    w1: float = 1.0,
    w2: float | None = None,
    slo_mean_ms: float | None = None,
    slo_p95_ms: float | None = None,
    slo_share: str | Sequence[str] | None = None,
    power_cap_w: float | None = None,
    resource_cap: float | None = None,
    resource: str | None = None,
    no_mix: bool = False,
    policy_form: str = FORMS[0],
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    service_distribution: str = "deterministic",
    method: str = "exact",
    overflow_cost: float | None = None,
    max_queue_length: int | None = None,
    epsilon: float | None = None,
    max_iterations: int | None = None,
    seed: int = 0,
) -> PolicyResult:
    """Find the policy that minimises w1 x mean response time + w2 x mean power, or that keeps a bound.

    Where a profile has no energies, power stands for the cores or the busy share of the device that a policy takes.

    Args:
        profile: service times and energies by batch size.
        arrival_rate: requests per second; give either this or the load.
        load: arrival rate over the largest service rate, between 0 and 1.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W (or core, or busy share); None: 0, or chosen by the bound.
        slo_mean_ms: minimise power within this mean response time, ms.
        slo_p95_ms: minimise power within this 95th percentile of the response time, ms.
        slo_share: MS:SHARE: minimise power with this share of the requests answered within MS ms; one, or
            several that are kept together.
        power_cap_w: minimise the mean response time within this mean power, W.
        resource_cap: the same of the resource that is saved, in its unit: W, cores, or busy share.
        resource: what to save, energy, cpu_time or busy_time; None: the first that the profile has.
        no_mix: meet the bound with one table instead of a mix of two.
        policy_form: of the policy that keeps a percentile: max-ages (least power) or batch-size.
        min_batch_size: smallest batch, in requests.
        max_batch_size: largest batch, in requests; None: the profile's.
        service_distribution: deterministic, erlang2, exponential, hyperexponential, gamma:CV or measured.
        method: exact, or rvi for the papers' relative value iteration, to which the next four apply.
        overflow_cost: c_o, in the unit of the cost.
        max_queue_length: s_max, in requests.
        epsilon: span at which the iteration stops, in the unit of the cost.
        max_iterations: limit of the iterations.
        seed: of the simulations that a percentile takes in the batch-size form.

    Raises:
        SpecError: no policy keeps the bound, the load is 1 or more, or an argument is invalid. It is a ValueError.
    """
    problem = _problem(profile, resource, service_distribution, arrival_rate, load, max_batch_size, min_batch_size)
    problem = replace(problem, w1=w1, w2=w2 or 0.0)
    scheme = scheme_of(method, overflow_cost, max_queue_length, epsilon, max_iterations)
    bounds = bounds_of(w2, (slo_mean_ms, slo_p95_ms, slo_share, power_cap_w, resource_cap), check_form(policy_form))
    options = SolveOptions(problem, None, scheme, bounds, not no_mix, 0, seed, policy_form)
    check_options(options, writes=False)
    with _one_thread():
        return PolicyResult.of(options, solve_with(options))


def evaluate(
    profile: Profile,
    policy: str,
    *,
    arrival_rate: float | None = None,
    load: float | None = None,
    w1: float = 1.0,
    w2: float = 0.0,
    resource: str | None = None,
    max_batch_size: int | None = None,
    service_distribution: str = "deterministic",
) -> PolicyResult:
    """Return the exact averages of a policy that is a function of the queue length; use `simulate` for others.

    Args:
        profile: service times and energies by batch size.
        policy: spec such as greedy, static:8 or FILE.json.
        arrival_rate: requests per second; give either this or the load.
        load: arrival rate over the largest service rate, between 0 and 1.
        w1: weight of the mean response time in the cost, per ms.
        w2: weight of the mean power in the cost, per W.
        resource: whose mean power it is, energy, cpu_time or busy_time; None: the first that the profile has.
        max_batch_size: largest batch, in requests; None: the profile's.
        service_distribution: deterministic, erlang2, exponential, hyperexponential, gamma:CV or measured.

    Raises:
        SpecError: the policy is unstable at this rate or no function of the queue length, or an argument is invalid.
    """
    problem = _problem(profile, resource, service_distribution, arrival_rate, load, max_batch_size)
    options = SolveOptions(replace(problem, w1=w1, w2=w2), policy, None, (), True, 0, 0)
    with _one_thread():
        solution = evaluate_with(options, _chosen(policy, problem.truncated_profile))
    assert solution is not None  # it is None only with a simulation
    return PolicyResult.of(options, solution)


def simulate(
    profile: Profile,
    policy: str | Policy | PolicyResult,
    *,
    arrival_rate: float | None = None,
    load: float | None = None,
    requests: int = 100_000,
    seed: int = 0,
    resource: str | None = None,
    max_batch_size: int | None = None,
    service_distribution: str = "deterministic",
) -> SimulationResult:
    """Simulate a policy on one device with Poisson arrivals; the same seed gives the same arrivals to every policy.

    Args:
        profile: service times and energies by batch size.
        policy: a spec, with no maximum wait unless it sets max_wait_ms; the result of `solve` or `evaluate`; or an
            object with a method decide(state), whose state has the measured arrival rate.
        arrival_rate: requests per second; give either this or the load.
        load: arrival rate over the largest service rate.
        requests: number of requests.
        seed: of the arrivals and the service times.
        resource: as in `evaluate`.
        max_batch_size: largest batch, in requests; None: the profile's.
        service_distribution: deterministic, erlang2, exponential, hyperexponential, gamma:CV or measured.

    Raises:
        SpecError: a spec or an argument is invalid.
        PolicyError: an action of the policy is invalid, such as a batch above the maximum.
    """
    reject_if(requests < 1, f"requests is {requests}; give 1 or more")
    reject_if(seed < 0, f"seed is {seed}; give 0 or more")
    problem = _problem(profile, resource, service_distribution, arrival_rate, load, max_batch_size)
    trial = Trial(problem, requests, seed)
    with _one_thread():
        chosen = _chosen(policy, problem.truncated_profile.charged)
    return SimulationResult.of(
        simulate_policy(chosen, trial.instants, service_time=trial.service_time()), problem.profile
    )


def _problem(
    profile: Profile,
    resource: str | None,
    service_distribution: str,
    arrival_rate: float | None,
    load: float | None,
    max_batch_size: int | None,
    min_batch_size: int = 1,
) -> Problem:
    service = distribution(service_distribution, profile)
    problem = Problem(
        profile.saving(resource_of(resource)),
        1.0,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        service=service,
    )
    return replace(problem, arrival_rate=rate_of(build_model(problem).capacity, arrival_rate, load))


def _chosen(policy: str | Policy | PolicyResult, profile: Profile) -> ModelPolicy:
    if isinstance(policy, str):
        return choose(policy, in_stages(policy, profile), max_wait=inf)
    if isinstance(policy, PolicyResult):
        return solved(policy.batch_size, profile, policy.mix, policy.max_ages)
    if not hasattr(policy, "decide"):
        raise SpecError(f"policy {policy!r} is neither a spec nor a result, and has no method decide(state)")
    name = type(policy).__name__
    return ModelPolicy(name, name, {}, profile, policy, ForgettingMonitor(rate_time_constant(profile)))


def _one_thread() -> threadpool_limits:
    """Limit BLAS as the commands do: the matrices are small, and more threads may change the last digits."""
    return threadpool_limits(limits=1, user_api="blas")
