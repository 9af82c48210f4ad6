"""Measured against simulated: the same arrivals over HTTP and on the virtual clock, policy by policy.

The emulated device plays googlenet-tesla-p4-x10; one minute of Poisson arrivals a cell, raw pixels by the Open
Inference Protocol. Beside ours, in the same run, at one load, the yardstick of benchmarks/bare.py: what it takes
beyond the simulated time is what HTTP costs on the machine of the day. A cell that stands in the record is not
measured again: delete the record to start over.
"""

import argparse
from typing import Any

from benchmarks.serving import RECORDS, bare, load, median_of_histogram, run_json, save, serving
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
BARE = "bare FastAPI, greedy"
POLICIES = (BARE, "greedy", "static:8", "timeout:20", "smdp:w2=16")
LOADS = (0.3, 0.7, 0.9)
BARE_LOAD = 0.7  # one load is enough to tell the machine
NAME = "live_against_simulated"


def measure(policy: str, load_: float, duration: float) -> dict[str, Any]:
    """One cell: a server, a warm-up, a minute of load, and the simulation of the same arrivals."""
    rate = load_ * load_profile(PROFILE).capacity
    arguments = ["--rate", f"{rate:.6f}", "--duration", f"{duration:g}", "--seed", "1"]
    target = ("googlenet", "--device", f"emulated:{PROFILE}", "--policy", policy)
    with bare(PROFILE) if policy == BARE else serving(*target) as server:
        pixels = [server.url, "--model", "googlenet", "--pixels"]
        run_json("generate-load", *pixels, "--rate", "50", "--duration", "2")
        cpu = server.cpu_seconds()
        live = run_json("generate-load", *pixels, *arguments)
        cpu = server.cpu_seconds() - cpu
        buckets = [] if policy == BARE else server.samples("batchwright_idle_gap_seconds_bucket")
    gap = median_of_histogram(buckets)
    simulated = run_json(
        "generate-load", "--simulate", PROFILE, "--policy", "greedy" if policy == BARE else policy, *arguments
    )
    return {
        "live": live,
        "simulated": simulated,
        "idle_gap_median_ms": None if gap is None else 1e3 * gap,
        "server_cpu_s_per_1000": 1e3 * cpu / live["ok"],
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| policy | load | mean ms, measured | simulated | difference | p99 ms, measured | simulated "
        "| mJ a request, measured | simulated | difference | idle gap ms (median) | CPU s per 1000 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, cell in record.items():
        policy, load_ = key.split(" @ ")
        live, simulated = cell["live"], cell["simulated"]
        slower = live["mean_ms"] - simulated["mean_ms"]
        gap = cell["idle_gap_median_ms"]
        lines.append(
            f"| {policy} | {load_} | {live['mean_ms']:.2f} | {simulated['mean_ms']:.2f} "
            f"| {slower:+.2f} ({slower / simulated['mean_ms']:+.1%}) "
            f"| {live['p99_ms']:.1f} | {simulated['p99_ms']:.1f} "
            f"| {_energies(live['energy_per_request_mj'], simulated['energy_per_request_mj'])} "
            f"| {'-' if gap is None else f'{gap:.2f}'} | {cell['server_cpu_s_per_1000']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _energies(live: float | None, simulated: float) -> str:
    if live is None:
        return f"- | {simulated:.1f} | -"
    return f"{live:.1f} | {simulated:.1f} | {live / simulated - 1:+.2%}"


def main() -> None:
    """Fill the record cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of load a cell")
    duration = parser.parse_args().duration
    record = load(NAME)
    for load_ in LOADS:
        for policy in POLICIES:
            key = f"{policy} @ {load_}"
            unstable = policy == "static:8" and load_ > 0.774  # its capacity, 8 / l(8), over the profile's
            if key in record or unstable or (policy == BARE and load_ != BARE_LOAD):
                continue
            print(f"measuring {key}", flush=True)
            record[key] = measure(policy, load_, duration)
            save(NAME, record)
    (RECORDS / f"{NAME}.md").write_text(f"# Measured against simulated, {PROFILE}\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
