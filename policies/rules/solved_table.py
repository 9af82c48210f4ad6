"""The rules that act by a solved table: smdp and auto solve one, a policy file has one."""

from dataclasses import replace

from policies.objectives.frontier import BOUNDS
from policies.objectives.solving import solved_table, table_policy, weight_of, weighted_table_policy
from policies.objectives.table import load_table
from policies.profile import Profile
from policies.rules.length_aware import LengthAware, length_aware
from policies.rules.rule import Rule, SolvedPolicy
from policies.spec import Spec

_WEIGHT_KEYS = frozenset({"w2", *BOUNDS, "policy_form"})
_DESCRIPTION = "Launches by the solved table: the row nearest to the measured arrival rate{parameters}."


def _solve(spec: Spec, profile: Profile) -> SolvedPolicy:
    table = solved_table(spec, profile)
    return SolvedPolicy(weighted_table_policy(table, profile), table)


def _solve_auto(spec: Spec, profile: Profile) -> SolvedPolicy | LengthAware:
    """The solved table; for inputs that vary in length, where no goal is given, a policy that knows the lengths."""
    if profile.varies_by_length and not spec.parameters.keys() & _WEIGHT_KEYS:
        return length_aware(profile)
    return _solve(spec, profile)


def _load(spec: Spec, profile: Profile) -> SolvedPolicy:
    table = load_table(spec.name)
    return SolvedPolicy(table_policy(table, profile), table)


SMDP = Rule(
    name="smdp",
    build=_solve,
    check=weight_of,
    keys=_WEIGHT_KEYS,
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
