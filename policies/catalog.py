"""From a policy spec, NAME[:ARG][,KEY=VALUE]..., to what serves: the policy, its monitor, its SLO.

A new policy is one file in rules/ and one line in `CATALOG`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from policies.profile import Profile
from policies.queue.monitor import ForgettingMonitor, Monitor, NoMonitor, PerModelMonitor, TumblingMonitor
from policies.rules.catch_up import CatchUp, catch_up
from policies.rules.co_located import CoLocated
from policies.rules.control_limit import greedy, serial, static, timeout
from policies.rules.drain import Drain
from policies.rules.finishing import Finishing
from policies.rules.joining import Joining
from policies.rules.lazy_batching import SLACKS, LazyBatching
from policies.rules.lookup import Lookup, Row, lookup
from policies.rules.max_under_deadline import MaxUnderDeadline
from policies.rules.multi_bin import Bins, Cut
from policies.rules.patient import Patient
from policies.rules.per_kind import PerKind
from policies.rules.rate_matching import RateMatching, RateMatchingLiteral
from policies.sizing.bins import equal_edges, optimised_edges
from policies.smdp.model import Problem
from policies.smdp.solver import solve
from policies.smdp.table import PolicyTable, load_table, table_of
from policies.solving import following, solved_table, table_policy, weight_of
from policies.spec import Spec, is_file, split_name
from policies.types import Kind, Mix, Policy, SpecError
from policies.unrolled import planned, refuse_classifier

MAX_WAIT = 1.0  # s
_STAGES = 10  # in simulations, where neither the profile nor anybody else says
_BY_STAGES = (LazyBatching, CatchUp)
_MOST_BINS = 64


@dataclass(frozen=True)
class Chosen:
    """What a spec came to, for one model.

    Attributes:
        spec: as given.
        name: of the policy.
        parameters: as given, defaults added.
        profile: of the model on its device; its largest size is the largest batch.
        policy: with its waiting bounded.
        monitor: measures the arrival rate in the way the policy wants it.
        slo: promised response time, s; inf where the spec names none.
        table: the solved table, where there is one for all requests.
        bins: give requests their kinds, where requests of different size are not to share a batch.
        defaults: what filled the keys that the spec leaves open; choosing again must use the same.
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
        """What a request may share a batch with, by its predicted service time alone, s."""
        return Kind(model) if self.bins is None else self.bins.kind(model, size)

    def arriving(self, model: str, size: float) -> Kind:
        """The kind of a request that arrives now; the bins learn from it."""
        if self.bins is not None:
            self.bins.learn(size)
        return self.kind(model, size)


@dataclass(frozen=True)
class _Rule:
    """How a name becomes a policy, a table to look up, or all of it; and which keys it takes besides max_wait_ms."""

    build: Callable[[Spec, Profile], Policy | PolicyTable | Chosen]
    keys: frozenset[str] = frozenset()
    takes_arg: bool = False


def _max_under_deadline(spec: Spec, profile: Profile) -> Policy:
    spec.number("slo_ms")
    return MaxUnderDeadline(profile.service_times)


def _lazy(spec: Spec, profile: Profile) -> Policy:
    slack = next((s for s in SLACKS if s == spec.parameters.get("slack", "printed")), None)
    if slack is None:
        raise SpecError(f"policy {spec.text!r}: unknown slack {spec.parameters['slack']!r}; give {', '.join(SLACKS)}")
    by_stage, steps = planned(spec, profile)
    return LazyBatching(by_stage, slack, steps)


def _joining(spec: Spec, profile: Profile) -> Policy:
    refuse_classifier(spec, profile)
    if profile.lengths is None:
        raise SpecError(
            f"policy {spec.text!r} is for models that generate tokens, with --sizes where it is simulated; profile "
            f"{profile.name!r} knows no lengths, or its requests have none"
        )
    return Joining(profile.max_batch_size if spec.arg is None else spec.whole("ARG", 1, profile.max_batch_size))


