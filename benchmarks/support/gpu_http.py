"""Stage C of benchmarks/gpu.py over HTTP: what the server answers with 1, 2, 4 and 6 gateways, and policies at loads.

The load generator runs on the same machine. Each cell has the processors that the server's processes used: where one
of them used nearly a whole processor, it and not the GPU may be what limited the cell.
"""

import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.gateway_processes import processes_of
from benchmarks.support.gpu_parts import emit
from benchmarks.support.gpu_policies import CPU_BOUND, TIMEOUT
from benchmarks.support.harness import Server, run_json, serving
from policies.profile import Profile

GATEWAYS = 6, 1, 2, 4  # in the order of measurement; a start takes up to a minute, so that time may end before
LOADS = 0.3, 0.6, 0.85  # of the best throughput over HTTP
_FIRST_RATE, _FACTOR = 1000.0, 1.5  # 1/s; the offered rate grows by this factor until it is not answered
_LOAD_S = 4.0  # s of a cell
_CELL_S = 9.0  # s that a cell takes, with the start of the load generator
_KEYS = "throughput_hz", "ok", "mean_ms", "p95_ms", "p99_ms", "mean_batch_size", "send_lag_p99_ms"


def measure_http(model: str, device: str, profile: Path, gateways: Sequence[int], seconds: float) -> None:
    """Report throughput by number of gateways, then policies at three loads with the best number.

    Args:
        model: a torchvision model.
        device: of serve-model.
        profile: the model's profile file.
        gateways: numbers of gateways.
        seconds: about the time that this takes.
    """
    until, cells = time.monotonic() + seconds, list[dict[str, Any]]()
    first_rate = min(_FIRST_RATE, 0.5 * Profile.load(profile).capacity)
    failures: dict[int, str] = {}
    for index, count in enumerate(gateways):
        share = (until - time.monotonic()) / (len(gateways) - index + 1)  # the last share is that of the policies
        try:
            with _server(model, device, profile, count, until) as server:
                for row in _rates(server, first_rate, time.monotonic() + share):
                    cells.append({"gateways": count, **row})
                    emit("throughput", cells)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # the other numbers of gateways are measured
            failures[count] = str(error)
            emit("failures", failures)
    if not cells:
        raise RuntimeError(f"no server was measured: {failures}")
    sound = [cell for cell in cells if not cell["client_late"]] or cells
    best = max(sound, key=lambda cell: float(cell["throughput_hz"]))
    emit("best", best)
    rows: list[dict[str, Any]] = []
    with _server(model, device, profile, best["gateways"], until) as server:
        slo = _slo_ms(profile)
        for load in LOADS:
            for spec in ("greedy", TIMEOUT, f"smdp:slo_p95_ms={slo:g}"):
                if time.monotonic() > until - _CELL_S:
                    return
                server.set_policy(model, spec)
                rows.append({"policy": spec, "load": load, **_cell(server, load * best["throughput_hz"])})
                emit("policies", rows)


def _slo_ms(profile: Path) -> float:
    """Three times the service time of the largest batch, ms: reachable at all loads but the highest."""
    return 3e3 * Profile.load(profile).service_times[-1]


def _server(model: str, device: str, profile: Path, gateways: int, until: float) -> Any:
    flags = "--device", device, "--weights", "random", "--profile", str(profile), "--policy", "greedy"
    left = max(1.0, until - time.monotonic())
    return serving(model, *flags, "--gateways", str(gateways), ready_within=left)


def _rates(server: Server, first_rate: float, until: float) -> Iterable[dict[str, Any]]:
    """Cells of growing rates, until one is not answered or the time is up."""
    rate = first_rate
    while time.monotonic() < until - _CELL_S or rate == first_rate:
        cell = _cell(server, rate)
        yield cell
        if cell["throughput_hz"] < 0.9 * rate:
            return
        rate *= _FACTOR


def _cell(server: Server, rate: float) -> dict[str, Any]:
    load = ["--pixels", "--rate", str(rate), "--duration", str(_LOAD_S), "--seed", "1", "--give-up-after", "5"]
    before, began = _cpu_seconds(server), time.monotonic()
    report = run_json("generate-load", server.url, *load, "--processes", "auto", "--precise", within=60)
    elapsed = time.monotonic() - began
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in _cpu_seconds(server).items()}
    busiest = max(used.values(), default=0.0) / min(elapsed, _LOAD_S)
    found = {"offered_hz": rate, **{key: report[key] for key in _KEYS}, "busiest_process": busiest}
    late = report["send_lag_p99_ms"] is not None and report["send_lag_p99_ms"] > 10.0
    return {**found, "cpu_bound": busiest > CPU_BOUND, "client_late": late}


def _cpu_seconds(server: Server) -> dict[int, float]:
    """CPU time of the server's processes so far, s."""
    found = processes_of(server)
    times = ((pid, psutil.Process(pid).cpu_times()) for pid in (found.all if found else ()))
    return {pid: used.user + used.system for pid, used in times}
