"""The policy rules by name; a spec, NAME[:ARG][,KEY=VALUE]..., gives a policy, its monitor and its SLO.

A new rule is one file in rules/ and one entry in `CATALOG`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isclose
from typing import Any

from policies.objectives.frontier import BOUNDS, SHARE, ShareBound, parse_bound
from policies.objectives.solving import LEAST_SAVING, solved_table, table_policy
from policies.objectives.table import PolicyTable, default_loads, nearest_load, table_of
from policies.profile import Profile
from policies.queue.drain import Drain
from policies.queue.lookup import ActionRow, Lookup, lookup
from policies.queue.monitor import (
    ForgettingMonitor,
    LevelShares,
    Monitor,
    NoMonitor,
    PerModelMonitor,
    rate_time_constant,
)
from policies.rules.by_level import LimitedBulk
from policies.rules.catch_up import CATCH_UP
from policies.rules.co_located import CoLocated, PreemptivePolicy
from policies.rules.control_limit import GREEDY, SERIAL, STATIC, TIMEOUT
from policies.rules.finish_first import FinishSuspended
from policies.rules.lazy_batching import LAZY
from policies.rules.length_aware import LENGTH_AWARE
from policies.rules.max_under_deadline import MAX_UNDER_DEADLINE
from policies.rules.maximum_wait import MaximumWait
from policies.rules.multi_bin import MULTI_BIN, Bins, one_bin
from policies.rules.per_kind import PerKind
from policies.rules.rate_matching import RATE_MATCHING
from policies.rules.rule import AdaptedPolicy, BinnedPolicy, Built, Rule, ShareSolver, SizeSolver, SolvedPolicy
from policies.rules.smdp_bins import SMDP_BINS
from policies.rules.solved_table import AUTO, FILE, SMDP
from policies.sizing.bins import batch_time
from policies.sizing.padded import of_mixed_lengths
from policies.solver.distributions import measured_service
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.spec import Spec, is_file, split_name
from policies.traits import ActionTable, QueueLengthPolicy, StepPolicy
from policies.types import BatchKey, MaxAges, Mix, Policy, SpecError

MAX_WAIT = 1.0  # s
_MIN_SIZES = 256  # learned before a policy is solved for them
_MIN_ARRIVALS = 512  # before a policy is solved for the shares of levels
_CHANGED = 0.03  # relative change of the mean batch time at which they are solved again
_SHARE_CHANGE, _SHARE_ERRORS = 0.3, 4.0  # change of the first level's share with which tables are solved again
_SAVING = frozenset({"w2", *BOUNDS})  # keys of goals that save the resource of a profile
_IN_UNITS = frozenset({"w2", "power_cap_w", "resource_cap"})  # those whose values are in its unit
_GOALS = _SAVING | {"slo_ms"}
_SHARES = frozenset({"slo_p95_ms", "slo_share"})  # those that bound the response time of a share of the requests
_NEAR = 0.09  # difference of loads within which maximum ages are solved again for a rate
_LEAST_BOUND = 2.0  # times the least l(1): maximum ages are solved for no smaller bound, which few requests can meet
_DEFAULT_STAGES = 10  # of a simulation without measured stages and without --stages

CATALOG: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        GREEDY,
        SERIAL,
        STATIC,
        TIMEOUT,
        RATE_MATCHING,
        MAX_UNDER_DEADLINE,
        SMDP,
        LAZY,
        CATCH_UP,
        MULTI_BIN,
        SMDP_BINS,
        LENGTH_AWARE,
        AUTO,
    )
}


@dataclass(frozen=True)
class ModelPolicy:
    """The policy that a spec names, for one model on one device.

    Attributes:
        spec: as given.
        name: of the rule; "file" for a policy file.
        parameters: as given, defaults added.
        profile: of the model on its device; its largest size is the largest batch.
        policy: bounded by the maximum wait.
        monitor: measures the arrival rate as the policy needs it.
        slo: response time objective of the spec, s; inf if it has none.
        share: of the requests that the objective is for.
        promised: the objective that the server promised its clients when it started, s; inf if it did not.
        table: the solved table; None if the policy has none, or one for each bin.
        bins: assign the requests' kinds by size, and learn their sizes; one bin where a policy only depends on their
            distribution; None for policies that do not depend on sizes.
        solve_for: returns the policy for observed sizes, s; None where there is nothing to solve.
        solved_sizes: the sizes, s, for which the policy is solved; empty before.
        solve_for_shares: returns the policy for the shares of priority levels in the arrivals; None where there is
            nothing to solve.
        solved_shares: the shares for which the policy is solved; empty before.
        defaults: values for keys that the spec leaves open; `solved_again` uses them, too.
        margin: time by which the bound is reduced that the policy is solved for, so that the objective is met, s.
        solved_loads: loads of the rows of maximum ages that are solved for this profile and margin; None: all.
    """

    spec: str
    name: str
    parameters: Mapping[str, Any]
    profile: Profile
    policy: Policy
    monitor: Monitor
    slo: float = inf
    share: float = SHARE
    promised: float = inf
    table: PolicyTable | None = None
    bins: Bins | None = None
    solve_for: SizeSolver | None = None
    solved_sizes: Sequence[float] = ()
    solve_for_shares: ShareSolver | None = None
    solved_shares: Sequence[float] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    margin: float = 0.0
    solved_loads: Collection[float] | None = None

    @property
    def max_wait(self) -> float:
        """The maximum wait, s; inf without one."""
        return float(self.parameters.get("max_wait_ms", inf)) / 1e3

    @property
    def unbounded(self) -> Policy:
        """The policy without the maximum wait."""
        return self.policy.inner if isinstance(self.policy, MaximumWait) else self.policy

    @property
    def uses_slowdown(self) -> bool:
        """Whether other models on the device change the rows of the table (policies/queue/lookup.py)."""
        return isinstance(self.unbounded, Lookup) and self.unbounded.uses_slowdown

    @property
    def has_max_ages(self) -> bool:
        """Whether the table has maximum ages at some rate."""
        return self.table is not None and any(row.max_ages for row in self.table.rows)

    @property
    def takes_margin(self) -> bool:
        """Whether the policy was solved for the response time of a share, and can be for a smaller one."""
        return self.bounds_share and (self.has_max_ages or isinstance(self.unbounded, LimitedBulk))

    @property
    def bounds_share(self) -> bool:
        """Whether the policy was solved for a bound on the response time of a share of the requests."""
        return bool(_SHARES & self.parameters.keys())

    @property
    def weighs_costs(self) -> bool:
        """Whether the policy was solved for a goal that saves a resource, and CPU times may change what it weighs.

        They may not where they would change the unit of a weight or a cap, which was given for another resource.
        """
        given = self.parameters.keys() & _SAVING
        return bool(given) and (self.profile.saved == "cpu_time" or not given & _IN_UNITS)

    @property
    def objective(self) -> float:
        """The objective that late answers are counted by, s: that of the spec, else the promised one; inf if none."""
        return self.slo if self.slo < inf else self.promised

    def kind(self, model: str, size: float, shape: str = "") -> BatchKey:
        """The kind of a request, by its predicted service time alone, s, and the shape of its inputs."""
        if self.bins is None:
            return BatchKey(model, 0, shape)
        return self.bins.kind(model, size)._replace(shape=shape)

    def arriving(self, model: str, size: float, shape: str = "") -> BatchKey:
        """Return the kind of an arriving request and record its size, s, in the bins."""
        if self.bins is not None:
            self.bins.learn(size)
        return self.kind(model, size, shape)

    def with_sizes(self, sizes: Sequence[float]) -> "ModelPolicy":
        """Return the policy for requests of these sizes, s, with edges that stay.

        Raises:
            SpecError: the bins cannot be decided together with this profile.
        """
        assert self.bins is not None  # of policies with bins
        return replace(self.with_solved_sizes(sizes), bins=self.bins.with_edges_of(sizes))

    def unsolved_sizes(self) -> Sequence[float]:
        """The learned sizes, s, if the policy has to be solved for them; else empty.

        That is so where there are enough, and their mean batch time differs from that of the sizes it is solved for.
        """
        if self.solve_for is None or self.bins is None or len(sizes := self.bins.sizes) < _MIN_SIZES:
            return ()
        if not self.solved_sizes:
            return sizes
        largest, edges = self.profile.max_batch_size, self.bins.edges
        before, now = (batch_time(each, edges, largest) for each in (self.solved_sizes, sizes))
        return sizes if abs(now - before) > _CHANGED * before else ()

    def with_solved_sizes(self, sizes: Sequence[float]) -> "ModelPolicy":
        """Return the policy solved for these sizes, s; the same one if it does not depend on them.

        Raises:
            SpecError: the bins cannot be decided together with this profile.
        """
        if self.solve_for is None:
            return self
        found = self.solve_for(sizes)
        policy, table = (found.policy, found.table) if isinstance(found, SolvedPolicy) else (found, None)
        bounded = _bounded(policy, self.profile, self.max_wait)
        return replace(self, policy=bounded, table=table, solved_sizes=tuple(sizes))

    def unsolved_shares(self, shares: LevelShares | None) -> Sequence[float]:
        """The shares of the levels, if the policy has to be solved for them; else empty.

        That is so where there are enough arrivals, and the share of the first level differs from the one solved for.
        """
        if self.solve_for_shares is None or shares is None or shares.arrivals < _MIN_ARRIVALS:
            return ()
        if self.solved_shares:
            before = self.solved_shares[0]
            change = abs(shares.shares[0] - before)
            if change <= max(_SHARE_ERRORS * shares.standard_error, _SHARE_CHANGE * min(before, 1.0 - before)):
                return ()
        return shares.shares

    def unsolved_rate(self, arrival_rate: float) -> bool:
        """Whether the row of maximum ages for this rate, 1/s, was left as it was when others were solved again."""
        if self.solved_loads is None or self.table is None:
            return False
        row = self.table.rows[0]
        return nearest_load(arrival_rate / row.arrival_rate * row.load) not in self.solved_loads

    def may_save(self, arrival_rate: float) -> bool:
        """Whether a longer bound may save something at this rate, 1/s.

        It cannot where the row's cost is within 2 per cent of that of the cheapest batch size.
        """
        if self.table is None:
            return True
        row = min(self.table.rows, key=lambda each: abs(each.arrival_rate - arrival_rate))
        return row.mean_power is None or row.mean_power > (1.0 + LEAST_SAVING) * row.arrival_rate * self._least_cost

    @cached_property
    def _least_cost(self) -> float:
        """Cost of a request in batches of the cheapest size."""
        costs = of_mixed_lengths(self.profile, self.solved_sizes).costs
        return min(cost / size for size, cost in enumerate(costs, start=1))

    def with_solved_shares(self, shares: Sequence[float]) -> "ModelPolicy":
        """Return the policy solved for these shares of the levels; the same one if it does not depend on them."""
        if self.solve_for_shares is None:
            return self
        policy = _bounded(self.solve_for_shares(shares), self.profile, self.max_wait)
        return replace(self, policy=policy, solved_shares=tuple(shares))

    def action_table(self, arrival_rate: float | None) -> ActionTable | None:
        """Return the actions by queue length at this rate, 1/s, or before a rate is measured (None).

        Returns None if the action also depends on waiting times, deadlines or sizes.
        """
        if (self.bins is not None and self.bins.bins > 1) or not isinstance(self.policy, QueueLengthPolicy):
            return None
        return self.policy.action_table(arrival_rate)

    def fixed_max_ages(self) -> MaxAges | None:
        """Return the maximum ages; None if the policy has none, or they depend on the measured rate."""
        fixed = isinstance(self.policy, Lookup) and isinstance(self.monitor, NoMonitor)
        return self.policy.rows[0].max_ages if fixed and isinstance(self.policy, Lookup) else None

    def fixed_action_table(self) -> ActionTable | None:
        """Return the actions by queue length; None if they also depend on the measured rate or on anything else."""
        policy = self.policy
        if isinstance(policy, QueueLengthPolicy) and policy.depends_on_rate and not isinstance(self.monitor, NoMonitor):
            return None
        table = self.action_table(None)
        return None if table is None or table.max_batch_size > self.profile.max_batch_size else table


def parse_spec(text: str) -> Spec:
    """Split NAME[:ARG][,KEY=VALUE]... and check names and keys.

    Raises:
        SpecError: an unknown rule or key, an argument that the rule does not take, or a key given twice.
    """
    name, rest = split_name(text)
    words = [word.strip() for word in rest.split(",") if word.strip()]
    arg = words.pop(0) if words and "=" not in words[0] else None
    pairs = [word.partition("=") for word in words]
    spec = Spec(text, name, arg, {key.strip(): value.strip() for key, _, value in pairs})
    if len(spec.parameters) < len(pairs):
        raise SpecError(f"policy {text!r} gives a key twice; give it once")
    _check_keys(spec)
    return spec


def choose(
    text: str,
    profile: Profile,
    defaults: Mapping[str, str] | None = None,
    max_wait: float = MAX_WAIT,
    sizes: Sequence[float] = (),
    margin_share: float = 0.0,
) -> ModelPolicy:
    """Return the policy that a spec names, for a device with this profile.

    Args:
        text: NAME[:ARG][,KEY=VALUE]... or FILE.json.
        profile: its largest size is the largest batch.
        defaults: values for keys that the rule takes and the spec leaves open.
        max_wait: maximum wait, s, where the spec leaves it open.
        sizes: of requests, s, that the policy is solved for, where it depends on them; empty where none are known.
        margin_share: part of a percentile's bound that is subtracted before maximum ages are solved.

    Raises:
        SpecError: the spec is malformed, or cannot be used with this profile.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, max_wait)
    by_age = spec.parameters.keys().isdisjoint({"priority_weights", "policy_form"})
    if margin_share and by_age and _SHARES & spec.parameters.keys():
        slo, share = _objective(spec, None)
        within = _chosen_within(spec, profile, slo, share, margin_share * slo, sizes)
        if within.has_max_ages:
            return within
    return _chosen(spec, profile, rule_of(spec.name).build(spec, profile), sizes)


