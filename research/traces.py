"""Arrivals that are not a Poisson process, in simulation: a recorded trace, and bursts; the cost of each policy.

The trace is Azure's of conversations with a language model (2023), rescaled in time. A bursty process alternates
between two phases of exponential lengths. All runs are of googlenet-tesla-p4 with w1 = w2 = 1; the cost is w1 x mean
response time in ms + w2 x mean power in W. smdp:w2=1 is compared with a variant without the weighting for the mean rate
(policies/queue/lookup.py). Under Poisson arrivals, the loss by following a measured rate instead of the known one.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import harness
from policies.catalog import ModelPolicy, choose, solved
from policies.planning.simulation import simulate_policy
from policies.profile import Profile, load_profile
from policies.queue.arrivals import Instants, mmpp, poisson, trace
from policies.queue.lookup import Lookup
from policies.queue.monitor import NoMonitor
from policies.rules.control_limit import ControlLimit
from policies.solver.model import Problem
from policies.solver.solver import solve

PROFILE, SPEC = "googlenet-tesla-p4", "smdp:w2=1"
LOADS = (0.3, 0.7)
POLICIES = (SPEC, "greedy", "static:8", "timeout:2", "timeout:5")
BURSTS = (  # loads of the two phases, and their mean lengths in s
    ((0.05, 1.3), (0.4, 0.15)),
    ((0.2, 1.1), (1.0, 0.1)),
    ((0.1, 0.9), (0.06, 0.06)),
    ((0.02, 0.8), (2.0, 2.0)),
    ((0.3, 1.5), (0.2, 0.03)),
    ((0.1, 1.0), (0.02, 0.01)),
    ((0.02, 2.0), (1.0, 0.04)),
    ((0.0, 0.9), (0.2, 0.1)),
)
STEADY = (0.05, 0.1, 0.3, 0.7, 0.9)  # loads
STATICS, LIMITS, TIMEOUTS = (4, 6, 8, 10, 12, 16, 20, 24, 32), range(1, 33), (1, 2, 3, 5, 8)
DURATION, SEED = 200.0, 1


def cost(chosen: ModelPolicy, instants: Instants) -> float:
    """Mean response time in ms plus mean power in W."""
    run = simulate_policy(chosen, instants)
    return float(1e3 * run.responses.mean()) + (run.mean_power or 0.0)


def replayed(path: Path, profile: Profile) -> dict[str, dict[str, float]]:
    """The cost of each policy by load of the rescaled trace."""
    found = {}
    for load in LOADS:
        instants = trace(str(path), load * profile.capacity, None)
        found[f"{load}"] = {spec: cost(choose(spec, profile), instants) for spec in POLICIES}
    return found


def fixed(profile: Profile) -> Iterator[tuple[str, ModelPolicy]]:
    """Policies that do not depend on a rate: solved for each load of the grid, static, control limits, timeouts."""
    table = choose(SPEC, profile).table
    assert table is not None
    for row in table.rows:
        yield f"solved for load {row.load:.2f}", solved(row.batch_size, profile)
    for size in STATICS:
        yield f"static:{size}", choose(f"static:{size}", profile, max_wait=inf)
    for limit in LIMITS:
        policy = ControlLimit(limit, profile.max_batch_size)
        yield f"limit {limit}", ModelPolicy("limit", "limit", {}, profile, policy, NoMonitor())
    for wait in TIMEOUTS:
        yield f"timeout:{wait}", choose(f"timeout:{wait}", profile)


def following(profile: Profile) -> dict[str, ModelPolicy]:
    """smdp:w2=1, and its variant without the weighting for the mean rate."""
    plain = choose(f"{SPEC},max_wait_ms=inf", profile)
    assert isinstance(plain.policy, Lookup)
    return {
        "as it is": choose(SPEC, profile),
        "unweighted": replace(plain, policy=replace(plain.policy, weightings=())),
    }


def steady(load: float, profile: Profile) -> float:
    """Cost of following the measured rate over that of the policy solved for the rate, minus 1; Poisson arrivals."""
    rate = load * profile.capacity
    instants = poisson(rate, DURATION, np.random.default_rng(SEED))
    known = solved(solve(Problem(profile, rate, w2=1.0)).batch_size, profile)
    return cost(choose(SPEC, profile), instants) / cost(known, instants) - 1.0


def burst(loads: tuple[float, ...], lengths: tuple[float, ...], profile: Profile) -> dict[str, Any]:
    """The best fixed policy, the best solved one, and the excess cost of each variant of smdp over the best."""
    rates = [load * profile.capacity for load in loads]
    instants = mmpp(rates, lengths, DURATION, np.random.default_rng(SEED))
    costs = {name: cost(chosen, instants) for name, chosen in fixed(profile)}
    best = min(costs, key=costs.__getitem__)
    return {
        "loads": loads,
        "lengths_ms": [1e3 * length for length in lengths],
        "requests": len(instants),
        "best": best,
        "best_cost": costs[best],
        "best_solved_cost": min(value for name, value in costs.items() if name.startswith("solved")),
        "off": {name: cost(c, instants) / costs[best] - 1.0 for name, c in following(profile).items()},
    }


def burst_row(cell: dict[str, Any]) -> list[str]:
    """One row of the bursts' table."""
    phases = ", ".join(f"{load:g} for {ms:g} ms" for load, ms in zip(cell["loads"], cell["lengths_ms"], strict=True))
    excess = (cell["best_solved_cost"] / cell["best_cost"] - 1.0, *cell["off"].values())
    return [phases, cell["best"], f"{cell['best_cost']:.2f}", *(f"{100 * share:+.2f} %" for share in excess)]


def main() -> None:
    """Print the tables and write the record."""
    parser = harness.argument_parser(__doc__)
    harness.add_trace_argument(parser)
    path, profile = parser.parse_args().trace, load_profile(PROFILE)
    harness.require_trace(path)
    costs = replayed(path, profile)
    rows = ([load, *(f"{value:.2f}" for value in by_policy.values())] for load, by_policy in costs.items())
    print(harness.markdown_table(("load", *POLICIES), rows), flush=True)
    cells = [burst(loads, lengths, profile) for loads, lengths in BURSTS]
    head = ("load of each phase", "best fixed", "cost", "best solved", SPEC, "unweighted")
    print("", harness.markdown_table(head, map(burst_row, cells)), "", sep="\n", flush=True)
    lost = {f"{load}": steady(load, profile) for load in STEADY}
    losses = ((load, f"{100 * share:+.2f} %") for load, share in lost.items())
    print(harness.markdown_table(("load", "lost by following"), losses))
    record = {"profile": PROFILE, "w1": 1, "w2": 1, "trace": costs, "bursts": cells, "steady": lost}
    harness.save_record("traces", record)


if __name__ == "__main__":
    main()
