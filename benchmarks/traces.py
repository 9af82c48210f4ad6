"""Arrivals that are no Poisson process, in simulation: a recorded trace, and bursts; who follows the rate best.

The trace is Azure's of conversations with a language model (2023), rescaled in time; a bursty process has two phases
in turn, of exponential lengths. All runs are of googlenet-tesla-p4 with w1 = w2 = 1; the cost is w1 x mean response
time in ms + w2 x mean power in W. Beside smdp:w2=1 as it is stands what it would be without the weighting for the mean
rate (policies/rules/lookup.py). Where the arrivals are a Poisson process, following the rate can only lose: how much?
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import save
from loadgen.simulated import simulate_policy
from policies.catalog import Chosen, choose, solved
from policies.profile import Profile, load_profile
from policies.queue.arrivals import Instants, mmpp, poisson, trace
from policies.queue.monitor import NoMonitor
from policies.rules.control_limit import ControlLimit
from policies.rules.lookup import Lookup
from policies.smdp.model import Problem
from policies.smdp.solver import solve

PROFILE, SPEC = "googlenet-tesla-p4", "smdp:w2=1"
TRACE = Path(__file__).parents[2] / "shared" / "data" / "azure-llm-2023-conv.csv"
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


def cost(chosen: Chosen, instants: Instants) -> float:
    """Mean response time in ms plus mean power in W."""
    run = simulate_policy(chosen, instants)
    return float(1e3 * run.responses.mean()) + (run.mean_power or 0.0)


def replayed(path: str, profile: Profile) -> dict[str, dict[str, float]]:
    """The cost of each policy by load of the rescaled trace."""
    return {
        f"{load}": {spec: cost(choose(spec, profile), trace(path, load * profile.capacity, None)) for spec in POLICIES}
        for load in LOADS
    }


def fixed(profile: Profile) -> Iterator[tuple[str, Chosen]]:
    """Policies that follow no rate: solved for each load of the grid, static, control limits, time-outs."""
    table = choose(SPEC, profile).table
    assert table is not None
    for row in table.rows:
        yield f"solved for load {row.load:.2f}", solved(row.batch_size, profile)
    for size in STATICS:
        yield f"static:{size}", choose(f"static:{size}", profile, max_wait=inf)
    for limit in LIMITS:
        policy = ControlLimit(limit, profile.max_batch_size)
        yield f"limit {limit}", Chosen("limit", "limit", {}, profile, policy, NoMonitor())
    for wait in TIMEOUTS:
        yield f"timeout:{wait}", choose(f"timeout:{wait}", profile)


def following(profile: Profile) -> dict[str, Chosen]:
    """smdp:w2=1 as it is, and with all rows for the weight 1."""
    plain = choose(f"{SPEC},max_wait_ms=inf", profile)
    assert isinstance(plain.policy, Lookup)
    return {
        "as it is": choose(SPEC, profile),
        "unweighted": replace(plain, policy=replace(plain.policy, weightings=())),
    }


def steady(load: float, profile: Profile) -> float:
    """What following the rate costs more than the policy solved for this rate, under Poisson arrivals (share)."""
    rate = load * profile.capacity
    instants = poisson(rate, DURATION, np.random.default_rng(SEED))
    known = solved(solve(Problem(profile, rate, w2=1.0)).batch_size, profile)
    return cost(choose(SPEC, profile), instants) / cost(known, instants) - 1.0


def burst(loads: tuple[float, ...], lengths: tuple[float, ...], profile: Profile) -> dict[str, Any]:
    """The best of the fixed policies, the best solved one, and how far off each way of following is (share)."""
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


def trace_table(costs: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a load, a column a policy."""
    lines = [f"| load | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 1) + "|"]
    return "\n".join(
        [*lines, *(f"| {load} | {' | '.join(f'{v:.2f}' for v in c.values())} |" for load, c in costs.items())]
    )


def burst_line(cell: dict[str, Any]) -> str:
    """One row of the bursts' table."""
    phases = ", ".join(f"{load:g} for {ms:g} ms" for load, ms in zip(cell["loads"], cell["lengths_ms"], strict=True))
    off = " | ".join(f"{100 * value:+.2f} %" for value in cell["off"].values())
    solved_off = 100 * (cell["best_solved_cost"] / cell["best_cost"] - 1)
    return f"| {phases} | {cell['best']} | {cell['best_cost']:.2f} | {solved_off:+.2f} % | {off} |"


def main() -> None:
    """Print the tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default=str(TRACE), help="CSV file with a TIMESTAMP column")
    path, profile = parser.parse_args().trace, load_profile(PROFILE)
    if not Path(path).is_file():
        sys.exit(f"no trace at {path}: give the path of azure-llm-2023-conv.csv (Azure/AzurePublicDataset)")
    costs = replayed(path, profile)
    print(trace_table(costs), flush=True)
    print("\n| load of each phase | best fixed | cost | best solved | smdp:w2=1 | unweighted |")
    print("|---|---|---|---|---|---|", flush=True)
    cells = []
    for loads, lengths in BURSTS:
        cells.append(burst(loads, lengths, profile))
        print(burst_line(cells[-1]), flush=True)
    lost = {f"{load}": steady(load, profile) for load in STEADY}
    print("\n| load | lost by following |\n|---|---|")
    print("\n".join(f"| {load} | {100 * share:+.2f} % |" for load, share in lost.items()))
    save("traces", {"profile": PROFILE, "w1": 1, "w2": 1, "trace": costs, "bursts": cells, "steady": lost})


if __name__ == "__main__":
    main()
