"""On a machine with a GPU, unattended and within nine minutes: tests, profiles with energy, throughput, one record.

First what only a GPU tells: the tests marked gpu, then for each model its full profile, what its energy sensor is
worth and joules per request (benchmarks/gpu_energy.py); in what time is left, throughput over HTTP.

It needs no network and nothing installed but what pyproject.toml names; run as `make gpu`, or on a machine where the
project is not installed as `PYTHONPATH=.:FOLDER_OF_WHEELS python3 -m benchmarks.gpu`. Without a GPU it says so and
exits 0.
"""

import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu_energy import Study, study
from benchmarks.serving import RECORDS, run_json, save, serving
from profiler.energy import UnmeasuredError

MODELS = ("googlenet", "resnet50")
MAX_BATCH_SIZE = 64
RATES = (250, 500, 1000, 1500, 2000, 3000, 4000)  # offered, 1/s; the client's own ceiling is near the last
BUDGET = 9 * 60.0  # s for all of it
STUDIES = 0.85  # share of it after which no more joules are counted, and a model's part of that is even
LEAST = 60.0  # s without which no server is started: cuDNN tunes every batch size first


def find_gpu() -> str | None:
    """The first GPU's name; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "uvicorn", "uvloop", "fastapi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def run_tests() -> str:
    """The last line of the tests marked gpu."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return done.stdout.strip().rpartition("\n")[2] or f"pytest ended with {done.returncode}"


def throughput(model: str, until: float) -> list[dict[str, Any]]:
    """Offered and answered rates with raw pixels, greedy, each rate for five seconds, until one is not kept up with."""
    arguments = ["--device", "cuda:0", "--weights", "random", "--max-batch-size", str(MAX_BATCH_SIZE)]
    rows = []
    left = until - time.monotonic()
    with serving(model, *arguments, "--policy", "greedy", ready_within=left) as server:
        for rate in RATES:
            if time.monotonic() > until - 10.0:
                break
            load = ["--pixels", "--rate", str(rate), "--duration", "5", "--seed", "1"]
            report = run_json("generate-load", server.url, *load, within=90)
            keys = ("throughput_hz", "ok", "mean_ms", "p99_ms", "mean_batch_size", "send_lag_p99_ms")
            rows.append({"offered_hz": rate, **{key: report[key] for key in keys}})
            print(rows[-1], flush=True)
            if report["throughput_hz"] < 0.9 * rate:
                break
    return rows


