"""LazyBatching live on the CPU: ResNet-50 in stages under three loads, measured and simulated; then two models at once.

The profile is measured just before, by stage, through the executor that serves. Each cell serves the same Poisson
arrivals under every policy. A boundary's cost is the time from the end of one launch on the device to the beginning of
the next one: where nothing has happened, of what was decided while the device worked; else decision and hand-over to
the device's thread are included.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving import Server, command_line, median_of_histogram, run_json, running, save
from policies.profile import Profile, load_profile

MODEL, STAGES, LARGEST = "resnet50", 5, 8
LOADS = (0.3, 0.6, 0.8)
SLO_MS = 3000
POLICIES = ("greedy", "timeout:500", f"lazy:slo_ms={SLO_MS}", f"catch-up:slo_ms={SLO_MS}")
BESIDE = "resnet18"  # the model that shares the device


def measured(model: str, folder: Path) -> Path:
    """The profile of a model by stage, measured now."""
    path = folder / f"{model}.json"
    arguments = ("--weights", "random", "--device", "cpu", "--stages", str(STAGES), "--max-batch-size", str(LARGEST))
    run_json("profile-model", model, *arguments, "--quick", "--energy-time", "0", "--output", str(path))
    return path


def serving_staged(*models: str, profiles: tuple[Path, ...], policies: tuple[str, ...]) -> Any:
    """A server of these models on the CPU, cut into stages."""
    named = [f"--profile={model}={path}" for model, path in zip(models, profiles, strict=True)]
    decided = [f"--policy={model}={policy}" for model, policy in zip(models, policies, strict=True)]
    fixed = ("--weights", "random", "--device", "cpu", "--stages", str(STAGES), "--max-batch-size", str(LARGEST))
    return running(*command_line("serve-model"), *models, *fixed, *named, *decided, "--log-level", "warning")


def boundary_ms(server: Server) -> float | None:
    """Median of what lies between two launches, ms."""
    median = median_of_histogram(server.samples("batchwright_idle_gap_seconds_bucket"))
    return None if median is None else round(1e3 * median, 3)


def cells(path: Path, profile: Profile, seconds: float) -> list[dict[str, Any]]:
    """Load by load, policy by policy: measured and simulated."""
    found = []
    compare = [word for policy in POLICIES for word in ("--compare", policy)]
    with serving_staged(MODEL, profiles=(path,), policies=("greedy",)) as server:
        for load in LOADS:
            arrivals = ("--rate", f"{load * profile.capacity:.4g}", "--duration", f"{seconds:g}", "--seed", "5")
            slo = ("--slo-ms", str(SLO_MS))
            live = run_json("generate-load", server.url, "--pixels", *arrivals, *slo, *compare)["rows"]
            simulated = run_json("generate-load", "--simulate", str(path), *arrivals, *slo, *compare)["rows"]
            for row, expected in zip(live, simulated, strict=True):
                found.append({"load": load, "policy": row["policy"], "measured": row, "simulated": expected})
    return found


def boundary(path: Path, profile: Profile, seconds: float) -> float | None:
    """What a boundary costs where nearly all launches are single stages, ms."""
    with serving_staged(MODEL, profiles=(path,), policies=(f"lazy:slo_ms={SLO_MS}",)) as server:
        arrivals = ("--rate", f"{0.6 * profile.capacity:.4g}", "--duration", f"{seconds:g}")
        run_json("generate-load", server.url, "--pixels", *arrivals)
        return boundary_ms(server)


def co_located(paths: tuple[Path, Path], seconds: float) -> list[dict[str, Any]]:
    """Both models on one device, each at a quarter of its capacity, under one policy for both."""
    rates = [0.25 * load_profile(str(path)).capacity for path in paths]
    found = []
    for policy in ("greedy", f"lazy:slo_ms={SLO_MS}", f"catch-up:slo_ms={SLO_MS}"):
        with serving_staged(MODEL, BESIDE, profiles=paths, policies=(policy, policy)) as server:
            rows = together(server, rates, seconds)
        found += [{"policy": policy, "model": model, **row} for model, row in zip((MODEL, BESIDE), rows, strict=True)]
    return found


def together(server: Server, rates: list[float], seconds: float) -> list[dict[str, Any]]:
    """Load on both models at the same time."""

    def one(model: str, rate: float) -> Any:
        arrivals = ("--rate", f"{rate:.4g}", "--duration", f"{seconds:g}", "--slo-ms", str(SLO_MS))
        return run_json("generate-load", server.url, "--model", model, "--pixels", *arrivals)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (MODEL, BESIDE), rates))


def cell_row(cell: dict[str, Any]) -> str:
    """A cell as a line of a table: measured, and in brackets simulated."""
    m, s = cell["measured"], cell["simulated"]
    return (
        f"| {cell['load']}, {cell['policy']} | {m['mean_ms']:.0f} ({s['mean_ms']:.0f}) | {m['p99_ms']:.0f} "
        f"({s['p99_ms']:.0f}) | {m['mean_batch_size']:.2f} ({s['mean_batch_size']:.2f}) "
        f"| {1 - m['slo_attainment']:.1%} ({1 - s['slo_attainment']:.1%}) |"
    )


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    over = record["stage_overhead"]
    lines = [
        f"{MODEL} in {STAGES} stages on {record['device']}, {record['seconds']:g} s a cell; sum of l_i(b) over l(b): "
        f"{over[0]:.3f} at 1, {over[-1]:.3f} at {len(over)}; l(1) = {record['l1_ms']:.0f} ms; "
        f"a boundary: {record['boundary_ms']} ms.",
        "",
        "| load, policy | mean, ms: measured (simulated) | p99, ms | mean size of a launch | late |",
        "|---|---|---|---|---|",
    ]
    lines += map(cell_row, record["cells"])
    lines += ["", "| two models, policy | model | mean, ms | p99, ms | answered |", "|---|---|---|---|---|"]
    for row in record["co_located"]:
        answered = f"{row['ok']} of {row['scheduled']}"
        lines.append(f"| {row['policy']} | {row['model']} | {row['mean_ms']:.0f} | {row['p99_ms']:.0f} | {answered} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell")
    seconds = parser.parse_args().seconds
    with TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        paths = measured(MODEL, Path(name)), measured(BESIDE, Path(name))
        profile = load_profile(str(paths[0]))
        record = {
            "device": profile.device,
            "seconds": seconds,
            "l1_ms": 1e3 * profile.service_time(1),
            "service_times_s": profile.service_times,
            "stage_service_times_s": profile.stage_service_times,
            "stage_overhead": profile.stage_overhead,
            "boundary_ms": boundary(paths[0], profile, seconds),
            "cells": cells(paths[0], profile, seconds),
            "co_located": co_located(paths, seconds),
        }
    save("lazy_live", record)
    print(table(record))


if __name__ == "__main__":
    main()