@dataclass(frozen=True)
class _Division:
    """Into how many bins, how they are cut, how large the batches are, and which spec decides within each."""

    bins: int
    cut: Cut
    batch_size: int
    inner: str


def _division(spec: Spec, largest: int) -> _Division:
    bins = spec.whole("ARG", 1, _MOST_BINS)
    size = spec.whole("batch_size", 1, largest) if "batch_size" in spec.parameters else largest
    cuts: dict[str, Cut] = {
        "optimised": partial(optimised_edges, bins=bins, batch_size=size),
        "equal": partial(equal_edges, bins=bins),
    }
    edges = spec.parameters.get("edges", "optimised")
    if edges not in cuts:
        raise SpecError(f"policy {spec.text!r}: unknown edges {edges!r}; give {' or '.join(cuts)}")
    inner = f"{spec.parameters.get('inner', f'static:{size}')},max_wait_ms={spec.parameters['max_wait_ms']}"
    name = split_name(inner)[0]
    if name in _UNDIVIDED or is_file(name):
        raise SpecError(f"policy {spec.text!r}: {name} cannot decide within a bin; name another inner policy, no file")
    return _Division(bins, cuts[edges], size, inner)


def _multi_bin(spec: Spec, profile: Profile) -> Chosen:
    """What the inner policy came to for smaller batches; a bin's rate is measured from so many times fewer arrivals."""
    division = _division(spec, profile.max_batch_size)
    inner = choose(division.inner, profile.truncated(division.batch_size), spec.defaults)
    forgets = isinstance(inner.monitor, ForgettingMonitor)
    monitor = ForgettingMonitor(division.bins * memory(profile)) if forgets else inner.monitor
    return replace(inner, profile=profile, monitor=monitor, table=None, bins=Bins(division.bins, division.cut))


_UNDIVIDED = ("lazy", "catch-up", "multi-bin")
_WEIGHT = frozenset({"w2", "slo_mean_ms", "slo_p95_ms", "power_cap_w"})

CATALOG: Mapping[str, _Rule] = {
    "greedy": _Rule(lambda _, profile: greedy(profile.max_batch_size)),
    "serial": _Rule(lambda *_: serial()),
    "static": _Rule(lambda s, profile: static(s.whole("ARG", 1, profile.max_batch_size)), takes_arg=True),
    "timeout": _Rule(lambda s, profile: timeout(profile.max_batch_size, s.number("ARG") / 1e3), takes_arg=True),
    "rate-matching": _Rule(lambda _, profile: RateMatching(profile.service_times)),
    "rate-matching-literal": _Rule(lambda _, profile: RateMatchingLiteral(profile.service_times)),
    "max-under-deadline": _Rule(_max_under_deadline, frozenset({"slo_ms"})),
    "smdp": _Rule(solved_table, _WEIGHT),
    "lazy": _Rule(_lazy, frozenset({"slo_ms", "slack", "timesteps"})),
    "catch-up": _Rule(lambda *given: catch_up(*planned(*given)), frozenset({"slo_ms", "timesteps"})),
    "multi-bin": _Rule(_multi_bin, frozenset({"batch_size", "inner", "edges"}), takes_arg=True),
    "joining": _Rule(_joining, takes_arg=True),
    "auto": _Rule(solved_table, _WEIGHT),
}


