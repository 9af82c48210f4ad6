"""Overload: goodput when more requests arrive than the device can serve, beside peers on the same emulated device.

Poisson arrivals in an open loop, images of 1 KB, and a time-out of 1 s: sent to our server as X-Timeout-Ms with each
call, set for all calls in a peer's configuration. Goodput counts answers within 1 s of the scheduled arrival. A peer
reads the same bytes without decoding them. Each peer is measured as it is started by default, and with a bound that
rejects what it could not answer in time: `--capacity` of mosec, and uvicorn's `limit_concurrency` under LitServe. About
16 minutes with the peers; cells that are in the record are not measured again.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.support import harness
from benchmarks.support.calls import HttpCall, offer_calls
from benchmarks.support.processes import PeakMemory, resource_usage, running_peer
from loadgen.client import RunLog
from policies.profile import load_profile
from policies.queue import arrivals

PROFILE = "googlenet-tesla-p4-x10"
LOADS = (0.9, 1.2, 2.0, 5.0)
OURS = ("greedy", "smdp:w2=16")
PEERS = ("mosec", "litserve")
BOUNDED = ", bounded queue"  # of a peer's name
TIMEOUT = 1.0  # s
_SHARE = 0.8  # of the timeout in which a bounded queue is served; at 1 the last ones come too late
_CLIENT_TIMEOUT = 1.5  # s; longer than TIMEOUT, so that a server's own 504 is still received
_HEAD = (
    *("server", "load", "offered /s", "goodput /s", "of capacity", "refused /s", "expired /s", "other /s"),
    *("p50 ms", "p99 ms", "RSS MB before, peak, after"),
)


@dataclass(frozen=True)
class Target:
    """A server under load: its process id, and the call that it gets."""

    pid: int
    call: HttpCall


@contextmanager
def ours(policy: str) -> Iterator[Target]:
    """Our server under a policy."""
    with harness.serving("googlenet", "--device", f"emulated:{PROFILE}", "--policy", policy) as server:
        headers = {"Content-Type": "image/jpeg", "X-Timeout-Ms": str(round(1e3 * TIMEOUT))}
        yield Target(server.process.pid, HttpCall(f"{server.url}/predict", harness.small_jpeg(), headers))


@contextmanager
def peer(name: str, python: str, is_bounded: bool) -> Iterator[Target]:
    """A peer's server, run by the interpreter `python`, with a bound of its queue or as it is by default."""
    port, jpeg = harness.free_port(), harness.small_jpeg()
    encoded = json.dumps({"image": base64.b64encode(jpeg).decode()}).encode()
    path, body, kind = {
        "mosec": ("/inference", jpeg, "image/jpeg"),
        "litserve": ("/predict", encoded, "application/json"),
    }[name]
    script = str(Path(__file__).parent / "peer_servers" / f"{name}_server.py")
    line = [python, script, "--port", str(port), *peer_flags(name, is_bounded)]
    times = {"SERVICE_TIMES": json.dumps(load_profile(PROFILE).service_times)}
    call = HttpCall(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": kind})
    with running_peer(line, call, times) as pid:
        yield Target(pid, call)


def peer_flags(name: str, is_bounded: bool) -> list[str]:
    """The time-out of a peer, and the bound of its queue: the requests that are served in `_SHARE` of the time-out.

    A request that is admitted to a full queue waits for the batches before it and is answered with its own, the
    largest. mosec counts waiting requests; uvicorn counts connections, those of requests in service and idle ones too,
    so that LitServe may reject requests below the bound.
    """
    profile = load_profile(PROFILE)
    waiting = int((_SHARE * TIMEOUT - profile.service_times[-1]) * profile.capacity)
    if name == "mosec":
        return ["--timeout", str(round(1e3 * TIMEOUT)), *(["--capacity", str(waiting)] if is_bounded else [])]
    bound = ["--most-calls", str(waiting + profile.max_batch_size)] if is_bounded else []
    return ["--timeout", str(TIMEOUT), *bound]


async def _offer(call: HttpCall, rate: float, duration: float) -> RunLog:
    instants = arrivals.poisson(rate, duration, np.random.default_rng(1))
    return (await offer_calls(call, instants, _CLIENT_TIMEOUT))[0]


def measure(server: AbstractContextManager[Target], load: float, duration: float) -> dict[str, Any]:
    """One cell: a short warm-up, then `duration` s of load."""
    capacity = load_profile(PROFILE).capacity
    with server as target:
        uvloop.run(_offer(target.call, 0.5 * capacity, 2.0))
        before = resource_usage(target.pid)
        with PeakMemory(target.pid) as memory:
            log = uvloop.run(_offer(target.call, load * capacity, duration))
        after = resource_usage(target.pid)
    statuses = Counter(str(record.status) for record in log.records)
    responses = np.array([r.finished - r.scheduled for r in log.records if r.status == 200]) * 1e3
    in_time = int((responses <= 1e3 * TIMEOUT).sum())
    lag = np.percentile([r.sent - r.scheduled for r in log.records], 99) * 1e3
    return {
        "offered_hz": log.sent / duration,
        "goodput_hz": in_time / duration,
        "goodput_over_capacity": in_time / duration / capacity,
        "late_hz": (len(responses) - in_time) / duration,
        "statuses": dict(sorted(statuses.items())),
        "p50_ms": float(np.percentile(responses, 50)) if len(responses) else None,
        "p99_ms": float(np.percentile(responses, 99)) if len(responses) else None,
        "rss_mb": {"before": before.rss_mb, "peak": memory.peak, "after": after.rss_mb},
        "send_lag_p99_ms": float(lag),
        "duration_s": duration,
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown; refused: 503 and 429, expired: 504 and 408, other: all else but answers in time."""
    return harness.markdown_table(_HEAD, (list(_cells(key, cell)) for key, cell in record.items())) + "\n"


def _cells(key: str, cell: dict[str, Any]) -> Iterator[str]:
    yield from key.split(" @ ")
    counts = {status: n / cell["duration_s"] for status, n in cell["statuses"].items()}
    refused = counts.pop("503", 0.0) + counts.pop("429", 0.0)
    expired = counts.pop("504", 0.0) + counts.pop("408", 0.0)
    other = cell["late_hz"] + sum(rate for status, rate in counts.items() if status != "200")
    yield from (f"{cell['offered_hz']:.0f}", f"{cell['goodput_hz']:.0f}", f"{cell['goodput_over_capacity']:.2f}")
    yield from (f"{refused:.0f}", f"{expired:.0f}", f"{other:.0f}")
    yield from ("-" if cell[p] is None else f"{cell[p]:.0f}" for p in ("p50_ms", "p99_ms"))
    yield ", ".join(f"{megabytes:.0f}" for megabytes in cell["rss_mb"].values())


def main() -> None:
    """Fill the record cell by cell."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of load a cell")
    parser.add_argument("--peer-python", help="an interpreter with mosec and litserve; without it only our server")
    parser.add_argument("--record", default="overload", help="name of the record")
    chosen = parser.parse_args()
    servers = {policy: partial(ours, policy) for policy in OURS}
    if chosen.peer_python:
        servers |= {name: partial(peer, name, chosen.peer_python, False) for name in PEERS}
        servers |= {f"{name}{BOUNDED}": partial(peer, name, chosen.peer_python, True) for name in PEERS}

    def cell(name: str, load: float) -> dict[str, Any]:
        return measure(servers[name](), load, chosen.duration)

    record = harness.fill_record(
        chosen.record, {f"{name} @ {load}": partial(cell, name, load) for name, load in product(servers, LOADS)}
    )
    harness.save_table(chosen.record, f"Overload, {PROFILE}, time-out 1 s", table(record))


if __name__ == "__main__":
    main()
