"""Two devices of different speed behind one server, measured against the simulated fleet.

python -m benchmarks.fleet [--requests N]: about a quarter of an hour on two quiet cores. One emulated device plays
googlenet-tesla-p4-x10, or the same `pace` times slower, the other takes twice as long for every batch. Loads are shares
of what both can serve together; the arrivals are the same over HTTP and on the virtual clock, raw pixels by the Open
Inference Protocol. What HTTP and the client cost, some 5 ms here, is the same at any pace and weighs less in a slower
one: what is left there is what the server decides. A cell that stands in the record is not measured again.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import RECORDS, load, run_json, save, serving
from policies.profile import load_profile

NAME, PROFILE = "fleet", "googlenet-tesla-p4-x10"
SLOWER = 2.0  # times: the second device
PACES = (1.0, 4.0, 8.0)
POLICIES = ("greedy", "smdp:w2=16")
LOADS = (0.3, 0.6, 0.85)
CELLS = {
    f"{policy} @ {load_} x{pace:g}": (pace, policy, load_) for pace in PACES for load_ in LOADS for policy in POLICIES
}


def slowed(times: float, folder: Path) -> Path:
    """The file of a profile like `PROFILE` but so many times slower; its energies are the same."""
    fast, path = load_profile(PROFILE), folder / f"slower-{times:g}.json"
    slow = tuple(times * seconds for seconds in fast.service_times)
    path.write_text(replace(fast, name=path.stem, source="modelled", service_times=slow).to_json())
    return path


def measure(devices: tuple[Path, Path], policy: str, arrivals: list[str]) -> dict[str, Any]:
    """One cell, live, with what share the slower device served; and the same on the virtual clock."""
    device = ",".join(f"emulated:{path}" for path in devices)
    with serving("googlenet", "--device", device, "--policy", policy) as server:
        pixels = [server.url, "--model", "googlenet", "--pixels"]
        run_json("generate-load", *pixels, "--rate", "20", "--duration", "3")
        before = server.metric("batchwright_batch_size_sum")
        live = run_json("generate-load", *pixels, *arrivals)
        after = server.metric("batchwright_batch_size_sum")
    served = {labels: count - before.get(labels, 0.0) for labels, count in after.items()}
    share = sum(n for labels, n in served.items() if str(devices[1]) in labels) / sum(served.values())
    simulated = run_json("generate-load", "--simulate", ",".join(map(str, devices)), "--policy", policy, *arrivals)
    return {"live": live, "slow_share": share, "simulated": simulated}


def arrivals(pace: float, load_: float, requests: int) -> list[str]:
    """The flags that make them."""
    rate = load_ * load_profile(PROFILE).capacity * (1.0 + 1.0 / SLOWER) / pace
    return ["--rate", f"{rate:.6f}", "--duration", f"{requests / rate:.3f}", "--seed", "1"]


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| pace | policy | load | answered | mean ms, measured | simulated | difference | p95 ms, measured | simulated "
        "| difference | share of the slower device |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, (pace, policy, load_) in CELLS.items():
        if key in record:
            live, simulated, share = (record[key][name] for name in ("live", "simulated", "slow_share"))
            compared = " | ".join(_compared(live[name], simulated[name]) for name in ("mean_ms", "p95_ms"))
            answered = f"{live['ok']} of {live['scheduled']}"
            lines.append(f"| {pace:g} | {policy} | {load_} | {answered} | {compared} | {share:.1%} |")
    return "\n".join(lines) + "\n"


def _compared(live: float, simulated: float) -> str:
    return f"{live:.2f} | {simulated:.2f} | {live / simulated - 1:+.1%}"


def main() -> None:
    """Fill the record cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="of a cell")
    requests = parser.parse_args().requests
    record = load(NAME)
    with TemporaryDirectory() as name:
        for key, (pace, policy, load_) in CELLS.items():
            if key not in record:
                devices = slowed(pace, Path(name)), slowed(SLOWER * pace, Path(name))
                record[key] = measure(devices, policy, arrivals(pace, load_, requests))
                print(key, {side: record[key][side]["mean_ms"] for side in ("live", "simulated")}, flush=True)
                save(NAME, record)
    heading = f"# Two devices, {PROFILE} at a pace and one {SLOWER:g} times slower: measured against simulated"
    (RECORDS / f"{NAME}.md").write_text(f"{heading}\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