def parse_spec(text: str) -> Spec:
    """Split NAME[:ARG][,KEY=VALUE]... and check names and keys.

    Raises:
        SpecError: an unknown policy or key, or a missing or needless argument.
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
    """What serves for a spec, on a device with this profile.

    Args:
        text: NAME[:ARG][,KEY=VALUE]... or FILE.json.
        profile: its largest size is the largest batch.
        defaults: values for keys that the policy takes and the spec leaves open.
        max_wait: waiting time of the oldest request at which a wait ends, s, where the spec leaves it open.

    Raises:
        SpecError: the spec cannot be used; says why and what to do.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, max_wait)
    built = load_table(spec.name) if is_file(spec.name) else CATALOG[spec.name].build(spec, profile)
    name, parameters = "file" if is_file(spec.name) else spec.name, _parameters(spec)
    if isinstance(built, Chosen):
        return replace(built, spec=text, name=name, parameters=parameters, defaults=defaults or {})
    table = built if isinstance(built, PolicyTable) else None
    inner = _acting(built, profile, name) if isinstance(built, PolicyTable) else built
    return Chosen(
        spec=text,
        name=name,
        parameters=parameters,
        profile=profile,
        policy=_patient(inner, profile, spec.number("max_wait_ms") / 1e3),
        monitor=TumblingMonitor() if isinstance(inner, RateMatchingLiteral) else ForgettingMonitor(memory(profile)),
        slo=spec.number("slo_ms", spec.number("slo_p95_ms", inf)) / 1e3,
        table=table,
        defaults=defaults or {},
    )


def check_spec(text: str, max_batch_size: int, defaults: Mapping[str, str] | None = None, texts: bool = False) -> None:
    """Whether a spec can be used, for texts or for pictures, as far as that can be told before it is profiled.

    Raises:
        SpecError: it cannot.
    """
    spec = _with_defaults(parse_spec(text), defaults or {}, MAX_WAIT)
    rule = CATALOG.get(spec.name)
    if rule is not None and rule.build is solved_table:  # solving takes long, and would be for nothing
        weight_of(spec)
        spec.number("max_wait_ms")
    elif rule is not None and rule.build is _multi_bin:
        division = _division(spec, max_batch_size)
        check_spec(division.inner, division.batch_size, defaults, texts)
    else:
        any_times = tuple(float(b) for b in range(1, max_batch_size + 1))
        profile = Profile("unmeasured", any_times)
        by_length = replace(profile, lengths=(1,), length_service_times=tuple((t,) for t in any_times))
        choose(text, by_length if texts else profile, defaults)


def solved_again(chosen: Chosen, profile: Profile, factor: float = 1.0) -> Chosen:
    """The same spec on another profile.

    A file is taken at its word, unless it launches more than the profile now has. A percentile is not searched for
    anew: each load takes the weight of the row that had it, times `factor`, which an objective then adjusts by what
    clients see. All others are chosen again.

    Raises:
        SpecError: the spec, or the file, cannot be used with this profile.
    """
    before = chosen.table
    if chosen.name == "file" and before is not None:
        max_wait = float(chosen.parameters["max_wait_ms"]) / 1e3
        return replace(chosen, profile=profile, policy=_patient(table_policy(before, profile), profile, max_wait))
    if before is None or "slo_p95_ms" not in (before.bound or {}):
        return replace(choose(chosen.spec, profile, chosen.defaults), bins=chosen.bins)  # which know the sizes
    problem = Problem(profile, 1.0)
    at = [replace(problem, arrival_rate=row.load * profile.capacity, w2=factor * row.w2) for row in before.rows]
    table = table_of(problem, [solve(each) for each in at], before.bound)
    max_wait = float(chosen.parameters["max_wait_ms"]) / 1e3
    policy = _patient(table_policy(table, profile), profile, max_wait)
    return replace(chosen, profile=profile, policy=policy, table=table, monitor=ForgettingMonitor(memory(profile)))


def _acting(table: PolicyTable, profile: Profile, name: str) -> Lookup:
    """A file is taken at its word."""
    return table_policy(table, profile) if name == "file" else following(table, profile)


def _patient(inner: Policy, profile: Profile, max_wait: float) -> Policy:
    never_waits = max_wait == inf or isinstance(inner, (*_BY_STAGES, Joining))
    return inner if never_waits else Patient(inner, profile.max_batch_size, max_wait)


