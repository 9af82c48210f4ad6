"""An objective live over HTTP on an emulated device: the load rises in steps, the 95th percentile is to be kept.

For each step: the percentile that clients saw and the energy of a request, under the objective and under greedy.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.serving import Server, command_line, save, serving
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
BOUND_MS = 120.0
LOADS = (0.25, 0.5, 0.75, 0.92)  # at the last one no policy keeps it
STEP = 30.0  # s
SETTLING = 10.0  # s of each step that do not count: the objective looks for its level


def moves(server: Server) -> dict[str, float]:
    """How often the server swapped the policy itself, by reason, and the level at which its objective ended."""
    by_reason = {s.labels["reason"]: s.value for s in server.samples("batchwright_policy_changes_total")}
    return by_reason | {"level": sum(server.metric("batchwright_objective_level").values())}


def by_step(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What clients saw in each step, after its first seconds."""
    rows = []
    for i, load in enumerate(LOADS):
        begin, end = i * STEP + SETTLING, (i + 1) * STEP
        mine = [line for line in lines if begin <= line["scheduled_s"] < end]
        responses = [line["response_ms"] for line in mine]
        row = {
            "load": load,
            "p95_ms": round(float(np.percentile(responses, 95)), 1),
            "mean_ms": round(float(np.mean(responses)), 1),
            "energy_mj": round(float(np.mean([line["energy_mj"] for line in mine])), 1),
            "failed": float(sum(line["status"] != 200 for line in mine)),
        }
        rows.append(row)
    return rows


def run(policy: str) -> dict[str, Any]:
    """One server under the rising load."""
    top = max(LOADS)
    steps = ",".join(f"{load / top}@{STEP}" for load in LOADS)
    rate = top * load_profile(PROFILE).capacity
    arguments = ["--rate", str(rate), "--duration", str(STEP * len(LOADS)), "--arrivals", f"steps:{steps}", "--pixels"]
    with (
        TemporaryDirectory() as folder,
        serving("demo", "--device", f"emulated:{PROFILE}", "--policy", policy) as server,
    ):
        output = Path(folder) / "run.jsonl"
        line = [*command_line("generate-load"), server.url, *arguments, "--output", str(output), "--json"]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(text) for text in output.read_text().splitlines()]
        return {"moves": moves(server), "steps": by_step(lines)}


def main() -> None:
    """Print and record both runs."""
    record = {policy: run(policy) for policy in (f"smdp:slo_p95_ms={BOUND_MS:g}", "greedy")}
    save("objective", {"bound_ms": BOUND_MS, **record})
    for policy, found in record.items():
        print(policy, found["moves"])
        for row in found["steps"]:
            print("   ", row)


if __name__ == "__main__":
    main()
