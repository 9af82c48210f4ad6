"""The closed loop, live over HTTP: a device that becomes half as slow again is detected, and the policy solved again.

The server runs on an emulated device whose service times and energies grow after a while. Compared on the same device:
the policy that is solved for the old device throughout, and the one solved for the new device.
"""

import subprocess
import sys
import time
from typing import Any

from benchmarks.servers.changing_device import CHANGE_AFTER, FACTOR, PROFILE, W2
from benchmarks.support.harness import Server, argument_parser, run_json, running, save_record, start_load
from policies.profile import load_profile

SETTLING, MEASURED = 10.0, 40.0  # s after the change
CASES = {
    "solved for the old device": (),
    "closed loop": ("--adapt",),
    "solved for the new device": ("--solved-for", "new"),
}


def measure(server: Server, rate: float) -> dict[str, Any]:
    """The load generator's report after the change, and the cost w1 x ms + w2 x W with measured joules."""
    load = ["--rate", str(rate), "--pixels"]
    began = time.monotonic()
    duration = str(CHANGE_AFTER + SETTLING)
    before = start_load(server.url, *load, "--duration", duration, "--seed", "1", stdout=subprocess.DEVNULL)
    detected = None
    while before.poll() is None:
        if detected is None and server.total("batchwright_policy_changes_total"):
            detected = round(time.monotonic() - began - CHANGE_AFTER, 2)
        time.sleep(0.05)
    joules = server.total("batchwright_device_energy_joules_total")
    report = run_json("generate-load", server.url, *load, "--duration", str(MEASURED), "--seed", "2")
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


def main() -> None:
    """Measure the three servers one after the other at both loads, print and record."""
    argument_parser(__doc__).parse_args()
    capacity = load_profile(PROFILE).capacity
    record: dict[str, dict[str, Any]] = {}
    for load in (0.3, 0.6):
        for name, options in CASES.items():
            with running(sys.executable, "-m", "benchmarks.servers.changing_device", *options) as server:
                found = measure(server, load * capacity)
            record[f"{name}, load {load}, then {FACTOR * load:.2f}"] = found
            print(f"{name:28s} load {load}: {found}", flush=True)
    save_record("closed_loop", record)


if __name__ == "__main__":
    main()
