"""Our server beside a bare FastAPI batcher and mosec, in turns: response times, idle gaps, rates, CPU time, memory.

All of them run the same emulated devices with greedy batching. Part one is an open loop of Poisson arrivals of
150,528-byte images on googlenet-tesla-p4-x10; the simulator gives the mean response time of an ideal queue on the same
arrivals. Part two is wrk with a device that takes a microsecond for each batch: tensors of 1 KB, images of 150,528
bytes, and JPEGs that each server decodes and scales to 224 x 224 in threads or processes of its own.

The idle gap is the time between two batches when a request waited that was sent at least 10 ms before: see
benchmarks/support/idle_gaps.py. Where the batches of our server cannot be logged, it is that of our metric. Part three
repeats the open loop with one process, the FastAPI batcher, and a minimal protocol that receives bodies in place, with
no limits, ids, logs or metrics: what this client and this machine leave to gain. Compare ratios: all of a part is
measured side by side on one machine.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import uvloop
from prometheus_client.samples import Sample

from benchmarks.support import harness
from benchmarks.support.calls import HttpCall, floats_call, image_call, offer_calls
from benchmarks.support.idle_gaps import idle_gaps, read_batches
from benchmarks.support.peer_tables import BARE, BODIES, CONNECTIONS, IN_PLACE, LOADS, MOSEC, draw, tables
from benchmarks.support.processes import cpu_seconds, resource_usage, running_peer
from benchmarks.support.wrk import is_installed, run_wrk
from loadgen.schedule import make_schedule
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
NAME = "peers"
PARTS = ("loads", "rates", "least")
ONE_PROCESS = "Batchwright, one process"
VARIANTS: dict[str, tuple[str, ...]] = {  # of our server: flags of serve-model by name
    ONE_PROCESS: (),
}
_GAP = "batchwright_idle_gap_seconds"


@dataclass(frozen=True)
class Work:
    """What all servers are given in one part of the run.

    Attributes:
        body: one of BODIES.
        profile: of the emulated device, a name or a file.
        folder: for the logs of batches; None: no logs.
    """

    body: str
    profile: str
    folder: Path | None = None


@dataclass(frozen=True)
class Target:
    """A running server: its process id, its call, its log of batches, and our server's metrics."""

    pid: int
    call: HttpCall
    log: Path
    metrics: harness.Server | None = None


Start = Callable[[Work], AbstractContextManager[Target]]


@contextmanager
def ours(name: str, work: Work) -> Iterator[Target]:
    """Our server in one of its variants."""
    log, environment = _log(name, work)
    model, path = "googlenet", "/v2/models/googlenet/infer"
    if work.body == "1 KB":
        source = harness.ROOT / "benchmarks" / "servers" / "float_models.py"
        model, path = f"floats={source}:KilobyteOfFloats", "/v2/models/floats/infer"
    line = ["env", *(f"{key}={value}" for key, value in environment.items())]
    line += [sys.executable, "-m", "benchmarks.servers.logged_batches", model, *VARIANTS[name]]
    with harness.running(*line, "--device", f"emulated:{work.profile}", "--policy", "greedy") as server:
        path = "/predict" if work.body == "JPEG" else path
        yield Target(server.process.pid, _call(server.url + path, work.body), log, server)


@contextmanager
def bare(work: Work) -> Iterator[Target]:
    """The batcher of benchmarks/servers/bare_fastapi.py."""
    log, environment = _log(BARE, work)
    port = harness.free_port()
    path = "/predict" if work.body == "JPEG" else "/v2/models/m/infer"
    call = _call(f"http://127.0.0.1:{port}{path}", work.body)
    line = [sys.executable, "-m", "benchmarks.servers.bare_fastapi", "--profile", work.profile, "--port", str(port)]
    with running_peer(line, call, environment) as pid:
        yield Target(pid, call, log)


@contextmanager
def in_place(work: Work) -> Iterator[Target]:
    """The protocol of benchmarks/servers/received_in_place.py."""
    log, environment = _log(IN_PLACE, work)
    port = harness.free_port()
    call = _call(f"http://127.0.0.1:{port}/", work.body)
    line = [sys.executable, "-m", "benchmarks.servers.trivial_batcher", "--http", "received-in-place"]
    with running_peer([*line, "--profile", work.profile, "--port", str(port)], call, environment) as pid:
        yield Target(pid, call, log)


