"""A device as fast as captured graphs on a GPU, 0.2 + 0.018 b ms a batch, in real time: where Python is the limit.

wrk sends images of 150,528 bytes on 64 connections, as fast as they are answered, to servers without gateways, with one
and with two. Recorded are answers a second, the idle gap between batches while requests wait, and the CPU time of the
event loops of serving process and gateways. The emulated device itself takes a
processor, since it spins in place of a GPU, and so does wrk. Needs Debian's wrk.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.calls import image_call
from benchmarks.support.gateway_processes import processes_of
from benchmarks.support.harness import Server, argument_parser, median_of_histogram, save_record, serving
from benchmarks.support.wrk import is_installed, run_wrk
from policies.profile import Profile
from server.backends.buckets import LARGEST, padded

GATEWAYS = (0, 1, 2)
CONNECTIONS = 64
_COUNTERS = ("batchwright_batch_size_sum", "batchwright_batch_size_count")
_GAPS = "batchwright_idle_gap_seconds"


def graph_like_profile(largest: int = LARGEST) -> Profile:
    """The profile of about a ResNet-50 in captured graphs, padded to buckets."""
    times = tuple(2e-4 + 1.8e-5 * size for size in range(1, largest + 1))
    return padded(Profile("graph-like", times, model="resnet50", device="emulated"))


def loop_seconds(pid: int) -> float:
    """CPU time of a process's first thread, which runs its event loop, s."""
    return sum(thread.user_time + thread.system_time for thread in psutil.Process(pid).threads() if thread.id == pid)


def measure(server: Server, duration: float) -> dict[str, Any]:
    """Answers a second under closed-loop load for `duration`, s, and what they cost."""
    processes = processes_of(server)
    assert processes is not None
    call = image_call(f"{server.url}/v2/models/googlenet/infer")
    run_wrk(call, CONNECTIONS, 2.0)  # warms up
    gateways = [pid for pid in processes.gateways if pid != processes.serving]

    def counters() -> dict[str, float]:
        loops = {f"loop of {pid}": loop_seconds(pid) for pid in (processes.serving, *gateways)}
        return loops | {name: server.total(name) for name in (*_COUNTERS, f"{_GAPS}_sum", f"{_GAPS}_count")}

    before = counters()
    run = run_wrk(call, CONNECTIONS, duration)
    spent = {name: value - before[name] for name, value in counters().items()}
    gap, batches = median_of_histogram(server.samples(f"{_GAPS}_bucket")), spent["batchwright_batch_size_count"]
    serving_loop = spent[f"loop of {processes.serving}"]
    gateway_loops = sum(spent[f"loop of {pid}"] for pid in gateways)
    requests = max(1, run.requests)
    return {
        "requests_per_s": round(run.requests_per_s),
        "not_200": run.not_200,
        "mean_batch_size": round(spent["batchwright_batch_size_sum"] / max(1.0, batches), 1),
        "batches_per_s": round(batches / duration),
        "idle_gap_median_us": None if gap is None else round(1e6 * gap),
        "idle_gap_mean_us": round(1e6 * spent[f"{_GAPS}_sum"] / max(1.0, spent[f"{_GAPS}_count"])),
        "serving_loop_cpu": round(serving_loop / duration, 2),
        "gateway_loops_cpu": round(gateway_loops / duration, 2),
        "serving_loop_us_per_request": round(1e6 * serving_loop / requests, 1),
        "gateway_loops_us_per_request": round(1e6 * gateway_loops / requests, 1),
    }


def main() -> None:
    """Print and record one row for each number of gateways."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run, s (default: %(default)s)")
    seconds = parser.parse_args().seconds
    if not is_installed():
        print("skipped: wrk is not installed (apt-get install wrk)")
        return
    profile = graph_like_profile()
    limit = profile.capacity
    record: dict[str, Any] = {
        "device_limit_per_s": round(limit),
        "cpus": psutil.cpu_count(),
        "load_average": psutil.getloadavg()[0],
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph-like.json"
        path.write_text(profile.to_json())
        for gateways in GATEWAYS:
            flags = ("--device", f"emulated:{path}", "--policy", "greedy", "--gateways", str(gateways))
            with serving("googlenet", *flags) as server:
                record["rows"][str(gateways)] = measure(server, seconds)
            print(gateways, record["rows"][str(gateways)], flush=True)
    save_record("graph_like", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
