"""Measured against simulated: the same arrivals over HTTP and on the virtual clock, policy by policy.

The emulated device plays googlenet-tesla-p4-x10. A cell is one minute of Poisson arrivals, raw pixels by the Open
Inference Protocol. At one load the baseline of benchmarks/servers/bare_fastapi.py is measured in the same run: its
excess over the simulated time is the cost of HTTP on this machine. Cells that are in the record are not measured again.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from benchmarks.support import harness
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
BARE = "bare FastAPI, greedy"
POLICIES = (BARE, "greedy", "static:8", "timeout:20", "smdp:w2=16")
LOADS = (0.3, 0.7, 0.9)
BARE_LOAD = 0.7  # one load suffices to compare machines
STATIC_CAPACITY = 0.774  # load at which static:8 becomes unstable: 8 / l(8) over the profile's capacity
NAME = "live_against_simulated"


def measure(policy: str, load: float, duration: float) -> dict[str, Any]:
    """One cell: a server, a warm-up, a minute of load, and the simulation of the same arrivals."""
    rate = load * load_profile(PROFILE).capacity
    arguments = ["--rate", f"{rate:.6f}", "--duration", f"{duration:g}", "--seed", "1"]
    target = ("googlenet", "--device", f"emulated:{PROFILE}", "--policy", policy)
    with harness.serving_bare_fastapi(PROFILE) if policy == BARE else harness.serving(*target) as server:
        pixels = [server.url, "--model", "googlenet", "--pixels"]
        harness.run_json("generate-load", *pixels, "--rate", "50", "--duration", "2")
        cpu = server.cpu_seconds()
        live = harness.run_json("generate-load", *pixels, *arguments)
        cpu = server.cpu_seconds() - cpu
        buckets = [] if policy == BARE else server.samples("batchwright_idle_gap_seconds_bucket")
    gap = harness.median_of_histogram(buckets)
    simulated = harness.run_json(
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
    head = ["policy", "load", "mean ms, measured", "simulated", "difference", "p99 ms, measured", "simulated"]
    head += ["mJ a request, measured", "simulated", "difference", "idle gap ms (median)", "CPU s per 1000"]
    return harness.markdown_table(head, (list(_cells(key, cell)) for key, cell in record.items())) + "\n"


def _cells(key: str, cell: dict[str, Any]) -> Iterator[str]:
    yield from key.split(" @ ")
    live, simulated, gap = cell["live"], cell["simulated"], cell["idle_gap_median_ms"]
    slower = live["mean_ms"] - simulated["mean_ms"]
    yield from (f"{live['mean_ms']:.2f}", f"{simulated['mean_ms']:.2f}")
    yield f"{slower:+.2f} ({slower / simulated['mean_ms']:+.1%})"
    yield from (f"{live['p99_ms']:.1f}", f"{simulated['p99_ms']:.1f}")
    energy, expected = live["energy_per_request_mj"], simulated["energy_per_request_mj"]
    yield from ("-" if energy is None else f"{energy:.1f}", f"{expected:.1f}")
    yield "-" if energy is None else f"{energy / expected - 1:+.2%}"
    yield from ("-" if gap is None else f"{gap:.2f}", f"{cell['server_cpu_s_per_1000']:.2f}")


def is_measured(policy: str, load: float) -> bool:
    """Whether a cell belongs to the record: the baseline has one load, and static:8 is stable."""
    return load == BARE_LOAD if policy == BARE else policy != "static:8" or load <= STATIC_CAPACITY


def main() -> None:
    """Fill the record cell by cell."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of load a cell")
    duration = parser.parse_args().duration
    cells = [(policy, load) for load, policy in product(LOADS, POLICIES) if is_measured(policy, load)]
    record = harness.fill_record(
        NAME, {f"{policy} @ {load}": partial(measure, policy, load, duration) for policy, load in cells}
    )
    harness.save_table(NAME, f"Measured against simulated, {PROFILE}", table(record))


if __name__ == "__main__":
    main()