def _chosen(spec: Spec, profile: Profile, built: Built, sizes: Sequence[float] = ()) -> ModelPolicy:
    rule = rule_of(spec.name)
    if isinstance(built, BinnedPolicy):
        return _binned(spec, rule, profile, built)
    if isinstance(built, AdaptedPolicy):
        if built.for_sizes is None:
            assert built.policy is not None
            return replace(_chosen(spec, profile, built.policy), solve_for_shares=built.for_shares)
        found = _chosen(spec, profile, built.for_sizes(sizes))
        bins = Bins(1, one_bin, pooled=True)
        return replace(found, solve_for=built.for_sizes, solved_sizes=tuple(sizes), bins=bins)
    policy, table = (built.policy, built.table) if isinstance(built, SolvedPolicy) else (built, None)
    slo, share = _objective(spec, table)
    return ModelPolicy(
        spec=spec.text,
        name=rule.name,
        parameters=_parameters(spec),
        profile=profile,
        policy=_bounded(policy, profile, spec.number("max_wait_ms") / 1e3),
        monitor=ForgettingMonitor(rate_time_constant(profile)),
        slo=slo,
        share=share,
        promised=slo,
        table=table,
        defaults=spec.defaults,
    )


def _objective(spec: Spec, table: PolicyTable | None) -> tuple[float, float]:
    """Return the objective of a spec: response time, s, and share; a policy file may have been solved for one."""
    if "slo_share" in spec.parameters:
        found = parse_bound("slo_share", spec.parameters["slo_share"])
        assert isinstance(found, ShareBound)
        return found.response_time, found.share
    bound = None if table is None else (table.bound or {}).get("slo_p95_ms")
    solved_for = bound if isinstance(bound, float) else inf
    return spec.number("slo_ms", spec.number("slo_p95_ms", solved_for)) / 1e3, SHARE


