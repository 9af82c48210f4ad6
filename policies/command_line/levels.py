"""What solve-policy --priority-weights prints: the policy of two or more levels, or the largest batches beside bulk."""

import json
from collections.abc import Sequence
from math import isclose
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from policies.command_line.options import SolveOptions
from policies.percentile.ages import ResponseBounds
from policies.percentile.bulk import bulk_batches, largest_bulk_batch
from policies.profile import Profile
from policies.rules.by_level import parse_weights
from policies.solver.levels import LevelProblem, evaluate_levels, greedy_by_level, solve_levels
from policies.types import SpecError

_OPTIONS = frozenset(
    (
        *("profile", "arrival_rate", "load", "w2", "resource", "max_batch_size", "priority_weights", "priority_shares"),
        *("slo_p95_ms", "slo_share", "as_json"),
    )
)


def check_level_flags(given: Sequence[str]) -> None:
    """Check that only options are given that priority levels take.

    Raises:
        SpecError: another one is given, or one of the two is missing.
    """
    if missing := {"priority_weights", "priority_shares"} - set(given):
        flag = f"--{missing.pop().replace('_', '-')}"
        raise SpecError(f"{flag} is missing: give --priority-weights W1,W2 and --priority-shares S1,S2")
    for name in given:
        if name not in _OPTIONS:
            flag = f"--{name.replace('_', '-').strip('-')}"
            raise SpecError(f"--priority-weights does not take {flag}: leave {flag} out")


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
    profile, each = problem.truncated_profile, parse_weights(weights)
    parts = _parse_shares(shares, len(each))
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
    elif isinstance(bound, ResponseBounds) and len(bound.shares) == 1:
        fields |= _beside_bulk(profile, parts[0] * problem.arrival_rate, *bound.shares[0])
    else:
        raise SpecError("the bound of priority levels is one percentile, of level 1: give --slo-p95-ms or --slo-share")
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


def _parse_shares(text: str, levels: int) -> tuple[float, ...]:
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != levels or not all(share > 0.0 for share in shares) or not isclose(sum(shares), 1.0, rel_tol=1e-6):
        raise SpecError(f"--priority-shares {text}: give {levels} numbers above 0 that sum to 1, one for each level")
    return shares