def combine(chosen: Mapping[str, Chosen]) -> tuple[Policy, Monitor]:
    """One policy and one monitor for a device that serves these models; those by stages share one policy."""
    largest = Drain({model: choice.profile.max_batch_size for model, choice in chosen.items()}, "policy")
    rules = {model: choice.policy for model, choice in chosen.items() if isinstance(choice.policy, _BY_STAGES)}
    shared = CoLocated(rules)
    policies = {
        model: shared if model in rules else c.policy if isinstance(c.policy, Joining) else Finishing(c.policy, largest)
        for model, c in chosen.items()
    }
    if len(chosen) == 1:
        only = next(iter(chosen.values()))
        if only.bins is not None:
            return PerKind(policies), only.monitor
        return only.policy if rules else policies.popitem()[1], only.monitor
    monitor = PerModelMonitor({model: choice.monitor for model, choice in chosen.items()})
    return shared if len(rules) == len(chosen) else PerKind(policies, frozenset(rules)), monitor


def in_stages(text: str, profile: Profile, stages: int | None = None) -> Profile:
    """The profile to simulate a spec with, for requests of no length: by stages, where the policy decides by them.

    Args:
        text: the spec.
        profile: of the device.
        stages: so many equal ones, whatever is known; None: as measured, else 10.
    """
    profile = replace(profile, lengths=None, length_service_times=None) if profile.lengths is not None else profile
    if stages is not None:
        return profile.in_stages(stages)
    return profile.in_stages(_STAGES) if by_stages(text) and profile.stage_service_times is None else profile


def by_stages(text: str) -> bool:
    """Whether the policy of a spec decides between stages.

    Raises:
        SpecError: there is no such policy.
    """
    return parse_spec(text).name in ("lazy", "catch-up")


def memory(profile: Profile) -> float:
    """Time constant of the rate's measurement, s.

    Two of the longest services: the queue forgets within a few of them, so the rate that matters is that recent.
    And at least what serving 64 takes at full speed, which is longer where the largest batch is below 32: fewer
    arrivals are too small a sample, and steady ones would pay for the noise.
    """
    return max(2 * profile.service_times[-1], 64 / profile.capacity)


def solved(batch_size: Sequence[int], profile: Profile, mix: Mix | None = None) -> Chosen:
    """One solved table, or a mix of two, as it is: no rate following, no bound on waiting."""
    policy = lookup([Row(1.0, batch_size, mix)], profile.max_batch_size)
    return Chosen("smdp", "smdp", {}, profile, policy, NoMonitor())


def names_file(text: str) -> bool:
    """Whether a spec is a FILE.json: something to read from this machine's disk."""
    return is_file(split_name(text)[0])


def _check(spec: Spec) -> None:
    if not is_file(spec.name) and spec.name not in CATALOG:
        raise SpecError(f"unknown policy {spec.name!r}: choose one of {', '.join(CATALOG)}, or a FILE.json")
    rule = _Rule(solved_table) if is_file(spec.name) else CATALOG[spec.name]
    if spec.arg is not None and not rule.takes_arg:
        raise SpecError(f"policy {spec.text!r}: {spec.name} takes no argument {spec.arg!r}; write KEY=VALUE")
    unknown = sorted(set(spec.parameters) - rule.keys - {"max_wait_ms"})
    if unknown:
        known = ", ".join(sorted({*rule.keys, "max_wait_ms"}))
        raise SpecError(f"policy {spec.text!r}: unknown key {unknown[0]!r}; {spec.name} takes {known}")


def _with_defaults(spec: Spec, defaults: Mapping[str, str], max_wait: float) -> Spec:
    keys = CATALOG[spec.name].keys if spec.name in CATALOG else frozenset()
    filling = {key: value for key, value in defaults.items() if key in keys}
    for key, value in filling.items():
        if key in spec.parameters and spec.number(key) != float(value):
            raise SpecError(f"policy {spec.text!r} says {key}={spec.parameters[key]}, the flag {value}; give one")
    filled = {"max_wait_ms": f"{1e3 * max_wait}", **filling, **spec.parameters}
    return replace(spec, parameters=filled, defaults=defaults)


def _parameters(spec: Spec) -> dict[str, Any]:
    given: dict[str, Any] = {**spec.parameters, "max_wait_ms": f"{spec.number('max_wait_ms'):g}"}
    return given if spec.arg is None else {"arg": spec.arg, **given}
