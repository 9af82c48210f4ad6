"""The policy rules by name, and the way from a spec, NAME[:ARG][,KEY=VALUE]..., to a policy, its monitor and its SLO.

A new rule is one file in rules/ and one entry in `CATALOG`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from policies.profile import Profile
from policies.queue.monitor import ForgettingMonitor, Monitor, NoMonitor, PerModelMonitor
from policies.rules.catch_up import CATCH_UP
from policies.rules.co_located import CoLocated, StagePolicy
from policies.rules.continuous_batching import JOINING
from policies.rules.control_limit import GREEDY, SERIAL, STATIC, TIMEOUT
from policies.rules.drain import Drain
from policies.rules.finish_suspended import FinishSuspended
from policies.rules.lazy_batching import LAZY
from policies.rules.lookup import ActionRow, lookup
from policies.rules.max_under_deadline import MAX_UNDER_DEADLINE
from policies.rules.maximum_wait import MaximumWait
from policies.rules.multi_bin import MULTI_BIN, Bins
from policies.rules.per_kind import PerKind
from policies.rules.rate_matching import RATE_MATCHING, RATE_MATCHING_LITERAL
from policies.rules.rule import Division, Rule, SolvedPolicy
from policies.rules.solved_table import AUTO, FILE, SMDP
from policies.rules.traits import ActionTable, QueueLengthPolicy, StepPolicy
from policies.smdp.model import Problem
from policies.smdp.solver import solve
from policies.smdp.table import PolicyTable, table_of
from policies.solving import table_policy
from policies.spec import Spec, is_file, split_name
from policies.types import Kind, Mix, Policy, SpecError

MAX_WAIT = 1.0  # s
_STAGES = 10  # in simulations where neither the profile nor a flag says how many

CATALOG: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        GREEDY,
        SERIAL,
        STATIC,
        TIMEOUT,
        RATE_MATCHING,
        RATE_MATCHING_LITERAL,
        MAX_UNDER_DEADLINE,
        SMDP,
        LAZY,
        CATCH_UP,
        MULTI_BIN,
        JOINING,
        AUTO,
    )
}


@dataclass(frozen=True)
class Chosen:
    """The policy that a spec names, for one model on one device.

    Attributes:
        spec: as given.
        name: of the rule; "file" for a policy file.
        parameters: as given, defaults added.
        profile: of the model on its device; its largest size is the largest batch.
        policy: bounded by the maximum wait.
        monitor: measures the arrival rate as the policy needs it.
        slo: promised response time, s; inf where the spec names none.
        table: the solved table, where there is one for all requests.
        bins: give requests their kinds, where requests of different size do not share a batch.
        defaults: values filled in for keys that the spec leaves open; the policy is chosen again with the same ones.
    """

    spec: str
    name: str
    parameters: Mapping[str, Any]
    profile: Profile
    policy: Policy
    monitor: Monitor
    slo: float = inf
    table: PolicyTable | None = None
    bins: Bins | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)

    def kind(self, model: str, size: float) -> Kind:
        """The kind of a request, by its predicted service time alone, s."""
        return Kind(model) if self.bins is None else self.bins.kind(model, size)

    def arriving(self, model: str, size: float) -> Kind:
        """The kind of a request that arrives now; the bins learn from its size."""
        if self.bins is not None:
            self.bins.learn(size)
        return self.kind(model, size)

    def action_table(self, arrival_rate: float | None) -> ActionTable | None:
        """Return the actions by queue length at this rate, 1/s, or before a rate is measured (None).

        Returns None if the action also depends on waiting times, deadlines or sizes.
        """
        if self.bins is not None or not isinstance(self.policy, QueueLengthPolicy):
            return None
        return self.policy.action_table(arrival_rate)

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
    _check(spec)
    return spec


def choose(
    text: str, profile: Profile, defaults: Mapping[str, str] | None = None, max_wait: float = MAX_WAIT
) -> Chosen:
    """The policy that a spec names, on a device with this profile.

    Args:
        text: NAME[:ARG][,KEY=VALUE]... or FILE.json.
        profile: its largest size is the largest batch.
        defaults: values for keys that the rule takes and the spec leaves open.
        max_wait: maximum wait, s, where the spec leaves it open.

    Raises:
        SpecError: the spec cannot be used; says why and what to do.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, max_wait)
    return _chosen(spec, profile, rule_of(spec.name).build(spec, profile))


