"""What solve-policy --priority-weights prints: the policy of two or more levels, or the largest batches beside bulk."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from policies.command_line.options import SolveOptions
from policies.percentile.ages import ResponseBounds
from policies.percentile.bulk import bulk_batches, largest_bulk_batch
from policies.planning.devices import keeps
from policies.planning.level_plan import LevelDemand, plan_levels, simulate_level_device
from policies.profile import Profile
from policies.rules.by_level import parse_shares, parse_weights
from policies.solver.levels import LevelProblem, evaluate_levels, greedy_by_level, solve_levels
from policies.types import SpecError

_OPTIONS = frozenset(
    (
        *("profile", "arrival_rate", "load", "w2", "resource", "max_batch_size", "priority_weights", "priority_shares"),
        *("slo_p95_ms", "slo_share", "as_json"),
    )
)
_SIMULATED_REQUESTS = 100_000  # of one device of a plan
_PLAN_OPTIONS = frozenset(("plan", "spare", "simulate", "seed"))


def check_level_flags(given: Sequence[str]) -> None:
    """Check that only options are given that priority levels take.

    Raises:
        SpecError: another one is given, or one of the two is missing.
    """
    if missing := {"priority_weights", "priority_shares"} - set(given):
        flag = f"--{missing.pop().replace('_', '-')}"
        raise SpecError(f"{flag} is missing: give --priority-weights W1,W2 and --priority-shares S1,S2")
    taken = _OPTIONS | (_PLAN_OPTIONS if "plan" in given else frozenset())
    for name in given:
        if name not in taken:
            flag = f"--{name.replace('_', '-').strip('-')}"
            remedy = f"add --plan, or leave {flag} out" if name in _PLAN_OPTIONS else f"leave {flag} out"
            raise SpecError(f"--priority-weights does not take {flag}: {remedy}")


def show_levels(options: SolveOptions, weights: str, shares: str, as_json: bool) -> None:
    """Solve for the levels, and print the result.

    Args:
        options: the problem, with the arrival rate of all levels, and the bounds.
        weights: of the levels, W1,W2,...
        shares: of the levels in the arrivals, S1,S2,...
        as_json: whether to print a JSON object.

    Raises:
        SpecError: weights or shares are malformed, or the problem cannot be solved.
    """
    problem, bound = options.problem, options.bound
    profile, each, parts = _parsed(options, weights, shares)
    fields: dict[str, Any] = {
        "profile": profile.name,
        "arrival_rate_hz": problem.arrival_rate,
        "load": problem.arrival_rate / profile.capacity,
        "priority_weights": list(each),
        "priority_shares": list(parts),
    }
    began = perf_counter()
    if bound is None:
        fields |= _of_means(LevelProblem(profile, tuple(s * problem.arrival_rate for s in parts), each, problem.w2))
    else:
        fields |= _beside_bulk(profile, parts[0] * problem.arrival_rate, *_percentile(options))
    fields["solve_time_ms"] = round(1e3 * (perf_counter() - began), 3)
    if as_json:
        print(json.dumps(fields))
        return
    console = Console()
    for key, value in fields.items():
        if key not in ("batch_size", "by_largest_batch"):
            console.print(f"{key:30} {value}", highlight=False, soft_wrap=True)
    if "by_largest_batch" in fields:
        table = Table("largest batch", "level 1 within", "bulk, 1/s", box=None)
        for size, share_within, throughput in fields["by_largest_batch"]:
            table.add_row(str(size), f"{share_within:.4f}", f"{throughput:.1f}")
        console.print(table)


def show_level_plan(options: SolveOptions, weights: str, shares: str, spare: int, as_json: bool) -> None:
    """Plan the devices for the levels, and print the plan.

    Args:
        options: the problem, with the arrival rate of all levels, and the bound.
        weights: of the levels, W1,W2,...
        shares: of the levels in the arrivals, S1,S2,...
        spare: devices that may be out of service.
        as_json: whether to print a JSON object.

    Raises:
        SpecError: weights or shares are malformed, or no number of devices is enough.
    """
    rate = options.problem.arrival_rate
    profile, _, parts = _parsed(options, weights, shares)
    limit, share = _percentile(options)
    demand = LevelDemand(profile, parts[0] * rate, (1.0 - parts[0]) * rate, limit, share)
    requests = options.simulate or _SIMULATED_REQUESTS
    with Console(stderr=True).status("planning"):
        plan = plan_levels(demand, spare)
        simulated = simulate_level_device(demand, plan.devices, requests, options.seed)
    of_first, of_bulk = (simulated.responses[(simulated.levels == 1) == first] for first in (True, False))
    if not len(of_first) or not len(of_bulk):
        raise SpecError(f"--simulate {requests} has no requests of one of the levels: give a larger number")
    fields: dict[str, Any] = {
        "profile": profile.name,
        "arrival_rate_hz": rate,
        "bound": options.bound_entry,
        "devices": plan.devices,
        "spare": spare,
        "candidates": [
            {
                "devices": devices,
                "bound_kept": demand.is_kept(devices, found),
                "largest_batch_with_bulk": found.size,
                "share_within": found.share,
                "bulk_throughput_hz": devices * found.throughput,
            }
            for devices, found in plan.tried
        ],
        "simulated": {
            "share_within": float(np.mean(of_first <= limit)),
            "p95_ms": 1e3 * float(np.quantile(of_first, 0.95)),
            "bulk_mean_ms": 1e3 * float(of_bulk.mean()),
            "bulk_p95_ms": 1e3 * float(np.quantile(of_bulk, 0.95)),
            "bound_kept": keeps(replace(simulated, responses=of_first), ResponseBounds(((limit, share),))),
        },
    }
    if as_json:
        print(json.dumps(fields))
    else:
        _print_plan(fields)


def _print_plan(fields: dict[str, Any]) -> None:
    table = Table("devices", "kept", "largest with bulk", "level 1 within", "bulk at most, 1/s", box=None)
    for row in fields["candidates"]:
        found = f"{row['share_within']:.4f}", f"{row['bulk_throughput_hz']:.1f}"
        kept = "yes" if row["bound_kept"] else "no"
        table.add_row(str(row["devices"]), kept, str(row["largest_batch_with_bulk"]), *found)
    Console().print(table)
    if fields["spare"]:
        print(f"Without {fields['spare']} of the {fields['devices']} devices the bound is kept, too.")
    means = fields["simulated"]
    print(
        f"Simulated with {fields['devices']}: {means['share_within']:.2%} of level 1 in time, "
        f"p95 {means['p95_ms']:.4g} ms; bulk {means['bulk_mean_ms']:.4g} ms, p95 {means['bulk_p95_ms']:.4g} ms"
    )
    if not means["bound_kept"]:
        print("In the simulation the bound is not kept; plan with a smaller bound.")


def _parsed(options: SolveOptions, weights: str, shares: str) -> tuple[Profile, tuple[float, ...], tuple[float, ...]]:
    """The profile of a device, and the weights and shares of the levels."""
    each = parse_weights(weights)
    return options.problem.truncated_profile, each, parse_shares("--priority-shares", shares, len(each), len(each))


def _percentile(options: SolveOptions) -> tuple[float, float]:
    """Response time, s, and share of the one percentile that is bounded."""
    bound = options.bound
    if not (isinstance(bound, ResponseBounds) and len(bound.shares) == 1 and bound.mean == inf):
        raise SpecError("the bound of priority levels is one percentile, of level 1: give --slo-p95-ms or --slo-share")
    return bound.shares[0]


def _of_means(problem: LevelProblem) -> dict[str, Any]:
    found = solve_levels(problem)
    greedy = evaluate_levels(problem, greedy_by_level(problem.profile.max_batch_size))
    metered = problem.profile.saved == "energy"
    return {
        "w2": problem.w2,
        "average_cost": found.average_cost,
        "greedy_average_cost": greedy.average_cost,
        "mean_response_time_ms": [1e3 * time for time in found.mean_response_times],
        "greedy_mean_response_time_ms": [1e3 * time for time in greedy.mean_response_times],
        "mean_power_w": found.mean_power if metered and problem.w2 else None,
        **({} if metered or not problem.w2 else {"resource": problem.profile.saved, "mean_resource": found.mean_power}),
        "iterations": found.iterations,
        "batch_size": found.batch_size.tolist(),
    }


def _beside_bulk(profile: Profile, arrival_rate: float, response_time: float, share: float) -> dict[str, Any]:
    found = bulk_batches(profile, arrival_rate, response_time)
    chosen = largest_bulk_batch(found, share)
    if chosen.share < share:
        raise SpecError(
            f"{share:.4g} of level 1 within {1e3 * response_time:g} ms cannot be kept beside bulk: the most is "
            f"{chosen.share:.4g}, with batches of {chosen.size}; raise the bound"
        )
    return {
        "bound_ms": 1e3 * response_time,
        "largest_batch_with_bulk": chosen.size,
        "share_within": chosen.share,
        "bulk_throughput_hz": chosen.throughput,
        "bulk_throughput_alone_hz": profile.capacity,
        "by_largest_batch": [[each.size, each.share, each.throughput] for each in found],
    }
