"""LazyBatching's dynamic graphs live: a translator on the CPU, decode step by decode step, measured and simulated.

About eight minutes on two cores. The model is the small encoder with a decoder and random weights; the numbers of
generated tokens are the lengths of Azure's trace of conversations (2023), scaled down. From the first thousand texts
come the numbers of decode steps (dec_timesteps, section IV-C) that cover a share of the outputs; the next texts are
served. Each load serves the same Poisson arrivals under every policy; load is relative to the throughput of full
batches in order of arrival.
"""

import json
import urllib.request
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.lazy import timesteps
from benchmarks.lazy_live import CELL_HEAD, cell_row
from benchmarks.support import harness
from benchmarks.text_live import BATCH, NO_TIME, TextServer, Workload, poisson, served
from policies.profile import Profile
from policies.queue.arrivals import trace_column

NAME = "lazy_texts"
MODEL, SCALE = "translator", 0.12
KNOWN = 1000  # texts from whose lengths the decode steps are predicted
COVERAGES = (0.16, 0.9, 1.0)  # section VI-C's 16 and 90 per cent, and all
LOADS = (0.3, 0.6, 0.9)
TURNS = 15
SLO = 4.0  # over the service time of a text of the covered length alone


def policies(slo_ms: float, steps: dict[float, int]) -> dict[str, str]:
    """Policy specs by name in the table."""
    lazy = {f"lazy, {share:.0%} covered": f"lazy:slo_ms={slo_ms},timesteps={n}" for share, n in steps.items()}
    catch_up = {"catch-up, 90% covered": f"catch-up:slo_ms={slo_ms},timesteps={steps[0.9]}"}
    return {"greedy": "greedy", "timeout:100": "timeout:100", f"joining:{BATCH}": f"joining:{BATCH}"} | lazy | catch_up


def capacity(profile: Profile, work: Workload) -> float:
    """Throughput of full batches in order of arrival, 1/s."""
    tokens = work.tokens[: len(work.tokens) // BATCH * BATCH].reshape(-1, BATCH)
    return BATCH / fmean(profile.service_time(BATCH, longest) for longest in tokens.max(axis=1).tolist())


def step_overhead(target: TextServer, tokens: int) -> float:
    """Service time of a text alone in single decode steps over that in one launch: medians, in turns."""
    body = json.dumps({"text": "how long", "max_new_tokens": tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{target.server.url}/predict", body, {"Content-Type": "application/json"})
    times: dict[str, list[float]] = {"joining": [], "greedy": []}
    for _ in range(TURNS):
        for spec, seen in times.items():
            target.set_policy(spec)
            with urllib.request.urlopen(request, timeout=60) as answer:
                seen.append(json.load(answer)["service_ms"])
    return median(times["joining"]) / median(times["greedy"])


def measure(target: TextServer, profile: Profile, known: Workload, work: Workload) -> dict[str, Any]:
    """The record: reports by load and policy; `known` gives the decode steps, `work` is served."""
    requests = len(work.lengths)
    steps = {share: timesteps(known.tokens.astype(int).tolist(), share) for share in COVERAGES}
    slo_ms = round(SLO * 1e3 * profile.service_time(1, steps[0.9]))
    specs = policies(slo_ms, steps)
    flags = ("--slo-ms", str(slo_ms), *(word for spec in specs.values() for word in ("--compare", spec)))
    cells, overhead = [], step_overhead(target, steps[0.9])
    for load in LOADS:
        arrivals = poisson(work, load * capacity(profile, work), requests).arguments
        live, simulated = harness.measure_and_simulate(target.server.url, str(target.profile), (*arrivals, *flags))
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
    caption = (
        f"The small {MODEL} on {record['device']}, {record['requests']} texts of {record['mean_tokens']:g} tokens in "
        f"the mean, batches of up to {BATCH}; of the lengths before {covered}; SLO {record['slo_ms']} ms. Iteration by "
        f"iteration a text alone takes {record['overhead']:.3f} times as long as in one go. Measured (simulated)."
    )
    return f"{caption}\n\n{harness.markdown_table(CELL_HEAD, map(cell_row, record['cells']))}\n"


def main() -> None:
    """Measure, print and record."""
    parser = harness.argument_parser(__doc__)
    harness.add_trace_argument(parser)
    parser.add_argument("--requests", type=int, default=200, help="requests of each cell")
    chosen = parser.parse_args()
    harness.require_trace(chosen.trace)
    with harness.temporary_cache() as folder:
        lengths = trace_column(str(chosen.trace), "GeneratedTokens")
        known = Workload(folder / "before.csv", NO_TIME, lengths[:KNOWN], SCALE)
        work = replace(known, path=folder / "served.csv", lengths=lengths[KNOWN : KNOWN + chosen.requests])
        record = served(MODEL, folder, lambda target, profile: measure(target, profile, known, work))
    harness.save_record(NAME, record)
    harness.save_table(NAME, "LazyBatching of texts, live and simulated", table(record))


if __name__ == "__main__":
    main()