def _chosen(spec: Spec, profile: Profile, built: Policy | SolvedPolicy | Division) -> Chosen:
    rule = rule_of(spec.name)
    if isinstance(built, Division):
        return _divided(spec, rule, profile, built)
    policy, table = (built.policy, built.table) if isinstance(built, SolvedPolicy) else (built, None)
    return Chosen(
        spec=spec.text,
        name=rule.name,
        parameters=_parameters(spec),
        profile=profile,
        policy=_bounded(policy, profile, spec.number("max_wait_ms") / 1e3),
        monitor=ForgettingMonitor(rate_time_constant(profile)) if rule.monitor is None else rule.monitor(),
        slo=spec.number("slo_ms", spec.number("slo_p95_ms", inf)) / 1e3,
        table=table,
        defaults=spec.defaults,
    )


def _divided(spec: Spec, rule: Rule, profile: Profile, division: Division) -> Chosen:
    """The inner policy for smaller batches; each bin's rate is measured from a fraction of the arrivals."""
    _check_inner(spec, division)
    inner = choose(division.inner, profile.truncated(division.batch_size), spec.defaults)
    forgets = isinstance(inner.monitor, ForgettingMonitor)
    return replace(
        inner,
        spec=spec.text,
        name=rule.name,
        parameters=_parameters(spec),
        profile=profile,
        monitor=ForgettingMonitor(division.bins * rate_time_constant(profile)) if forgets else inner.monitor,
        table=None,
        bins=Bins(division.bins, division.cut),
        defaults=spec.defaults,
    )


def _check_inner(spec: Spec, division: Division) -> None:
    name = split_name(division.inner)[0]
    if not rule_of(name).per_bin:
        raise SpecError(f"policy {spec.text!r}: {name} cannot decide within a bin; name another inner policy, no file")


def rule_of(name: str) -> Rule:
    """The rule of this name, or the one for policy files.

    Raises:
        SpecError: there is no such rule.
    """
    rule = FILE if is_file(name) else CATALOG.get(name)
    if rule is None:
        raise SpecError(f"unknown policy {name!r}: choose one of {', '.join(CATALOG)}, or a FILE.json")
    return rule


