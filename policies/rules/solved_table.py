"""The rules that act by a solved table: smdp and auto solve one, a policy file has one."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from policies.objectives.frontier import BOUNDS, ShareBound, parse_bound
from policies.objectives.solving import by_similar, solved_table, table_policy, weight_of, weighted_table_policy
from policies.objectives.table import load_table
from policies.profile import Profile
from policies.rules.by_level import limited_bulk, parse_weights, solve_for_shares
from policies.rules.control_limit import greedy
from policies.rules.rule import AdaptedPolicy, Built, Rule, SolvedPolicy
from policies.sizing.length_aware import length_aware
from policies.sizing.padded import of_mixed_lengths
from policies.spec import Spec
from policies.types import Policy, SpecError

_WEIGHT_KEYS = frozenset({"w2", *BOUNDS, "policy_form"})
_LEVELS = "priority_weights"
_DESCRIPTION = "Launches by the solved table: the row nearest to the measured arrival rate{parameters}."


def _check(spec: Spec) -> None:
    key, _ = weight_of(spec)
    if _LEVELS not in spec.parameters:
        return
    parse_weights(spec.parameters[_LEVELS], ":")
    if key not in ("w2", "slo_p95_ms", "slo_share"):
        raise SpecError(
            f"policy {spec.text!r}: {key} cannot be kept with priority weights; give slo_p95_ms or slo_share, which "
            "then hold for level 1, or w2"
        )


def _by_level(spec: Spec, profile: Profile) -> Policy | AdaptedPolicy:
    """The policy of priority levels: for a percentile of the first, or for the sum of their weighted means."""
    _check(spec)
    weights, (key, value) = parse_weights(spec.parameters[_LEVELS], ":"), weight_of(spec)
    if key == "w2":
        mixed = of_mixed_lengths(profile)
        solve = partial(solve_for_shares, profile=mixed, weights=weights, w2=float(value))
        return AdaptedPolicy(policy=greedy(profile.max_batch_size), for_shares=solve)
    bound = parse_bound(key, str(value))
    assert isinstance(bound, ShareBound)  # of these keys
    if not profile.varies_by_length:
        return limited_bulk(profile, bound.response_time, bound.share)
    return AdaptedPolicy(partial(_limited_mixed, profile=profile, bound=bound))


def _limited_mixed(sizes: Sequence[float], profile: Profile, bound: ShareBound) -> Policy:
    return limited_bulk(of_mixed_lengths(profile, sizes), bound.response_time, bound.share)


def _solve(spec: Spec, profile: Profile) -> Built:
    if _LEVELS in spec.parameters:
        return _by_level(spec, profile)
    if profile.varies_by_length:
        return AdaptedPolicy(partial(_solve_mixed, spec=spec, profile=profile))
    return _solve_mixed((), spec, profile)


def _solve_mixed(sizes: Sequence[float], spec: Spec, profile: Profile) -> SolvedPolicy:
    """The table for batches of requests whose lengths vary as these sizes, s, do."""
    mixed = of_mixed_lengths(profile, sizes)
    table = solved_table(spec, mixed)
    return SolvedPolicy(by_similar(weighted_table_policy(table, mixed), profile), table)


def _solve_auto(spec: Spec, profile: Profile) -> Built:
    """The solved table; for inputs that vary in length, where no goal is given, a policy that knows the lengths."""
    if profile.varies_by_length and not spec.parameters.keys() & (_WEIGHT_KEYS | {_LEVELS}):
        return length_aware(profile)
    return _solve(spec, profile)


def _load(spec: Spec, profile: Profile) -> SolvedPolicy:
    table = load_table(spec.name)
    return SolvedPolicy(table_policy(table, profile), table)


SMDP = Rule(
    name="smdp",
    build=_solve,
    check=_check,
    keys=_WEIGHT_KEYS | {_LEVELS},
    description=_DESCRIPTION,
    example="smdp:w2=30",
)
AUTO = replace(
    SMDP,
    name="auto",
    build=_solve_auto,
    description=f"{_DESCRIPTION} For padded inputs without a goal: those of similar size share batches.",
    example="auto",
)
FILE = Rule(
    name="file",
    build=_load,
    per_bin=False,
    description="Launches by the solved table of a file: the row nearest to the measured arrival rate.",
    example="FILE.json",
)
