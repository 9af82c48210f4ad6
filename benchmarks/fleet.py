"""Two devices of different speed behind one server, measured against the simulated fleet.

python -m benchmarks.fleet [--duration S] [--without-simulation]: about six minutes. One emulated device plays
googlenet-tesla-p4-x10, the other takes twice as long for every batch. Loads are shares of what both can serve together;
the arrivals are the same over HTTP and on the virtual clock, raw pixels by the Open Inference Protocol. A cell that
stands in the record is not measured again: delete the record to start over.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import RECORDS, load, run_json, save, serving
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
SLOWER = 2.0  # times
POLICIES = ("greedy", "smdp:w2=16")
LOADS = (0.3, 0.6, 0.85)
CELLS = {f"{policy} @ {load_}": (policy, load_) for load_ in LOADS for policy in POLICIES}
NAME = "fleet"


def slower(folder: Path) -> Path:
    """The file of a profile like `PROFILE` but so many times slower; its energies are the same."""
    fast, path = load_profile(PROFILE), folder / "slower.json"
    times = tuple(SLOWER * seconds for seconds in fast.service_times)
    path.write_text(replace(fast, name="slower", source="modelled", service_times=times).to_json())
    return path


def measure(policy: str, load_: float, duration: float, slow: Path) -> dict[str, Any]:
    """One cell, live: a server, a warm-up, the load, and what share of the requests each device served."""
    arguments = arrivals(load_, duration)
    device = f"emulated:{PROFILE},emulated:{slow}"
    with serving("googlenet", "--device", device, "--policy", policy) as server:
        pixels = [server.url, "--model", "googlenet", "--pixels"]
        run_json("generate-load", *pixels, "--rate", "50", "--duration", "2")
        before = server.metric("batchwright_batch_size_sum")
        live = run_json("generate-load", *pixels, *arguments)
        after = server.metric("batchwright_batch_size_sum")
    served = {labels: count - before.get(labels, 0.0) for labels, count in after.items()}
    slow_share = sum(n for labels, n in served.items() if slow.name in labels) / sum(served.values())
    return {"live": live, "slow_share": slow_share}


def simulate(policy: str, load_: float, duration: float, slow: Path) -> dict[str, Any]:
    """The same cell on the virtual clock."""
    profiles = f"{PROFILE},{slow}"
    found: dict[str, Any] = run_json(
        "generate-load", "--simulate", profiles, "--policy", policy, *arrivals(load_, duration)
    )
    return found


def arrivals(load_: float, duration: float) -> list[str]:
    """The flags that make them."""
    rate = load_ * load_profile(PROFILE).capacity * (1.0 + 1.0 / SLOWER)
    return ["--rate", f"{rate:.6f}", "--duration", f"{duration:g}", "--seed", "1"]


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| policy | load | answered | mean ms, measured | simulated | difference | p95 ms, measured | simulated "
        "| difference | share of the slower device |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, (policy, load_) in CELLS.items():
        cell = record[key]
        live, simulated = cell["live"], cell.get("simulated")
        compared = " | ".join(_compared(live[name], simulated and simulated[name]) for name in ("mean_ms", "p95_ms"))
        lines.append(
            f"| {policy} | {load_} | {live['ok']} of {live['scheduled']} | {compared} | {cell['slow_share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _compared(live: float, simulated: float | None) -> str:
    if simulated is None:
        return f"{live:.2f} | - | -"
    return f"{live:.2f} | {simulated:.2f} | {live / simulated - 1:+.1%}"


def main() -> None:
    """Fill the record cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of load a cell")
    parser.add_argument("--without-simulation", action="store_true", help="measure only")
    options = parser.parse_args()
    record = load(NAME)
    with TemporaryDirectory() as folder:
        slow = slower(Path(folder))
        for key, (policy, load_) in CELLS.items():
            cell = (policy, load_, options.duration, slow)
            if key not in record:
                print(f"measuring {key}", flush=True)
                record[key] = measure(*cell)
            if not options.without_simulation and "simulated" not in record[key]:
                record[key]["simulated"] = simulate(*cell)
            save(NAME, record)
    (RECORDS / f"{NAME}.md").write_text(
        f"# Two devices, {PROFILE} and one {SLOWER:g} times slower: measured against simulated\n\n{table(record)}"
    )
    print(table(record))


if __name__ == "__main__":
    main()
