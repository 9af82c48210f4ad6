"""Two devices of different speed behind one server, measured against the simulated fleet.

One emulated device plays googlenet-tesla-p4-x10, or the same profile `pace` times slower; the other takes twice as long
for every batch. Loads are shares of the capacity of both; the arrivals are the same over HTTP and on the virtual clock,
raw pixels by the Open Inference Protocol. HTTP and the client add about 5 ms at any pace, so at a slower pace the
difference shows the server's decisions. w2 grows with the square of the pace, since response times grow with it while
powers fall: so the same policy is solved at every pace. Cells that are in the record are not measured again.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.harness import argument_parser, fill_record, markdown_table, run_json, save_table, serving
from policies.profile import load_profile

NAME, PROFILE = "fleet", "googlenet-tesla-p4-x10"
SLOWER = 2.0  # service times of the second device over the first one's
PACES = (1.0, 4.0, 8.0)
W2 = 16.0  # at pace 1
LOADS = (0.3, 0.6, 0.85)


def policies(pace: float) -> tuple[str, str]:
    """The policies compared at a pace."""
    return "greedy", f"smdp:w2={W2 * pace**2:g}"


CELLS = {
    f"{policy} @ {load} x{pace:g}": (pace, policy, load)
    for pace in PACES
    for load in LOADS
    for policy in policies(pace)
}


def slowed(factor: float, folder: Path) -> Path:
    """The file of a profile like `PROFILE`, with the same energies and service times `factor` times as long."""
    fast, path = load_profile(PROFILE), folder / f"slower-{factor:g}.json"
    slow = tuple(factor * seconds for seconds in fast.service_times)
    path.write_text(replace(fast, name=path.stem, source="modelled", service_times=slow).to_json())
    return path


def measure(pace: float, policy: str, load: float, requests: int) -> dict[str, Any]:
    """One cell: the reports of the server and of the simulator, and the share of requests of the slower device."""
    rate = load * load_profile(PROFILE).capacity * (1.0 + 1.0 / SLOWER) / pace
    arrivals = ["--rate", f"{rate:.6f}", "--duration", f"{requests / rate:.3f}", "--seed", "1"]
    with TemporaryDirectory() as name:
        devices = slowed(pace, Path(name)), slowed(SLOWER * pace, Path(name))
        emulated = ",".join(f"emulated:{path}" for path in devices)
        with serving("googlenet", "--device", emulated, "--policy", policy) as server:
            pixels = [server.url, "--model", "googlenet", "--pixels"]
            run_json("generate-load", *pixels, "--rate", "20", "--duration", "3")
            before = server.by_label("batchwright_batch_size_sum", "device")
            live = run_json("generate-load", *pixels, *arrivals)
            after = server.by_label("batchwright_batch_size_sum", "device")
        served = {device: count - before.get(device, 0.0) for device, count in after.items()}
        share = sum(n for device, n in served.items() if str(devices[1]) in device) / sum(served.values())
        simulated = run_json("generate-load", "--simulate", ",".join(map(str, devices)), "--policy", policy, *arrivals)
    return {"live": live, "slow_share": share, "simulated": simulated}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    head = ["pace", "policy", "load", "answered", "mean ms, measured", "simulated", "difference"]
    head += ["p95 ms, measured", "simulated", "difference", "share of the slower device"]
    rows = markdown_table(head, (list(_cells(key, record[key])) for key in CELLS if key in record))
    return f"{rows}\n\n{ranges(record)}\n"


def ranges(record: dict[str, Any]) -> str:
    """A sentence with the least and the largest difference at each pace, over means, 95th percentiles and policies."""
    parts = []
    for pace in PACES:
        keys = [key for key, cell in CELLS.items() if cell[0] == pace and key in record]
        found = [record[key] for key in keys]
        differences = [cell["live"][p] / cell["simulated"][p] - 1.0 for cell in found for p in ("mean_ms", "p95_ms")]
        if differences:
            measured = " and ".join(dict.fromkeys(CELLS[key][1] for key in keys))
            parts.append(f"{min(differences):+.1%} to {max(differences):+.1%} at pace {pace:g} ({measured})")
    return f"Differences: {', '.join(parts)}."


def _cells(key: str, cell: dict[str, Any]) -> Iterator[object]:
    (pace, policy, load), live, simulated = CELLS[key], cell["live"], cell["simulated"]
    yield from (f"{pace:g}", policy, load, f"{live['ok']} of {live['scheduled']}")
    for name in ("mean_ms", "p95_ms"):
        yield from (f"{live[name]:.2f}", f"{simulated[name]:.2f}", f"{live[name] / simulated[name] - 1:+.1%}")
    yield f"{cell['slow_share']:.1%}"


def main() -> None:
    """Fill the record cell by cell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="requests of a cell")
    requests = parser.parse_args().requests
    record = fill_record(NAME, {key: partial(measure, *cell, requests) for key, cell in CELLS.items()})
    heading = f"Two devices, {PROFILE} at a pace and one {SLOWER:g} times slower: measured against simulated"
    save_table(NAME, heading, table(record))


if __name__ == "__main__":
    main()