def table(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [f"# {record['device']}, {record['date']}", "", f"{record['versions']}", "", f"tests: {record['tests']}"]
    for model, part in record["models"].items():
        lines += ["", f"## {model}", "", *(f"failed: {part['failed']}" for _ in range("failed" in part))]
        lines += [*_profile_rows(part), *_sensor_lines(part), *_joules_rows(part), *_throughput_rows(part)]
    return "\n".join(lines) + "\n"


def _profile_rows(part: dict[str, Any]) -> Iterator[str]:
    if "profile" not in part:
        return
    times = part["profile"]["service_time_s"]
    energies = {row["batch_size"]: row for row in part.get("energy", [])}
    yield "| b | l(b), ms | requests/s | P(b), W | ζ(b) above idle, mJ | ± | total, mJ | above idle, mJ a request |"
    yield "|---|---|---|---|---|---|---|---|"
    for b in (b for b in (1, 2, 4, 8, 16, 32, 64) if b <= len(times)):
        row = energies.get(b)
        told = (
            "- | - | - | - | -"
            if row is None
            else f"{row['power_w']:.0f} | {row['marginal_mj']:.1f} | {row['marginal_error_mj']:.1f} "
            f"| {row['total_mj']:.1f} | {row['marginal_mj'] / b:.1f}"
        )
        yield f"| {b} | {1e3 * times[b - 1]:.3f} | {b / times[b - 1]:.0f} | {told} |"
    yield f"\n{part['profile']['note']}"


def _sensor_lines(part: dict[str, Any]) -> Iterator[str]:
    if "sensor" not in part:
        return
    found = part["sensor"]
    idle = " and ".join(f"{found['idle_power_w'][when]['value']:.1f} W {when}" for when in ("before", "after"))
    loads = ", ".join(f"{power:.0f} W at {load:.2f}" for load, power in found["power_w_by_load"])
    error = found["duty_cycle_error"]
    yield f"\nSensor: {found['meter']}, a step every {1e3 * found['step_s']:.0f} ms. Idle,"
    yield f"with the context open: {idle}."
    yield f"Power by load (b = {found['batch_size']}): {loads}; off the best line by at most"
    yield f"{found['off_the_line']:.1%}, off idle and batches added up by {'-' if error is None else f'{error:+.1%}'}."


def _joules_rows(part: dict[str, Any]) -> Iterator[str]:
    if "joules" not in part:
        return
    yield "\n| load | 1/s | policy | SLO ms | p95 ms | mean batch | mJ a request, total | above idle | of greedy's |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for cell in part["joules"]:
        if "failed" in cell:
            yield f"| {cell['load']:.2f} | - | {cell['policy']} | {cell['failed']} | - | - | - | - | - |"
            continue
        slo = f"{cell['slo_p95_ms']:.2f}{'' if cell['kept'] else ' (missed)'}" if "slo_p95_ms" in cell else "-"
        yield (
            f"| {cell['load']:.2f} | {cell['answered_hz']:.0f} | {cell['policy'].partition(':')[0]} | {slo} "
            f"| {cell['p95_ms']:.2f} | {cell['mean_batch_size']:.1f} | {cell['total_mj']:.1f} "
            f"| {cell['marginal_mj']:.1f} | {cell.get('marginal_over_greedy', 1.0):.0%} |"
        )


def _throughput_rows(part: dict[str, Any]) -> Iterator[str]:
    if "throughput" not in part:
        return
    yield "\n| offered, 1/s | answered, 1/s | mean ms | p99 ms | mean batch |"
    yield "|---|---|---|---|---|"
    for r in part["throughput"]:
        row = f"| {r['offered_hz']} | {r['throughput_hz']:.0f} | {r['mean_ms']:.2f} | {r['p99_ms']:.2f} "
        yield f"{row}| {r['mean_batch_size']:.1f} |"


def attempt(part: dict[str, Any], do: Callable[[], object]) -> None:
    """Do a part of the work; what failed is said in the record, and what there is, is kept."""
    try:
        do()
    except (RuntimeError, OSError, subprocess.TimeoutExpired, UnmeasuredError) as error:
        print(f"failed: {error}", flush=True)
        part["failed"] = "; ".join(filter(None, (part.get("failed"), str(error))))


def measure(record: dict[str, Any], name: str, began: float) -> None:
    """Fill the record, model by model, saving it after each part; `began` is when the budget began, s."""
    models = record["models"]

    def keep(model: str, key: str, value: Any) -> None:
        models[model][key] = json.loads(value) if key == "profile" else value
        if key == "profile":
            (RECORDS / f"{name}-{model}-profile.json").write_text(value)
        print(f"{time.monotonic() - began:.0f} s: {model}: {key}", flush=True)
        save(name, record)

    for number, model in enumerate(MODELS, 1):
        models[model] = {}
        until = began + BUDGET * STUDIES * number / len(MODELS)
        what = Study(model, "cuda:0", MAX_BATCH_SIZE, until - 12.0)  # a cell takes about that long
        attempt(models[model], partial(study, what, partial(keep, model)))
    for number, model in enumerate(MODELS, 1):
        left = began + BUDGET - time.monotonic()
        until = time.monotonic() + left / (len(MODELS) - number + 1)
        if until - time.monotonic() > LEAST:
            attempt(models[model], partial(_throughput, partial(keep, model), model, until))
    save(name, record)


def _throughput(keep: Callable[[str, Any], object], model: str, until: float) -> None:
    keep("throughput", throughput(model, until))


def main() -> None:
    """Measure and write benchmarks/records/gpu-DEVICE.json and .md, and the profiles beside them."""
    began = time.monotonic()
    gpu = find_gpu()
    if gpu is None:
        print(f"no CUDA device that the torch of {sys.executable} can use: nothing to measure")
        return
    RECORDS.mkdir(exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record: dict[str, Any] = {"device": gpu, "date": today, "versions": versions(), "tests": run_tests(), "models": {}}
    name = f"gpu-{gpu.lower().replace(' ', '-')}"
    measure(record, name, began)
    (RECORDS / f"{name}.md").write_text(table(record))
    print(table(record))
    failed = any("failed" in part for part in record["models"].values()) or "passed" not in record["tests"]
    sys.exit(1 if failed or "failed" in record["tests"] else 0)


if __name__ == "__main__":
    main()