@contextmanager
def mosec(python: str, work: Work) -> Iterator[Target]:
    """mosec, run by the interpreter `python`."""
    log, environment = _log(MOSEC, work)
    port = harness.free_port()
    call = _call(f"http://127.0.0.1:{port}/inference", work.body)
    script = str(harness.ROOT / "benchmarks" / "peer_servers" / "mosec_server.py")
    environment |= {"SERVICE_TIMES": json.dumps(load_profile(work.profile).service_times)}
    if work.body == "JPEG":
        environment |= {"DECODE": "1"}
    flags = ("--address", "127.0.0.1", "--port", str(port), "--timeout", "60000")  # ms
    with running_peer([python, script, *flags], call, environment) as pid:
        yield Target(pid, call, log)


def _log(name: str, work: Work) -> tuple[Path, dict[str, str]]:
    if work.folder is None:
        return Path("none"), {}
    path = work.folder / f"{name}.batches"
    return path, {"BATCH_LOG": str(path)}


def _call(url: str, body: str) -> HttpCall:
    match body:
        case "1 KB":
            return floats_call(url, 256)
        case "JPEG":
            image = harness.synthetic_image(np.random.default_rng(0), 24, 400, "JPEG", quality=90)
            return HttpCall(url, image, {"Content-Type": "image/jpeg"})
        case _:
            return image_call(url)


def measure_loads(servers: Mapping[str, Start], work: Work, repetitions: int, seconds: float) -> dict[str, Any]:
    """Response times and more of all servers in turns, and their memory after it."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    capacity = load_profile(work.profile).capacity
    with ExitStack() as stack:
        started = {name: stack.enter_context(start(work)) for name, start in servers.items()}
        for target in started.values():
            uvloop.run(offer_calls(target.call, make_schedule("poisson", 50.0, 2.0, 0).instants.tolist()))
        for turn, load in product(range(repetitions), LOADS):
            rate = load * capacity
            arrivals = ["--rate", str(rate), "--duration", str(seconds), "--seed", str(turn)]
            ideal = harness.run_json("generate-load", "--simulate", work.profile, "--policy", "greedy", *arrivals)
            instants = make_schedule("poisson", rate, seconds, turn).instants.tolist()
            for name in _in_turn(servers, turn):
                print(f"repetition {turn + 1}: load {load}, {name}", flush=True)
                runs[name].append({"load": load, "ideal_ms": ideal["mean_ms"]} | measure_load(started[name], instants))
        rss = {name: resource_usage(target.pid).rss_mb for name, target in started.items()}
    return {"seconds": seconds, "runs": runs, "rss_mb": rss}


def measure_load(target: Target, instants: list[float]) -> dict[str, Any]:
    """One run of the open loop."""
    before, cpu = _metric(target), cpu_seconds(target.pid)
    log, start = uvloop.run(offer_calls(target.call, instants))
    cpu = cpu_seconds(target.pid) - cpu
    responses = np.array([r.finished - r.scheduled for r in log.records if r.status == 200]) * 1e3
    sent = sorted(start + r.sent for r in log.records)
    gaps = idle_gaps(read_batches(target.log, start), sent) if len(responses) == log.sent else []
    return {
        "requests": log.sent,
        "not_200": log.sent - len(responses),
        "mean_ms": float(responses.mean()),
        "p99_ms": float(np.percentile(responses, 99)),
        "send_lag_p99_ms": 1e3 * float(np.percentile([r.sent - r.scheduled for r in log.records], 99)),
        "cpu_s_per_1000": 1e3 * cpu / log.sent,
        "idle_gap": _described(gaps),
        "idle_gap_by_metric": _difference(before, _metric(target)),
    }


def _described(gaps: list[float]) -> dict[str, float] | None:
    if not gaps:
        return None
    return {"gaps": len(gaps), "median_ms": 1e3 * median(gaps), "mean_ms": 1e3 * fmean(gaps)}


def _metric(target: Target) -> list[Sample]:
    if target.metrics is None:
        return []
    return [sample for suffix in ("_bucket", "_sum", "_count") for sample in target.metrics.samples(_GAP + suffix)]


def _difference(before: list[Sample], after: list[Sample]) -> dict[str, float] | None:
    """Median and mean of the histogram between two readings."""
    earlier = {(sample.name, sample.labels.get("le")): sample.value for sample in before}
    now = [s._replace(value=s.value - earlier.get((s.name, s.labels.get("le")), 0.0)) for s in after]
    totals = {sample.name: sample.value for sample in now if "le" not in sample.labels}
    middle = harness.median_of_histogram(sample for sample in now if "le" in sample.labels)
    if middle is None:
        return None
    count = totals[f"{_GAP}_count"]
    return {"gaps": count, "median_ms": 1e3 * middle, "mean_ms": 1e3 * totals[f"{_GAP}_sum"] / count}


def measure_rates(servers: Mapping[str, Start], profile: str, repetitions: int, seconds: float) -> dict[str, Any]:
    """Requests a second of all servers in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for body in BODIES:
        with ExitStack() as stack:
            started = {name: stack.enter_context(start(Work(body, profile))) for name, start in servers.items()}
            for turn, connections in product(range(repetitions), CONNECTIONS):
                for name in _in_turn(servers, turn):
                    print(f"repetition {turn + 1}: {body}, {connections} connections, {name}", flush=True)
                    target = started[name]
                    run_wrk(target.call, connections, 1.0)
                    cpu = cpu_seconds(target.pid)
                    run = run_wrk(target.call, connections, seconds)
                    cpu = cpu_seconds(target.pid) - cpu
                    cell = {"body": body, "connections": connections, "requests_per_s": run.requests_per_s}
                    runs[name].append(cell | {"not_200": run.not_200, "cpu_s_per_1000": 1e3 * cpu / run.requests})
    return {"seconds": seconds, "runs": runs}


