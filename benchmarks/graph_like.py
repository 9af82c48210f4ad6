"""A device as fast as captured graphs on a GPU, 0.2 + 0.018 b ms a batch, in real time: where Python is the limit.

wrk sends images of 150,528 bytes on 64 connections, as fast as they are answered. Recorded are answers a second, the
idle gap between batches while requests wait, and the CPU time of the event loop. The emulated device itself takes a
processor, since it spins in place of a GPU, and so does wrk. Needs Debian's wrk.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.calls import image_call
from benchmarks.support.harness import Server, argument_parser, median_of_histogram, save_record, serving
from benchmarks.support.wrk import is_installed, run_wrk
from policies.profile import Profile
from server.backends.buckets import LARGEST, padded

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
    call = image_call(f"{server.url}/v2/models/googlenet/infer")
    run_wrk(call, CONNECTIONS, 2.0)  # warms up

    def counters() -> dict[str, float]:
        loop = {"loop": loop_seconds(server.process.pid)}
        return loop | {name: server.total(name) for name in (*_COUNTERS, f"{_GAPS}_sum", f"{_GAPS}_count")}

    before = counters()
    run = run_wrk(call, CONNECTIONS, duration)
    spent = {name: value - before[name] for name, value in counters().items()}
    gap, batches = median_of_histogram(server.samples(f"{_GAPS}_bucket")), spent["batchwright_batch_size_count"]
    requests = max(1, run.requests)
    return {
        "requests_per_s": round(run.requests_per_s),
        "not_200": run.not_200,
        "mean_batch_size": round(spent["batchwright_batch_size_sum"] / max(1.0, batches), 1),
        "batches_per_s": round(batches / duration),
        "idle_gap_median_us": None if gap is None else round(1e6 * gap),
        "idle_gap_mean_us": round(1e6 * spent[f"{_GAPS}_sum"] / max(1.0, spent[f"{_GAPS}_count"])),
        "loop_cpu": round(spent["loop"] / duration, 2),
        "loop_us_per_request": round(1e6 * spent["loop"] / requests, 1),
    }


def main() -> None:
    """Print and record the run."""
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
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph-like.json"
        path.write_text(profile.to_json())
        with serving("googlenet", "--device", f"emulated:{path}", "--policy", "greedy") as server:
            record |= measure(server, seconds)
    save_record("graph_like", record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
