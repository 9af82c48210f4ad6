"""On a machine with a GPU, unattended and within nine minutes: tests, profiles with energy, throughput, one record.

First the tests marked gpu, then for each model its full profile, the accuracy of the energy sensor and joules per
request (benchmarks/support/gpu_energy.py); in the remaining time, throughput over HTTP.

Needs no network and no package beyond pyproject.toml's. Run as `make gpu`, or where the project is not installed as
`PYTHONPATH=.:FOLDER_OF_WHEELS python3 -m benchmarks.gpu`. Without a GPU it prints a message, and the exit code is 0.
"""

import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.support.gpu_energy import Study, run_study
from benchmarks.support.harness import RECORDS, argument_parser, markdown_table, run_json, save_record, serving
from profiler.energy import UnmeasuredError

MODELS = ("googlenet", "resnet50")
MAX_BATCH_SIZE = 64
RATES = (250, 500, 1000, 1500, 2000, 3000, 4000)  # offered, 1/s; the client's maximum is near the last
BUDGET = 9 * 60.0  # s
STUDIES = 0.85  # share of the budget for joules per request, divided evenly between the models
LEAST = 60.0  # s that a server needs at least: cuDNN tunes every batch size first


def find_gpu() -> str | None:
    """The first GPU's name; None without one."""
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the numbers."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "uvicorn", "uvloop", "fastapi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def run_tests() -> str:
    """Run the tests marked gpu, and return pytest's last line."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return done.stdout.strip().rpartition("\n")[2] or f"pytest ended with {done.returncode}"


def throughput(model: str, until: float) -> list[dict[str, Any]]:
    """Answered by offered rates with raw pixels under greedy, five seconds each, until one exceeds the capacity."""
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
    """The record as Markdown."""
    parts = [f"# {record['device']}, {record['date']}", f"{record['versions']}", f"tests: {record['tests']}"]
    for model, part in record["models"].items():
        parts += [f"## {model}", *(f"failed: {part['failed']}" for _ in range("failed" in part))]
        parts += [write(part) for key, write in _TABLES.items() if key in part]
    return "\n\n".join(parts) + "\n"


def _profile_table(part: dict[str, Any]) -> str:
    times = part["profile"]["service_time_s"]
    energies = {row["batch_size"]: row for row in part.get("energy", [])}
    rows = []
    for b in (b for b in (1, 2, 4, 8, 16, 32, 64) if b <= len(times)):
        energy = ["-"] * 5
        if (row := energies.get(b)) is not None:
            energy = [f"{row['power_w']:.0f}", f"{row['marginal_mj']:.1f}", f"{row['marginal_error_mj']:.1f}"]
            energy += [f"{row['total_mj']:.1f}", f"{row['marginal_mj'] / b:.1f}"]
        rows.append([b, f"{1e3 * times[b - 1]:.3f}", f"{b / times[b - 1]:.0f}", *energy])
    head = ("b", "l(b), ms", "requests/s", "P(b), W", "ζ(b) above idle, mJ", "±", "total, mJ", "above idle, mJ each")
    return f"{markdown_table(head, rows)}\n\n{part['profile']['note']}"


def _sensor_text(part: dict[str, Any]) -> str:
    found = part["sensor"]
    idle = " and ".join(f"{found['idle_power_w'][when]['value']:.1f} W {when}" for when in ("before", "after"))
    loads = ", ".join(f"{power:.0f} W at {load:.2f}" for load, power in found["power_w_by_load"])
    error = found["duty_cycle_error"]
    return (
        f"Sensor: {found['meter']}, a step every {1e3 * found['step_s']:.0f} ms. Idle, with the context open: {idle}.\n"
        f"Power by load (b = {found['batch_size']}): {loads}. Largest distance from the best line: "
        f"{found['off_the_line']:.1%};\nfrom the sum of idle power and batches: "
        f"{'-' if error is None else f'{error:+.1%}'}."
    )


def _joules_table(part: dict[str, Any]) -> str:
    rows = []
    for cell in part["joules"]:
        if "failed" in cell:
            rows.append([f"{cell['load']:.2f}", "-", cell["policy"], cell["failed"], *["-"] * 5])
            continue
        slo = f"{cell['slo_p95_ms']:.2f}{'' if cell['kept'] else ' (missed)'}" if "slo_p95_ms" in cell else "-"
        policy = cell["policy"].partition(":")[0]
        row = [f"{cell['load']:.2f}", f"{cell['answered_hz']:.0f}", policy, slo, f"{cell['p95_ms']:.2f}"]
        row += [f"{cell[key]:.1f}" for key in ("mean_batch_size", "total_mj", "marginal_mj")]
        rows.append([*row, f"{cell.get('marginal_over_greedy', 1.0):.0%}"])
    head = ("load", "1/s", "policy", "SLO ms", "p95 ms", "mean batch", "mJ each, total", "above idle", "of greedy's")
    return markdown_table(head, rows)


def _throughput_table(part: dict[str, Any]) -> str:
    columns = {"throughput_hz": ".0f", "mean_ms": ".2f", "p99_ms": ".2f", "mean_batch_size": ".1f"}
    rows = (
        [row["offered_hz"], *(format(row[key], style) for key, style in columns.items())] for row in part["throughput"]
    )
    return markdown_table(("offered, 1/s", "answered, 1/s", "mean ms", "p99 ms", "mean batch"), rows)


_TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "profile": _profile_table,
    "sensor": _sensor_text,
    "joules": _joules_table,
    "throughput": _throughput_table,
}


def attempt(part: dict[str, Any], do: Callable[[], object]) -> None:
    """Measure a part; on failure add the message to the part's record and keep what was measured."""
    try:
        do()
    except (RuntimeError, OSError, subprocess.TimeoutExpired, UnmeasuredError) as error:
        print(f"failed: {error}", flush=True)
        part["failed"] = "; ".join(filter(None, (part.get("failed"), str(error))))


def measure(record: dict[str, Any], name: str, began: float) -> None:
    """Fill the record, model by model, saving it after each part; the budget counts from `began`, s."""
    models = record["models"]

    def keep(model: str, key: str, value: Any) -> None:
        models[model][key] = json.loads(value) if key == "profile" else value
        if key == "profile":
            (RECORDS / f"{name}-{model}-profile.json").write_text(value)
        print(f"{time.monotonic() - began:.0f} s: {model}: {key}", flush=True)
        save_record(name, record)

    for number, model in enumerate(MODELS, 1):
        models[model] = {}
        until = began + BUDGET * STUDIES * number / len(MODELS)
        study = Study(model, "cuda:0", MAX_BATCH_SIZE, until - 12.0)  # a cell takes about that long
        attempt(models[model], partial(run_study, study, partial(keep, model)))
    for number, model in enumerate(MODELS, 1):
        left = began + BUDGET - time.monotonic()
        until = time.monotonic() + left / (len(MODELS) - number + 1)
        if until - time.monotonic() > LEAST:
            attempt(models[model], partial(_throughput, partial(keep, model), model, until))
    save_record(name, record)


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
    argument_parser(__doc__).parse_args()
    main()