def check_spec(text: str, max_batch_size: int, defaults: Mapping[str, str] | None = None, texts: bool = False) -> None:
    """Check whether a spec can be used, for texts or for images, as far as possible without a measured profile.

    Raises:
        SpecError: it cannot.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, MAX_WAIT)
    rule = rule_of(spec.name)
    if rule.check is not None:
        rule.check(spec)
        spec.number("max_wait_ms")
        return
    any_times = tuple(float(b) for b in range(1, max_batch_size + 1))
    profile = Profile("unmeasured", any_times)
    if texts:
        profile = replace(profile, lengths=(1,), length_service_times=tuple((t,) for t in any_times))
    built = rule.build(spec, profile)
    if isinstance(built, Division):
        _check_inner(spec, built)
        check_spec(built.inner, built.batch_size, defaults, texts)
    else:
        _chosen(spec, profile, built)


def solved_again(chosen: Chosen, profile: Profile, factor: float = 1.0) -> Chosen:
    """The same spec on another profile.

    A file's table is kept, unless it launches more than the profile now has. A percentile is not searched again: each
    load takes the weight of the row that had it, times `factor`, which an objective then adjusts by the response times
    that clients see. All other policies are chosen again.

    Raises:
        SpecError: the spec, or the file, cannot be used with this profile.
    """
    before = chosen.table
    if chosen.name == FILE.name and before is not None:
        max_wait = float(chosen.parameters["max_wait_ms"]) / 1e3
        return replace(chosen, profile=profile, policy=_bounded(table_policy(before, profile), profile, max_wait))
    if before is None or "slo_p95_ms" not in (before.bound or {}):
        again = choose(chosen.spec, profile, chosen.defaults)
        return replace(again, bins=chosen.bins)  # they have learned the sizes
    problem = Problem(profile, 1.0)
    at = [replace(problem, arrival_rate=row.load * profile.capacity, w2=factor * row.w2) for row in before.rows]
    table = table_of(problem, [solve(each) for each in at], before.bound)
    max_wait = float(chosen.parameters["max_wait_ms"]) / 1e3
    return replace(
        chosen,
        profile=profile,
        policy=_bounded(table_policy(table, profile), profile, max_wait),
        table=table,
        monitor=ForgettingMonitor(rate_time_constant(profile)),
    )


def _bounded(policy: Policy, profile: Profile, max_wait: float) -> Policy:
    if max_wait == inf or isinstance(policy, StepPolicy):
        return policy
    return MaximumWait(policy, profile.max_batch_size, max_wait)


def combine(chosen: Mapping[str, Chosen]) -> tuple[Policy, Monitor]:
    """One policy and one monitor for a device that serves these models; models by stages share one policy."""
    largest = Drain({model: choice.profile.max_batch_size for model, choice in chosen.items()}, "policy")
    by_stage = {model: choice.policy for model, choice in chosen.items() if isinstance(choice.policy, StagePolicy)}
    shared = CoLocated(by_stage)
    policies = {
        model: shared if model in by_stage else _finishing(choice.policy, largest) for model, choice in chosen.items()
    }
    if len(chosen) == 1:
        only = next(iter(chosen.values()))
        if only.bins is not None:
            return PerKind(policies), only.monitor
        return only.policy if by_stage else policies.popitem()[1], only.monitor
    monitor = PerModelMonitor({model: choice.monitor for model, choice in chosen.items()})
    return shared if len(by_stage) == len(chosen) else PerKind(policies, frozenset(by_stage)), monitor


def _finishing(policy: Policy, largest: Drain) -> Policy:
    return policy if isinstance(policy, StepPolicy) else FinishSuspended(policy, largest)


def in_stages(text: str, profile: Profile, stages: int | None = None) -> Profile:
    """The profile to simulate a spec with, for requests without lengths: by stages, where the policy decides by them.

    Args:
        text: the spec.
        profile: of the device.
        stages: number of equal stages, which replace measured ones; None: as measured, else 10.
    """
    if profile.varies_by_length:
        profile = profile.without_lengths()
    if stages is not None:
        return profile.in_stages(stages)
    return profile.in_stages(_STAGES) if by_stages(text) and profile.stage_service_times is None else profile


def by_stages(text: str) -> bool:
    """Whether the policy of a spec decides between stages.

    Raises:
        SpecError: the spec is malformed, or there is no such rule.
    """
    return rule_of(parse_spec(text).name).needs_stages


def rate_time_constant(profile: Profile) -> float:
    """Time constant of the rate's measurement, s.

    Twice the longest service time: the queue's state depends on the arrivals during a few services, not on older ones.
    And at least the time to serve 64 requests at full speed, which is longer where the largest batch is below 32: fewer
    arrivals make a noisy estimate, which costs response time at a steady rate.
    """
    return max(2 * profile.service_times[-1], 64 / profile.capacity)


def solved(batch_size: Sequence[int], profile: Profile, mix: Mix | None = None) -> Chosen:
    """One solved table, or a mix of two, without following the rate and without a maximum wait."""
    policy = lookup([ActionRow(1.0, batch_size, mix)], profile.max_batch_size)
    return Chosen(SMDP.name, SMDP.name, {}, profile, policy, NoMonitor())


def names_file(text: str) -> bool:
    """Whether a spec is a FILE.json, to be read from the server's disk."""
    return is_file(split_name(text)[0])


def _check(spec: Spec) -> None:
    rule = rule_of(spec.name)
    if spec.arg is not None and not rule.takes_arg:
        raise SpecError(f"policy {spec.text!r}: {spec.name} takes no argument {spec.arg!r}; write KEY=VALUE")
    unknown = sorted(set(spec.parameters) - rule.keys - {"max_wait_ms"})
    if unknown:
        known = ", ".join(sorted({*rule.keys, "max_wait_ms"}))
        raise SpecError(f"policy {spec.text!r}: unknown key {unknown[0]!r}; {spec.name} takes {known}")


def _with_defaults(spec: Spec, defaults: Mapping[str, str], max_wait: float) -> Spec:
    keys = rule_of(spec.name).keys
    filling = {key: value for key, value in defaults.items() if key in keys}
    for key, value in filling.items():
        if key in spec.parameters and spec.number(key) != float(value):
            raise SpecError(f"policy {spec.text!r} has {key}={spec.parameters[key]}, the flag {value}; give one")
    filled = {"max_wait_ms": f"{1e3 * max_wait}", **filling, **spec.parameters}
    return replace(spec, parameters=filled, defaults=defaults)


def _parameters(spec: Spec) -> dict[str, Any]:
    given: dict[str, Any] = {**spec.parameters, "max_wait_ms": f"{spec.number('max_wait_ms'):g}"}
    return given if spec.arg is None else {"arg": spec.arg, **given}
