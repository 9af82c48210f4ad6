"""LazyBatching live on the CPU: ResNet-50 in stages at three loads, measured and simulated; then two models at once.

The profile is measured just before, by stage, through the executor that serves. Each cell serves the same Poisson
arrivals under every policy. The cost of a stage boundary is the time from the end of one launch on the device to the
start of the next. It includes the decision and the hand-over to the device's thread, unless the next launch was decided
while the device was busy.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from policies.profile import Profile, load_profile

MODEL, STAGES, LARGEST = "resnet50", 5, 8
LOADS = (0.3, 0.6, 0.8)
SLO_MS = 3000
POLICIES = ("greedy", "timeout:500", f"lazy:slo_ms={SLO_MS}", f"catch-up:slo_ms={SLO_MS}")
SECOND = "resnet18"  # the model that shares the device
CELL_HEAD = ("load, policy", "mean, ms", "p99, ms", "mean size of a launch", "late")
_COLUMNS = {"mean_ms": ".0f", "p99_ms": ".0f", "mean_batch_size": ".2f"}  # of CELL_HEAD, with their formats
_FLAGS = ("--weights", "random", "--device", "cpu", "--stages", str(STAGES), "--max-batch-size", str(LARGEST))


def measured(model: str, folder: Path) -> Path:
    """Measure a model's profile by stage, and return its file."""
    path = folder / f"{model}.json"
    harness.measure_profile(model, path, *_FLAGS)
    return path


def serving_staged(
    *models: str, profiles: tuple[Path, ...], policies: tuple[str, ...]
) -> AbstractContextManager[harness.Server]:
    """A server of these models on the CPU, in stages."""
    named = [f"--profile={model}={path}" for model, path in zip(models, profiles, strict=True)]
    named += [f"--policy={model}={policy}" for model, policy in zip(models, policies, strict=True)]
    return harness.serving(*models, *_FLAGS, *named, "--log-level", "warning")


def boundary_ms(server: harness.Server) -> float | None:
    """Median time between two launches, ms."""
    median = harness.median_of_histogram(server.samples("batchwright_idle_gap_seconds_bucket"))
    return None if median is None else round(1e3 * median, 3)


def cells(path: Path, profile: Profile, seconds: float) -> list[dict[str, Any]]:
    """Measured and simulated reports by load and policy."""
    found = []
    compare = [word for policy in POLICIES for word in ("--compare", policy)]
    with serving_staged(MODEL, profiles=(path,), policies=("greedy",)) as server:
        for load in LOADS:
            arrivals = ("--rate", f"{load * profile.capacity:.4g}", "--duration", f"{seconds:g}", "--seed", "5")
            flags = [*arrivals, "--slo-ms", str(SLO_MS), *compare]
            live, simulated = harness.measure_and_simulate(server.url, str(path), flags, live=("--pixels",))
            for row, expected in zip(live, simulated, strict=True):
                found.append({"load": load, "policy": row["policy"], "measured": row, "simulated": expected})
    return found


def boundary(path: Path, profile: Profile, seconds: float) -> float | None:
    """The cost of a stage boundary where nearly all launches are single stages, ms."""
    with serving_staged(MODEL, profiles=(path,), policies=(f"lazy:slo_ms={SLO_MS}",)) as server:
        arrivals = ("--rate", f"{0.6 * profile.capacity:.4g}", "--duration", f"{seconds:g}")
        harness.run_json("generate-load", server.url, "--pixels", *arrivals)
        return boundary_ms(server)


def co_located(paths: tuple[Path, Path], seconds: float) -> list[dict[str, Any]]:
    """Reports of both models on one device, each at a quarter of its capacity, under one policy for both."""
    rates = [0.25 * load_profile(str(path)).capacity for path in paths]
    found = []
    for policy in ("greedy", f"lazy:slo_ms={SLO_MS}", f"catch-up:slo_ms={SLO_MS}"):
        with serving_staged(MODEL, SECOND, profiles=paths, policies=(policy, policy)) as server:
            rows = load_both(server, rates, seconds)
        found += [{"policy": policy, "model": model, **row} for model, row in zip((MODEL, SECOND), rows, strict=True)]
    return found


def load_both(server: harness.Server, rates: list[float], seconds: float) -> list[dict[str, Any]]:
    """Reports of simultaneous load on both models."""

    def one(model: str, rate: float) -> Any:
        arrivals = ("--rate", f"{rate:.4g}", "--duration", f"{seconds:g}", "--slo-ms", str(SLO_MS))
        return harness.run_json("generate-load", server.url, "--model", model, "--pixels", *arrivals)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (MODEL, SECOND), rates))


def cell_row(cell: dict[str, Any]) -> list[str]:
    """A row of a table with CELL_HEAD: measured values, simulated ones in brackets."""
    rows = cell["measured"], cell["simulated"]
    pairs = [[f"{row[key]:{style}}" for row in rows] for key, style in _COLUMNS.items()]
    pairs.append([f"{1 - row['slo_attainment']:.1%}" for row in rows])
    return [f"{cell['load']}, {cell['policy']}", *(f"{measured} ({simulated})" for measured, simulated in pairs)]


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    over = record["stage_overhead"]
    caption = (
        f"{MODEL} in {STAGES} stages on {record['device']}, {record['seconds']:g} s a cell; sum of l_i(b) over l(b): "
        f"{over[0]:.3f} at 1, {over[-1]:.3f} at {len(over)}; l(1) = {record['l1_ms']:.0f} ms; "
        f"a boundary: {record['boundary_ms']} ms. Measured (simulated)."
    )
    both = (
        (r["policy"], r["model"], f"{r['mean_ms']:.0f}", f"{r['p99_ms']:.0f}", f"{r['ok']} of {r['scheduled']}")
        for r in record["co_located"]
    )
    head = ("two models, policy", "model", "mean, ms", "p99, ms", "answered")
    tables = (harness.markdown_table(CELL_HEAD, map(cell_row, record["cells"])), harness.markdown_table(head, both))
    return "\n\n".join((caption, *tables)) + "\n"


def main() -> None:
    """Measure, print and record."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of load a cell")
    seconds = parser.parse_args().seconds
    with harness.temporary_cache() as folder:
        paths = measured(MODEL, folder), measured(SECOND, folder)
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
    harness.save_record("lazy_live", record)
    print(table(record))


if __name__ == "__main__":
    main()