def _binned(spec: Spec, rule: Rule, profile: Profile, built: BinnedPolicy) -> ModelPolicy:
    """Choose the policy within a bin; its monitor is slower, because a bin has only a fraction of the arrivals."""
    _check_inner(spec, built)
    of_bin, defaults = profile.truncated(built.batch_size), _inner_defaults(spec, built)
    inner = choose(built.inner, of_bin, defaults)
    if inner.solve_for is not None:  # for batches of all lengths, and those of a bin are similar
        inner = replace(choose(built.inner, of_bin.without_lengths(), defaults), solve_for=None)
    forgets = isinstance(inner.monitor, ForgettingMonitor) and built.solve is None
    return replace(
        inner,
        spec=spec.text,
        name=rule.name,
        parameters=_parameters(spec),
        profile=profile,
        monitor=ForgettingMonitor(built.bins * rate_time_constant(profile)) if forgets else inner.monitor,
        table=None,
        bins=Bins(built.bins, built.find_edges, pooled=built.solve is not None),
        solve_for=built.solve,
        defaults=spec.defaults,
    )


def _inner_defaults(spec: Spec, built: BinnedPolicy) -> Mapping[str, str]:
    """Defaults of the spec within the bins; none where the outer rule itself is solved by them."""
    return spec.defaults if built.solve is None else {}


