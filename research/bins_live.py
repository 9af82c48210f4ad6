"""Bins decided together against bins decided one by one, on a running server.

A batch of up to 8 samples takes 2 ms for each number of its longest sample; the model sleeps for that time. Lengths are
uniform from 1 to 64. The policies run one after the other, each on a server of its own, with the same arrivals. Each
learns the lengths from 400 requests first; solved tables are in use before the measured run begins. Loads are fractions
of what two bins can serve in full batches.

The record is written after each run, and runs in it are not made again; delete it to start over.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.servers.user_models import Longest
from benchmarks.support.harness import (
    ROOT,
    argument_parser,
    fill_record,
    markdown_table,
    run_json,
    serving,
    wait_until,
)
from policies.profile import Profile
from policies.sizing.bins import batch_time, optimised_edges

NAME = "bins_live"
LARGEST, LOADS, ROUNDS = 8, (0.6, 0.75), (1, 2)
OTHERS, TOGETHER = ("greedy", "multi-bin:2,inner=greedy"), ("smdp-bins:2", "smdp-bins:3")
POLICIES = (*OTHERS, *TOGETHER)
_LEARNING, _MEASURED = 400, 1500  # requests
_SOLVED_WITHIN = 400.0  # s


def profile() -> Profile:
    """The service times of the model by length."""
    lengths = tuple(Longest.lengths)
    rows = tuple(tuple(Longest.SECONDS * n for n in lengths) for _ in range(LARGEST))
    return Profile("longest", tuple(row[-1] for row in rows), lengths=lengths, length_service_times=rows)


def rate_at(load: float) -> float:
    """Arrival rate of a load, 1/s."""
    drawn = np.random.default_rng(0).integers(1, 65, 20_000)
    sizes = (Longest.SECONDS * (-(-drawn // 4) * 4.0)).tolist()
    return load * LARGEST / batch_time(sizes, optimised_edges(sizes, 2, LARGEST), LARGEST)


def measure(policy: str, load: float, seed: int) -> dict[str, Any]:
    """One run: mean and 95th percentile of the response time, ms, mean batch size, and latest sending, ms."""
    rate = rate_at(load)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "longest.json"
        file.write_text(profile().to_json())
        model = f"longest={ROOT / 'benchmarks' / 'servers' / 'user_models.py'}:Longest"
        flags = ("--device", "cpu", "--profile", str(file), "--max-batch-size", str(LARGEST), "--policy", policy)
        with serving(model, *flags) as server:
            load_of = partial(_offer, server.url, rate)
            load_of(_LEARNING, 100 + seed)
            if policy.startswith("smdp-bins"):
                wait_until(lambda: _solved(server) > 0, _SOLVED_WITHIN)
            report = load_of(_MEASURED, seed)
    assert report["ok"] == report["scheduled"], report["errors"]
    return {key: report[key] for key in ("mean_ms", "p95_ms", "mean_batch_size", "send_lag_p99_ms", "scheduled")}


def _offer(url: str, rate: float, requests: int, seed: int) -> Any:
    arrivals = ("--rate", f"{rate:g}", "--duration", f"{requests / rate:g}", "--seed", str(seed))
    return run_json("generate-load", url, *arrivals, "--sizes", "uniform:1:64")


def _solved(server: Any) -> float:
    """Number of tables that were solved for learned sizes."""
    return float(server.by_label("batchwright_policy_changes_total", "reason").get("sizes", 0.0))


def changes(record: dict[str, Any], spec: str) -> dict[tuple[float, int], float]:
    """Change of the mean by deciding about bins together, per cent of the better other policy, by load and round."""
    found = {}
    for load, seed in product(LOADS, ROUNDS):
        best = min(record[f"{policy}; {load:g}; {seed}"]["mean_ms"] for policy in OTHERS)
        found[load, seed] = 100.0 * (record[f"{spec}; {load:g}; {seed}"]["mean_ms"] / best - 1.0)
    return found


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = []
    together = [changes(record, spec) for spec in TOGETHER]
    for load, seed in product(LOADS, ROUNDS):
        runs = [record[f"{policy}; {load:g}; {seed}"] for policy in POLICIES]
        means = [f"{run['mean_ms']:.1f} ({run['p95_ms']:.0f})" for run in runs]
        rows.append((f"{load:g}", f"{seed}", *means, *(f"{change[load, seed]:+.1f}" for change in together)))
    heads = [f"{policy}, mean (p95), ms" for policy in POLICIES]
    heads += [f"{spec} to the better other, %" for spec in TOGETHER]
    return markdown_table(("load", "round", *heads), rows)


def main() -> None:
    """Measure the runs that the record lacks and print them."""
    argument_parser(__doc__).parse_args()
    runs: dict[str, Callable[[], Any]] = {
        f"{policy}; {load:g}; {seed}": partial(measure, policy, load, seed)
        for seed, load, policy in product(ROUNDS, LOADS, POLICIES)
    }
    print(table(fill_record(NAME, runs)))


if __name__ == "__main__":
    main()
