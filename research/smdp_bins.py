"""Bins decided together against the best of the policies that decide bin by bin, simulated with intervals.

A batch takes as long as its longest request, and the device draws 1 W while it is busy. Policies run in the server's
own queue on a virtual clock and measure the arrival rate themselves. All see the same arrivals and sizes in each run;
the interval of a difference is that of the differences by run. Loads are fractions of what two bins can serve in full
batches, so that one bin may be overloaded. The settings below were fixed before the first run.

The record is written after each cell, and cells in it are not measured again; delete it to start over.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import TRACE, argument_parser, fill_record, markdown_table, require_trace
from policies.catalog import ModelPolicy, choose, combine
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.arrivals import trace_column
from policies.queue.batcher import Batcher
from policies.rules.smdp_bins import LARGEST_BATCHES
from policies.sizing.bins import batch_time, optimised_edges
from policies.sizing.size_distributions import longest_request_profile
from policies.types import Launch, Request

NAME = "smdp_bins"
RUNS, REQUESTS, SETTLING = 5, 20_000, 2_000
LOADS = (0.4, 0.6, 0.75)
SETTINGS = (("uniform", 8), ("uniform", 32), ("trace", 8))  # sizes and the largest batch
EXISTING = (
    *("greedy", "multi-bin:2,inner=greedy", "multi-bin:3,inner=greedy", "smdp"),
    *("multi-bin:2,inner=smdp", "multi-bin:3,inner=smdp"),
)
TOGETHER = ("smdp-bins:2", "smdp-bins:3")
WEIGHTED_LOADS, WEIGHTS = (0.2, 0.4, 0.6), (20.0, 100.0)  # w2, s of response time for 1 W; of uniform sizes, B = 8
TOKEN = 0.02  # s a token of the trace
_Floats = NDArray[np.float64]


def sizes_of(name: str, number: int, seed: int) -> _Floats:
    """Sizes of requests, s: uniform on [1, 20], or drawn from the trace's numbers of generated tokens."""
    rng = np.random.default_rng([seed, 7])
    if name == "uniform":
        return rng.uniform(1.0, 20.0, number)
    return TOKEN * rng.choice(trace_column(str(TRACE), "GeneratedTokens"), number)


def profile_of(sizes: _Floats, largest: int) -> Profile:
    """A batch takes as long as its longest request, and 1 J a second."""
    profile = longest_request_profile(sizes, largest)
    return replace(profile, energies=profile.service_times)


def simulate(chosen: ModelPolicy, rate: float, sizes: str, seed: int) -> tuple[float, float]:
    """Mean response time, s, and mean power, W, of one run."""
    drawn = sizes_of(sizes, REQUESTS, seed)
    instants = np.cumsum(np.random.default_rng([seed, 8]).exponential(1.0 / rate, REQUESTS))
    requests = [
        Request(i, at, chosen.kind("m", size), size=size)
        for i, (at, size) in enumerate(zip(instants.tolist(), drawn.tolist(), strict=True))
    ]
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": chosen.profile.max_batch_size}, deepcopy(monitor))

    def service_time(launch: Launch) -> float:
        return max(request.size for request in launch.requests)

    run = simulator.run(batcher, requests, service_time, lambda service: service.finish - service.start)
    return float(np.mean(run.responses[SETTLING:])), float(run.mean_power or 0.0)


def measure(sizes: str, largest: int, load: float, w2: float) -> dict[str, Any]:
    """All policies in one setting: the cost w1 x s + w2 x W with w1 = 1 per s, and its interval, by policy."""
    sample = sizes_of(sizes, 20_000, 1000)
    profile = profile_of(sample, largest)
    rate = load * largest / batch_time(sample, optimised_edges(sample, 2, largest), largest)
    runs: dict[str, list[tuple[float, float]]] = {}
    together = [spec for spec in TOGETHER if largest <= LARGEST_BATCHES[int(spec[-1])]]
    for spec in (*EXISTING, *together):
        one_bin = not spec.startswith(("multi-bin", "smdp-bins"))
        if one_bin and rate >= profile.capacity:
            continue
        named = f"{spec},max_wait_ms=inf" if spec.startswith("multi-bin") else spec
        chosen = choose(named, profile, {"w2": f"{1e3 * w2:g}"}, max_wait=inf)
        chosen = chosen if chosen.bins is None else chosen.with_sizes(sample.tolist())
        runs[spec] = [simulate(chosen, rate, sizes, seed) for seed in range(RUNS)]
        print(f"  {spec}: {np.mean([a for a, _ in runs[spec]]):.3f} s", flush=True)
    costs = {spec: np.array([time + w2 * power for time, power in found]) for spec, found in runs.items()}
    best = min((spec for spec in costs if spec in EXISTING), key=lambda spec: costs[spec].mean())
    return {
        "rate": rate,
        "best_existing": best,
        "policies": {
            spec: {
                "cost": interval(costs[spec]),
                "response_s": float(np.mean([time for time, _ in runs[spec]])),
                "power_w": float(np.mean([power for _, power in runs[spec]])),
                "to_best_existing": interval(costs[spec] - costs[best]),
            }
            for spec in costs
        },
    }


def interval(values: _Floats) -> list[float]:
    """Mean, and half the width of its 95 per cent interval by Student's t with RUNS - 1 degrees of freedom."""
    return [round(float(values.mean()), 4), round(2.776 * float(values.std(ddof=1)) / RUNS**0.5, 4)]


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: the best existing policy, and those that decide about the bins together."""
    rows = []
    for key, found in record.items():
        sizes, largest, load, w2 = key.split()
        best = found["policies"][found["best_existing"]]["cost"]
        row = [sizes, largest, load, w2, found["best_existing"], f"{best[0]:.2f} ± {best[1]:.2f}"]
        for spec in TOGETHER:
            policy = found["policies"].get(spec)
            row.append("-" if policy is None else _gain(policy, best[0]))
        rows.append(row)
    head = ("sizes", "B", "load", "w2, s/W", "best bin by bin", "its cost", *(f"{spec}, cost" for spec in TOGETHER))
    return markdown_table(head, rows)


def _gain(policy: dict[str, Any], best: float) -> str:
    difference, half = policy["to_best_existing"]
    return f"{policy['cost'][0]:.2f} ({100 * difference / best:+.1f}% ± {100 * half / best:.1f})"


def main() -> None:
    """Measure the cells that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    require_trace(TRACE)
    settings = [(sizes, largest, load, 0.0) for (sizes, largest), load in product(SETTINGS, LOADS)]
    settings += [("uniform", 8, load, w2) for load, w2 in product(WEIGHTED_LOADS, WEIGHTS)]
    cells: dict[str, Callable[[], Any]] = {
        f"{sizes} {largest} {load:g} {w2:g}": partial(measure, sizes, largest, load, w2)
        for sizes, largest, load, w2 in settings
    }
    print(table(fill_record(NAME, cells)))


if __name__ == "__main__":
    main()