def _in_turn(servers: Mapping[str, Start], turn: int) -> list[str]:
    return list(servers)[:: 1 if turn % 2 == 0 else -1]


def main() -> None:
    """Measure, record, and draw."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--peer-python", help="an interpreter with mosec and Pillow; without it mosec is left out")
    parser.add_argument("--repetitions", type=int, default=2, help="(default: 2)")
    parser.add_argument("--load-seconds", type=float, default=25.0, help="of a run of the open loop (default: 25)")
    parser.add_argument("--wrk-seconds", type=float, default=4.0, help="of a run of wrk (default: 4)")
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this part alone again (repeatable)")
    parser.add_argument("--trial", action="store_true", help="print the tables, and write neither record nor figure")
    chosen = parser.parse_args()
    if not is_installed():
        sys.exit("skipped: wrk is not installed (apt-get install wrk)")
    servers: dict[str, Start] = {name: partial(ours, name) for name in VARIANTS} | {BARE: bare}
    if chosen.peer_python:
        if subprocess.run([chosen.peer_python, "-c", "import mosec, PIL"], check=False).returncode:
            sys.exit(f"{chosen.peer_python} lacks mosec or Pillow: install both into its environment")
        servers[MOSEC] = partial(mosec, chosen.peer_python)
    else:
        print("without mosec: give --peer-python an interpreter with mosec and Pillow")
    began = time.monotonic()
    record = harness.load_record(NAME) if chosen.part else {}
    with tempfile.TemporaryDirectory() as name:
        work, instant = Work("150,528 bytes", PROFILE, Path(name)), str(harness.instant_profile(Path(name)))
        least: dict[str, Start] = {ONE_PROCESS: servers[ONE_PROCESS], BARE: bare, IN_PLACE: in_place}
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "loads": lambda: measure_loads(servers, work, chosen.repetitions, chosen.load_seconds),
            "rates": lambda: measure_rates(servers, instant, chosen.repetitions, chosen.wrk_seconds),
            "least": lambda: measure_loads(least, work, chosen.repetitions, chosen.load_seconds),
        }
        for part in chosen.part or PARTS:
            record[part] = parts[part]()
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if chosen.trial:
        print(tables(record))
        return
    harness.save_record(NAME, record)
    harness.save_table(NAME, "Beside other servers", tables(record))
    draw(record)


if __name__ == "__main__":
    main()
