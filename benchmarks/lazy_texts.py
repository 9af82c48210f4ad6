"""LazyBatching's dynamic graphs live: a translator on the CPU, iteration by iteration, measured and simulated.

The small encoder with a decoder and random weights; how many tokens it is made to generate are the lengths of Azure's
trace of conversations (2023), scaled down. Its first thousand texts are what was seen before: from them come the time
steps (dec_timesteps, section IV-C) that cover a share of the outputs. The next ones are served. Each load serves the
same Poisson arrivals under every policy; load is over what full batches in order of arrival can serve.

python -m benchmarks.lazy_texts [--trace FILE] [--requests N]: about eight minutes on two cores.
"""

import argparse
import json
import os
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.lazy_live import cell_row
from benchmarks.serving import RECORDS, run_json, save
from benchmarks.text_live import BATCH, NO_TIME, TRACE, Bench, Workload, poisson, served
from policies.profile import Profile
from policies.queue.arrivals import trace_column
from policies.unrolled import timesteps

NAME = "lazy_texts"
MODEL, SCALE = "translator", 0.12
SEEN = 1000  # texts whose lengths are known before
COVERAGES = (0.16, 0.9, 1.0)  # section VI-C's 16 and 90 per cent, and all
LOADS = (0.3, 0.6, 0.9)
TURNS = 15
SLO = 4.0  # times what a text of the covered length takes alone


def policies(slo_ms: float, steps: dict[float, int]) -> dict[str, str]:
    """Spec by what it is called."""
    lazy = {f"lazy, {share:.0%} covered": f"lazy:slo_ms={slo_ms},timesteps={n}" for share, n in steps.items()}
    pays = {"catch-up, 90% covered": f"catch-up:slo_ms={slo_ms},timesteps={steps[0.9]}"}
    return {"greedy": "greedy", "timeout:100": "timeout:100", f"joining:{BATCH}": f"joining:{BATCH}"} | lazy | pays


def capacity(profile: Profile, work: Workload) -> float:
    """What full batches in order of arrival can serve, 1/s."""
    tokens = work.tokens[: len(work.tokens) // BATCH * BATCH].reshape(-1, BATCH)
    return BATCH / fmean(profile.service_time(BATCH, longest) for longest in tokens.max(axis=1).tolist())


def overhead_of(bench: Bench, tokens: int) -> float:
    """Service time of a text alone, iteration by iteration, over that in one go: medians, in turns."""
    body = json.dumps({"text": "how long", "max_new_tokens": tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{bench.server.url}/predict", body, {"Content-Type": "application/json"})
    times: dict[str, list[float]] = {"joining": [], "greedy": []}
    for _ in range(TURNS):
        for spec, seen in times.items():
            bench.use(spec)
            with urllib.request.urlopen(request, timeout=60) as answer:
                seen.append(json.load(answer)["service_ms"])
    return median(times["joining"]) / median(times["greedy"])


def measure(bench: Bench, profile: Profile, works: tuple[Workload, Workload]) -> dict[str, Any]:
    """Load by load, policy by policy; `works` is what was seen before, and what is served."""
    before, work = works
    requests = len(work.lengths)
    steps = {share: timesteps(before.tokens.astype(int).tolist(), share) for share in COVERAGES}
    slo_ms = round(SLO * 1e3 * profile.service_time(1, steps[0.9]))
    specs = policies(slo_ms, steps)
    told = ("--slo-ms", str(slo_ms), *(word for spec in specs.values() for word in ("--compare", spec)))
    cells, overhead = [], overhead_of(bench, steps[0.9])
    for load in LOADS:
        arrivals = poisson(work, load * capacity(profile, work), requests).arguments
        live = run_json("generate-load", bench.server.url, *arrivals, *told)["rows"]
        simulated = run_json("generate-load", "--simulate", str(bench.profile), *arrivals, *told)["rows"]
        for name, row, expected in zip(specs, live, simulated, strict=True):
            cells.append({"load": load, "policy": name, "measured": row, "simulated": expected})
            print(load, name, row["mean_ms"], expected["mean_ms"], flush=True)
    return {
        "device": profile.device,
        "requests": requests,
        "mean_tokens": round(float(np.mean(work.tokens)), 2),
        "slo_ms": slo_ms,
        "overhead": round(overhead, 3),
        "timesteps": {f"{share:g}": n for share, n in steps.items()},
        "cells": cells,
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    covered = ", ".join(f"{n} steps cover {float(share):.0%}" for share, n in record["timesteps"].items())
    lines = [
        f"The small {MODEL} on {record['device']}, {record['requests']} texts of {record['mean_tokens']:g} tokens in "
        f"the mean, batches of up to {BATCH}; of the lengths before {covered}; SLO {record['slo_ms']} ms. Iteration by "
        f"iteration a text alone takes {record['overhead']:.3f} times as long as in one go. Measured (simulated).",
        "",
        "| load, policy | mean, ms | p99, ms | mean size of a launch | late |",
        "|---|---|---|---|---|",
    ]
    lines += map(cell_row, record["cells"])
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="azure-llm-2023-conv.csv")
    parser.add_argument("--requests", type=int, default=200, help="of each cell")
    asked = parser.parse_args()
    if not asked.trace.is_file():
        sys.exit(f"nothing to measure: no trace at {asked.trace}; give --trace azure-llm-2023-conv.csv (Azure's)")
    with TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        folder, lengths = Path(name), trace_column(str(asked.trace), "GeneratedTokens")
        before = Workload(folder / "before.csv", NO_TIME, lengths[:SEEN], SCALE)
        work = replace(before, path=folder / "served.csv", lengths=lengths[SEEN : SEEN + asked.requests])
        record = served(MODEL, folder, lambda bench, profile: measure(bench, profile, (before, work)))
    save(NAME, record)
    (RECORDS / f"{NAME}.md").write_text(f"# LazyBatching of texts, live and simulated\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
