"""Solve the tables of a policy spec for a profile, and build the policy that looks actions up in them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, log, sqrt

from policies.objectives.bounds import FORMS, check_form, check_power, parse_bounds, solve_within
from policies.objectives.frontier import BOUNDS, ShareBound, UnreachableError
from policies.objectives.table import PolicyTable, TableRow, default_loads, solve_table
from policies.profile import Profile
from policies.queue.lookup import ActionRow, Lookup, lookup, weighted
from policies.sizing.length_aware import length_aware
from policies.solver.distributions import measured_service
from policies.solver.model import Problem
from policies.solver.solver import Solution
from policies.spec import Spec
from policies.types import SpecError

LEAST_SAVING = 0.02  # relative; a smaller saving does not justify a goal, a longer bound or waiting
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 2, 4, 8)  # factors of w2 other than 1, for which tables are solved
_STEP = 1.35  # ratio of neighbouring loads in the tables for those factors
_CACHED = 64  # tables of this process: devices of one kind have the same profile at the start
_SIMULATED_REQUESTS = 15_000  # for each load, where a percentile is bounded


def solved_table(spec: Spec, profile: Profile, loads: Sequence[float] = ()) -> PolicyTable:
    """Solve a table for the weight or bound of a spec; a load without a feasible policy gets the nearest one.

    Args:
        spec: of a solved table.
        profile: the device, for batches of the lengths that arrive.
        loads: ascending, for a spec with a bound; empty for the whole grid.

    A row of maximum ages never waits where waiting saves less than 2 per cent, which is within the accuracy of a
    profile, if the bound is then kept.
    Service times that vary by a tenth or more, as they do on a busy CPU, are solved as gamma distributed.
    """
    key, value = weight_of(spec)
    problem = Problem(profile, 1.0, service=measured_service(profile))
    if key == "w2":
        return _solve_once(replace(problem, w2=float(value)), tuple(default_loads()))
    check_power([key], profile)
    form = spec.parameters.get("policy_form", FORMS[0])
    bound = parse_bounds([(key, spec.parameters[key])], form, _SIMULATED_REQUESTS)
    mixed = not isinstance(bound, ShareBound)  # so few requests do not resolve the probability of a mix

    def nearest(at_load: Problem) -> Solution:
        try:
            return solve_within(at_load, bound, mixed, least_saving=LEAST_SAVING)
        except UnreachableError as error:
            return error.nearest

    return solve_table(problem, loads or default_loads(), nearest, {key: value})


def weight_of(spec: Spec) -> tuple[str, float | str]:
    """Return the parameter that determines the weight of power, w2 or one of the bounds, and its value.

    The value of slo_share is a text, MS:SHARE.

    Raises:
        SpecError: the spec names more than one, or the value is invalid.
    """
    given = [key for key in ("w2", *BOUNDS) if key in spec.parameters]
    if len(given) > 1:
        own = [key for key in given if key not in spec.defaults]
        if 0 < len(own) < len(given):
            raise spec.conflict(own[0], next(key for key in given if key in spec.defaults))
        raise SpecError(f"policy {spec.text!r} sets {given[0]} and {given[1]}; give one of them")
    key = given[0] if given else "w2"
    check_form(spec.parameters.get("policy_form", FORMS[0]))
    if key == "slo_share":
        parse_bounds([(key, spec.parameters[key])])
        return key, spec.parameters[key]
    value = spec.number(key, 0.0)
    if not value < inf:
        raise SpecError(f"policy {spec.text!r}: {key} must be finite")
    if key != "w2":
        parse_bounds([(key, spec.parameters[key])])
    return key, value


def weighted_table_policy(table: PolicyTable, profile: Profile) -> Lookup:
    """Build the policy of a table that scales w2 by mean rate / current rate (see queue/lookup.py for the reason).

    A table solved for a bound has no single w2 and is used as it is. The tables for the other factors have up to 14
    loads each; three times as many changed the cost under bursts by less than 0.1 per cent.
    """
    plain = replace(table_policy(table, profile), uses_slowdown=not table.bound)
    if not table.w2:
        return plain
    problem = Problem(profile, 1.0, table.w1, service=measured_service(profile))
    tables = {f: _solve_once(replace(problem, w2=f * table.w2), _coarse_loads(f)) for f in _FACTORS}
    return weighted(plain, {factor: [_row(row) for row in other.rows] for factor, other in tables.items()})


@lru_cache(_CACHED)
def _solve_once(problem: Problem, loads: tuple[float, ...]) -> PolicyTable:
    return solve_table(problem, loads)


def _coarse_loads(factor: float) -> tuple[float, ...]:
    # A factor above 1 at a higher load would need a mean load above 1.
    highest = min(0.98, sqrt(2.0) / factor)
    steps = round(log(highest / 0.02) / log(_STEP))
    return tuple(0.02 * (highest / 0.02) ** (step / steps) for step in range(steps + 1))


def table_policy(table: PolicyTable, profile: Profile) -> Lookup:
    """Build the policy that looks actions up in a solved table.

    Raises:
        SpecError: the table launches larger batches than the profile has.
    """
    tables = [t for row in table.rows for t in (row.batch_size, row.mix.batch_size if row.mix else (0,))]
    largest = max(map(max, tables))
    if largest > profile.max_batch_size:
        raise SpecError(
            f"the policy file launches batches of {largest}, above the maximum {profile.max_batch_size} of "
            f"profile {profile.name!r}; solve it for this profile or raise --max-batch-size"
        )
    policy = lookup([_row(row) for row in table.rows], min(table.max_batch_size, profile.max_batch_size))
    return by_similar(policy, profile)


def by_similar(policy: Lookup, profile: Profile) -> Lookup:
    """The policy, whose batches are of requests of similar sizes where the profile has lengths."""
    return replace(policy, similar=length_aware(profile)) if profile.varies_by_length else policy


def _row(row: TableRow) -> ActionRow:
    return ActionRow(row.arrival_rate, row.batch_size, row.mix, row.max_ages)
