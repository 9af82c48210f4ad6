"""A bound on the 95th percentile, live over HTTP on an emulated device, while the load rises in steps.

For each step: the percentile that clients saw and the energy of a request, under the objective and under greedy.
"""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.support.harness import Server, argument_parser, command_line, read_jsonl, save_record, serving
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
BOUND_MS = 120.0
LOADS = (0.25, 0.5, 0.75, 0.92)  # at the last one no policy keeps the bound
STEP = 30.0  # s
SETTLING = 10.0  # s at the beginning of each step that do not count, while the objective adapts its level


def policy_changes(server: Server) -> dict[str, float]:
    """How often the server swapped the policy itself, by reason, and the final level of its objective."""
    by_reason = server.by_label("batchwright_policy_changes_total", "reason")
    return by_reason | {"level": server.total("batchwright_objective_level")}


def by_step(answers: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What clients saw in each step, after its settling time."""
    rows = []
    for i, load in enumerate(LOADS):
        begin, end = i * STEP + SETTLING, (i + 1) * STEP
        mine = [answer for answer in answers if begin <= answer["scheduled_s"] < end]
        responses = [answer["response_ms"] for answer in mine]
        row = {
            "load": load,
            "p95_ms": round(float(np.percentile(responses, 95)), 1),
            "mean_ms": round(float(np.mean(responses)), 1),
            "energy_mj": round(float(np.mean([answer["energy_mj"] for answer in mine])), 1),
            "failed": float(sum(answer["status"] != 200 for answer in mine)),
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
        return {"moves": policy_changes(server), "steps": by_step(read_jsonl(output))}


def main() -> None:
    """Print and record both runs."""
    argument_parser(__doc__).parse_args()
    record = {policy: run(policy) for policy in (f"smdp:slo_p95_ms={BOUND_MS:g}", "greedy")}
    save_record("objective", {"bound_ms": BOUND_MS, **record})
    for policy, found in record.items():
        print(policy, found["moves"])
        for row in found["steps"]:
            print("   ", row)


if __name__ == "__main__":
    main()
