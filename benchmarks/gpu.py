"""On a machine with a GPU, unattended and within nine minutes: tests, profiles, serving throughput, one record.

It needs no network and nothing installed but what pyproject.toml names; run as `make gpu`, or on a machine where the
project is not installed as `PYTHONPATH=.:FOLDER_OF_WHEELS python3 -m benchmarks.gpu`. Without a GPU it says so and
exits 0.
"""

import datetime
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.serving import RECORDS, run_json, save, serving

MODELS = ("googlenet", "resnet50")
MAX_BATCH_SIZE = 64
RATES = (250, 500, 1000, 1500, 2000, 3000, 4000)  # offered, 1/s; the client's own ceiling is near the last
BUDGET = 9 * 60.0


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


def profile(model: str) -> dict[str, Any]:
    """Service times through the executor, quick plan."""
    arguments = [model, "--device", "cuda:0", "--weights", "random", "--max-batch-size", str(MAX_BATCH_SIZE), "--quick"]
    file = run_json("profile-model", *arguments, within=120)
    return {key: file[key] for key in ("note", "batch_size", "service_time_s")}


def throughput(model: str, until: float) -> list[dict[str, Any]]:
    """Offered and answered rates with raw pixels, greedy, each rate for five seconds, until one is not kept up with."""
    arguments = ["--device", "cuda:0", "--weights", "random", "--max-batch-size", str(MAX_BATCH_SIZE)]
    rows = []
    with serving(model, *arguments, "--policy", "greedy") as server:
        for rate in RATES:
            if time.monotonic() > until:
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
        lines += [f"failed: {part['failed']}"] if "failed" in part else []
        times = part.get("profile", {"service_time_s": []})["service_time_s"]
        lines += ["", f"## {model}", "", "| b | l(b), ms | requests/s |", "|---|---|---|"]
        sizes = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= len(times)]
        lines += [f"| {b} | {1e3 * times[b - 1]:.3f} | {b / times[b - 1]:.0f} |" for b in sizes]
        lines += ["", "| offered, 1/s | answered, 1/s | mean ms | p99 ms | mean batch |", "|---|---|---|---|---|"]
        lines += [
            f"| {r['offered_hz']} | {r['throughput_hz']:.0f} | {r['mean_ms']:.2f} | {r['p99_ms']:.2f} "
            f"| {r['mean_batch_size']:.1f} |"
            for r in part.get("throughput", [])
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write benchmarks/records/gpu-DEVICE.json and .md."""
    began = time.monotonic()
    gpu = find_gpu()
    if gpu is None:
        print(f"no CUDA device that the torch of {sys.executable} can use: nothing to measure")
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record: dict[str, Any] = {"device": gpu, "date": today, "versions": versions(), "tests": run_tests(), "models": {}}
    name = f"gpu-{gpu.lower().replace(' ', '-')}"
    for number, model in enumerate(MODELS, 1):
        until = began + BUDGET * (0.1 + 0.4 * number)
        part: dict[str, Any] = {}
        record["models"][model] = part
        try:
            part["profile"] = profile(model)
            part["throughput"] = throughput(model, until)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            part["failed"] = str(error)  # what there is, is kept
        save(name, record)
    (RECORDS / f"{name}.md").write_text(table(record))
    print(table(record))
    failed = any("failed" in part for part in record["models"].values()) or "passed" not in record["tests"]
    sys.exit(1 if failed or "failed" in record["tests"] else 0)


if __name__ == "__main__":
    main()