def _check_inner(spec: Spec, built: BinnedPolicy) -> None:
    name = split_name(built.inner)[0]
    if not rule_of(name).per_bin:
        raise SpecError(f"policy {spec.text!r}: {name} cannot be used within a bin; give another inner policy")


def rule_of(name: str) -> Rule:
    """Return the rule of this name, or the one for policy files.

    Raises:
        SpecError: there is no such rule.
    """
    rule = FILE if is_file(name) else CATALOG.get(name)
    if rule is None:
        raise SpecError(f"unknown policy {name!r}: choose one of {', '.join(CATALOG)}, or a FILE.json")
    return rule


def check_spec(
    text: str, max_batch_size: int, defaults: Mapping[str, str] | None = None, has_lengths: bool = False
) -> None:
    """Check a spec as far as possible without a measured profile.

    Args:
        text: the spec.
        max_batch_size: largest batch.
        defaults: values for keys that the spec leaves open.
        has_lengths: whether the model's service time varies by length.

    Raises:
        SpecError: the spec cannot be used.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, MAX_WAIT)
    rule = rule_of(spec.name)
    if rule.check is not None:
        rule.check(spec)
        spec.number("max_wait_ms")
        return
    any_times = tuple(float(b) for b in range(1, max_batch_size + 1))
    profile = Profile("unmeasured", any_times)
    if has_lengths:
        rows = tuple((t,) for t in any_times)
        profile = replace(profile, lengths=(1,), length_service_times=rows)
    built = rule.build(spec, profile)
    if isinstance(built, BinnedPolicy):
        _check_inner(spec, built)
        check_spec(built.inner, built.batch_size, _inner_defaults(spec, built), has_lengths)
    else:
        _chosen(spec, profile, built)


def solved_again(
    chosen: ModelPolicy,
    profile: Profile,
    factor: float = 1.0,
    margin: float = 0.0,
    arrival_rate: float | None = None,
) -> ModelPolicy:
    """Return the policy of the same spec for another profile.

    The table of a policy file is kept. With a bound on a percentile, the weights of a table of batch sizes are kept but
    for a factor, and maximum ages are solved for a smaller bound. All other policies are chosen again.

    Args:
        chosen: the policy.
        profile: its new one.
        factor: of the weight at each load of a table of batch sizes for a percentile.
        margin: time by which the bound is smaller that maximum ages are solved for, s. The objective controller adjusts
            it and the factor by the measured response times.
        arrival_rate: only rows of maximum ages near this rate, 1/s, are solved, since all take seconds; the others stay
            as they were. None: all are solved.

    Raises:
        SpecError: the spec cannot be used with this profile, or the file launches larger batches than it has.
    """
    before = chosen.table
    if chosen.name == FILE.name and before is not None:
        return _with_table(replace(chosen, profile=profile), before)
    if chosen.takes_margin:
        return _with_margin(chosen, profile, margin, arrival_rate)
    if before is None or not _SHARES & (before.bound or {}).keys():
        again = choose(chosen.spec, profile, chosen.defaults, sizes=chosen.solved_sizes)
        return _with_known(replace(again, promised=chosen.promised), chosen)
    mixed = of_mixed_lengths(profile, chosen.solved_sizes)
    problem = Problem(mixed, 1.0, service=measured_service(mixed))
    at = [replace(problem, arrival_rate=row.load * mixed.capacity, w2=factor * row.w2) for row in before.rows]
    table = table_of(problem, [solve(each) for each in at], before.bound)
    monitor = ForgettingMonitor(rate_time_constant(profile))
    return _with_table(replace(chosen, profile=profile, monitor=monitor), table)


def _with_margin(chosen: ModelPolicy, profile: Profile, margin: float, arrival_rate: float | None) -> ModelPolicy:
    spec, before = _with_defaults(parse_spec(chosen.spec), chosen.defaults, MAX_WAIT), chosen.table
    if arrival_rate is not None and before is not None and before.max_batch_size == profile.max_batch_size:
        inside = _with_smaller_bound(spec, profile, chosen.slo, chosen.share, margin)
        return _solved_near(chosen, inside, profile, margin, arrival_rate)
    again = _chosen_within(spec, profile, chosen.slo, chosen.share, margin, chosen.solved_sizes)
    return _with_known(replace(again, promised=chosen.promised), chosen)


def _chosen_within(
    spec: Spec, profile: Profile, slo: float, share: float, margin: float, sizes: Sequence[float]
) -> ModelPolicy:
    """The policy of a spec, solved for a bound that is smaller by a margin, s."""
    inside = _with_smaller_bound(spec, profile, slo, share, margin)
    found = _chosen(inside, profile, rule_of(spec.name).build(inside, profile), sizes)
    return replace(found, parameters=_parameters(spec), slo=slo, promised=slo, margin=margin)


def _with_smaller_bound(spec: Spec, profile: Profile, slo: float, share: float, margin: float) -> Spec:
    least = min(_LEAST_BOUND * profile.min_service_time(1), slo)
    limit = f"{1e3 * max(slo - margin, least)}"
    bound = {"slo_p95_ms": limit} if "slo_p95_ms" in spec.parameters else {"slo_share": f"{limit}:{share}"}
    return replace(spec, parameters={**spec.parameters, **bound})


def _solved_near(chosen: ModelPolicy, spec: Spec, profile: Profile, margin: float, arrival_rate: float) -> ModelPolicy:
    """The policy with rows of maximum ages that are solved near a rate, and the others as they were."""
    assert chosen.table is not None
    mixed = of_mixed_lengths(profile, chosen.solved_sizes)
    at = nearest_load(arrival_rate / mixed.capacity)
    near = [load for load in default_loads() if abs(load - at) <= _NEAR]
    if profile is chosen.profile and isclose(margin, chosen.margin, abs_tol=1e-9):
        loads = default_loads() if chosen.solved_loads is None else chosen.solved_loads
        missing = [load for load in near if load not in loads]
        if not missing:
            return chosen
        solved, known = solved_table(spec, mixed, missing), {*loads, *missing}
    else:
        solved, known = solved_table(spec, mixed, near), {*near}
    rows = {nearest_load(row.load): row for row in (*chosen.table.rows, *solved.rows)}
    of_profile = [replace(rows[load], arrival_rate=load * mixed.capacity) for load in sorted(rows)]
    monitor = ForgettingMonitor(rate_time_constant(profile))
    again = replace(chosen, profile=profile, monitor=monitor, margin=margin, solved_loads=known)
    return _with_table(again, replace(solved, rows=tuple(of_profile)))


def _with_known(again: ModelPolicy, before: ModelPolicy) -> ModelPolicy:
    """The policy for what is known of the requests by the one before."""
    again = replace(again, bins=before.bins)  # which keep the learned edges
    if before.solved_sizes and not again.solved_sizes:
        again = again.with_solved_sizes(before.solved_sizes)
    return again.with_solved_shares(before.solved_shares) if before.solved_shares else again


def _with_table(chosen: ModelPolicy, table: PolicyTable) -> ModelPolicy:
    policy = _bounded(table_policy(table, chosen.profile), chosen.profile, chosen.max_wait)
    return replace(chosen, policy=policy, table=table)


def _bounded(policy: Policy, profile: Profile, max_wait: float) -> Policy:
    if max_wait == inf or isinstance(policy, StepPolicy):
        return policy
    return MaximumWait(policy, profile.max_batch_size, max_wait)


def combine(chosen: Mapping[str, ModelPolicy], by_shape: Collection[str] = ()) -> tuple[Policy, Monitor]:
    """Return one policy and one monitor for a device that serves these models.

    Models whose policies preempt between stages share one CoLocated policy. The requests of a model in `by_shape` are
    of different shapes, each of which is a kind of its own, as a bin is.
    """
    largest = Drain({model: choice.profile.max_batch_size for model, choice in chosen.items()}, "policy")
    by_stage = {model: choice.policy for model, choice in chosen.items() if isinstance(choice.policy, PreemptivePolicy)}
    shared = CoLocated(by_stage)
    policies = {
        model: shared if model in by_stage else _finishing(choice.policy, largest) for model, choice in chosen.items()
    }
    max_waits = {model: choice.max_wait for model, choice in chosen.items()}
    if len(chosen) == 1:
        ((model, only),) = chosen.items()
        if (only.bins is not None and only.bins.bins > 1) or model in by_shape:
            return PerKind(policies, max_waits=max_waits), only.monitor
        return only.policy if by_stage else policies[model], only.monitor
    monitor = PerModelMonitor({model: choice.monitor for model, choice in chosen.items()})
    if len(by_stage) == len(chosen):
        return shared, monitor
    profiles = {model: choice.profile for model, choice in chosen.items()}
    in_order = any(choice.objective < inf for choice in chosen.values())
    return PerKind(policies, profiles, max_waits, frozenset(by_stage), in_order), monitor


def _finishing(policy: Policy, largest: Drain) -> Policy:
    return policy if isinstance(policy, StepPolicy) else FinishSuspended(policy, largest)


def in_stages(text: str, profile: Profile, stages: int | None = None) -> Profile:
    """Return the profile to simulate a spec with, without lengths, and with stages if the policy decides between them.

    Args:
        text: the spec.
        profile: profile of the device.
        stages: number of equal stages, which replace measured ones; None: the measured stages, else 10 equal ones.
    """
    if profile.varies_by_length:
        profile = profile.without_lengths()
    if stages is not None:
        return profile.in_stages(stages)
    return profile.in_stages(_DEFAULT_STAGES) if by_stages(text) and profile.stage_service_times is None else profile


def by_stages(text: str) -> bool:
    """Whether the policy of a spec decides between stages.

    Raises:
        SpecError: the spec is malformed, or there is no such rule.
    """
    return rule_of(parse_spec(text).name).needs_stages


def solved(
    batch_size: Sequence[int], profile: Profile, mix: Mix | None = None, max_ages: MaxAges | None = None
) -> ModelPolicy:
    """Return the policy of one table, or a mix of two, at any rate and without a maximum wait."""
    policy = lookup([ActionRow(1.0, batch_size, mix, max_ages)], profile.max_batch_size)
    return ModelPolicy(SMDP.name, SMDP.name, {}, profile, policy, NoMonitor())


def ignored_keys(text: str, keys: Collection[str]) -> set[str]:
    """Return those of these keys that neither the rule of a spec takes, nor that of the policy within its bins.

    Raises:
        SpecError: the spec is malformed, or there is no such rule.
    """
    spec = parse_spec(text)
    ignored = set(keys) - rule_of(spec.name).keys
    return ignored_keys(spec.parameters["inner"], ignored) if "inner" in spec.parameters else ignored


def has_goal(text: str) -> bool:
    """Whether a spec, or that of the policy within its bins, names a bound, a weight or a deadline.

    Raises:
        SpecError: the spec is malformed, or there is no such rule.
    """
    if names_file(text):
        return True  # its table was solved for a profile
    parameters = parse_spec(text).parameters
    return bool(parameters.keys() & _GOALS) or ("inner" in parameters and has_goal(parameters["inner"]))


def takes_long(text: str) -> bool:
    """Whether building the policy of a spec, or of that within its bins, takes long.

    Raises:
        SpecError: the spec is malformed, or there is no such rule.
    """
    if names_file(text):
        return False
    spec = parse_spec(text)
    if "inner" in spec.parameters:
        return takes_long(spec.parameters["inner"])
    return rule_of(spec.name).check is not None


def names_file(text: str) -> bool:
    """Whether a spec is a FILE.json on the server's disk."""
    return is_file(split_name(text)[0])


