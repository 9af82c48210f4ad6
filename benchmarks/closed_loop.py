"""The closed loop, live over HTTP: a device whose batches cost more energy is detected, and the policy solved again.

The server runs on an emulated device that becomes another one while it serves (benchmarks/servers/changing_device.py).
Compared on the same arrivals: the policy solved for the old device, which does not adapt, the same with the controller,
and the policy solved for the new device, which knows the change. Each repetition has other arrivals. About 20 minutes;
cells that are in the record are not measured again.
"""

import subprocess
import sys
import time
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.servers.changing_device import CHANGE_AFTER, PROFILE, W2, changed
from benchmarks.support.harness import (
    Server,
    argument_parser,
    fill_record,
    markdown_table,
    run_json,
    running,
    save_table,
    start_load,
)
from policies.profile import load_profile
from policies.solver.model import Problem
from policies.solver.solver import evaluate, solve

NAME = "closed_loop"
SETTLING, MEASURED = 10.0, 40.0  # s after the change
LOADS = (0.3, 0.6)
REPETITIONS = 3
OLD, LOOP, NEW = "solved for the old device", "closed loop", "solved for the new device"
CASES = {OLD: (), LOOP: ("--adapt",), NEW: ("--solved-for", "new")}  # flags of the server


def measure(case: str, load: float, repetition: int) -> dict[str, Any]:
    """One cell: a server that meets the change."""
    with running(sys.executable, "-m", "benchmarks.servers.changing_device", *CASES[case]) as server:
        return after_the_change(server, load * load_profile(PROFILE).capacity, repetition)


def after_the_change(server: Server, rate: float, repetition: int) -> dict[str, Any]:
    """The load generator's report after the change, and the cost w1 x ms + w2 x W with measured joules."""
    load = ["--model", "demo", "--rate", str(rate), "--pixels"]
    seeds = str(2 * repetition + 1), str(2 * repetition + 2)
    began = time.monotonic()
    duration = str(CHANGE_AFTER + SETTLING)
    before = start_load(server.url, *load, "--duration", duration, "--seed", seeds[0], stdout=subprocess.DEVNULL)
    detected = None
    while before.poll() is None:
        if detected is None and server.total("batchwright_policy_changes_total"):
            detected = round(time.monotonic() - began - CHANGE_AFTER, 2)
        time.sleep(0.05)
    joules = server.total("batchwright_device_energy_joules_total")
    report = run_json("generate-load", server.url, *load, "--duration", str(MEASURED), "--seed", seeds[1])
    elapsed = report["ok"] / report["throughput_hz"]  # first arrival to last answer
    watts = (server.total("batchwright_device_energy_joules_total") - joules) / elapsed
    return {
        "noticed_after_s": detected,
        "changes": server.total("batchwright_policy_changes_total"),
        "mean_ms": round(report["mean_ms"], 2),
        "mean_power_w": round(watts, 3),
        "cost": round(report["mean_ms"] + W2 * watts, 2),
        "mean_batch_size": round(report["mean_batch_size"], 3),
        "errors": report["errors"],
    }


def model_costs(load: float) -> dict[str, float]:
    """The cost on the new device in the model, at a known rate, of the policies for the old and for the new device."""
    old, new = (
        Problem(profile, load * profile.capacity, 1.0, W2)
        for profile in (load_profile(PROFILE), changed(load_profile(PROFILE)))
    )
    return {OLD: evaluate(new, solve(old).batch_size).gain, NEW: solve(new).gain}


def key(case: str, load: float, repetition: int) -> str:
    """A cell's name in the record."""
    return f"{case} @ {load} #{repetition + 1}"


def table(record: dict[str, Any]) -> str:
    """The record as Markdown: means over the repetitions, with the least and the largest cost."""
    rows = []
    for load, case in product(LOADS, CASES):
        found = [[record[key(name, load, r)] for r in range(REPETITIONS)] for name in (case, NEW)]
        runs, knowing = found
        costs = [run["cost"] for run in runs]
        above = fmean(run["cost"] / best["cost"] - 1.0 for run, best in zip(runs, knowing, strict=True))
        noticed = [run["noticed_after_s"] for run in runs if run["noticed_after_s"] is not None]
        model = model_costs(load)
        rows.append(
            (
                *(load, case, f"{fmean(costs):.1f} ({min(costs):.1f} to {max(costs):.1f})", f"{above:+.1%}"),
                f"{model[case] / model[NEW] - 1.0:+.1%}" if case in model else "",
                *(f"{fmean(run[name] for run in runs):.2f}" for name in ("mean_ms", "mean_power_w")),
                f"{min(noticed):.1f} to {max(noticed):.1f}" if noticed else "",
            )
        )
    head = ("load", "policy", f"cost, mean of {REPETITIONS} (range)", "above the last row", "in the model")
    return markdown_table((*head, "mean response time, ms", "mean power, W", "policy changed after, s"), rows) + "\n"


def main() -> None:
    """Fill the record cell by cell."""
    argument_parser(__doc__).parse_args()
    cells = list(product(range(REPETITIONS), LOADS, CASES))
    record = fill_record(NAME, {key(c, load, r): partial(measure, c, load, r) for r, load, c in cells})
    save_table(NAME, "A device that changes", table(record))


if __name__ == "__main__":
    main()