def _check_keys(spec: Spec) -> None:
    rule = rule_of(spec.name)
    if spec.arg is not None and not rule.takes_arg:
        if spec.arg in rule.keys:
            raise SpecError(f"policy {spec.text!r}: {spec.arg} has no value; write {spec.name}:{spec.arg}=VALUE")
        example = f"write KEY=VALUE, as in {rule.example}" if ":" in rule.example else "leave it out"
        raise SpecError(f"policy {spec.text!r}: {spec.name} takes no argument {spec.arg!r}; {example}")
    if "priority_weights" in spec.parameters:
        raise SpecError(
            f"policy {spec.text!r}: priority_weights are those of a model, which its calls name; leave them out, and "
            "give --priority-weights to the server or to solve-policy"
        )
    unknown = sorted(set(spec.parameters) - rule.keys - {"max_wait_ms"})
    if unknown:
        known = ", ".join(sorted({*rule.keys, "max_wait_ms"} - {"priority_weights"}))
        raise SpecError(f"policy {spec.text!r}: unknown key {unknown[0]!r}; {spec.name} takes {known}")


def _with_defaults(spec: Spec, defaults: Mapping[str, str], max_wait: float) -> Spec:
    keys = rule_of(spec.name).keys
    spec = replace(spec, defaults=defaults)
    filling = {key: value for key, value in defaults.items() if key in keys}
    for key, value in filling.items():
        if key in spec.parameters and not _same(spec.parameters[key], value):
            raise spec.conflict(key, key)
    return replace(spec, parameters={"max_wait_ms": f"{1e3 * max_wait}", **filling, **spec.parameters})


def _same(given: str, default: str) -> bool:
    """Whether two values of a key are the same, as numbers if they are."""
    try:
        return float(given) == float(default)
    except ValueError:
        return given == default


def _parameters(spec: Spec) -> dict[str, Any]:
    given: dict[str, Any] = {**spec.parameters, "max_wait_ms": f"{spec.number('max_wait_ms'):g}"}
    return given if spec.arg is None else {"arg": spec.arg, **given}
