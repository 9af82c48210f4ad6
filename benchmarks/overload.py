"""Overload: what comes out when more comes in than the device can do, ours beside peers on the same emulated device.

Poisson arrivals in an open loop, pictures of 1 KB so that the client is not what limits, a time-out of 1 s: given to
ours by X-Timeout-Ms with each call, to a peer by its own setting for all calls. Goodput counts answers within 1 s of
the scheduled arrival. A peer reads the same bytes without decoding them: `--peer-python` is an interpreter that has
mosec and litserve.
"""

import argparse
import base64
import io
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from PIL import Image

from benchmarks.processes import Watch, held
from benchmarks.serving import RECORDS, free_port, load, save, serving
from loadgen.client import Response, RunLog, offer, open_session
from policies.profile import load_profile
from policies.queue import arrivals

PROFILE = "googlenet-tesla-p4-x10"
LOADS = (0.9, 1.2, 2.0, 5.0)
OURS = ("greedy", "smdp:w2=16")
PEERS = ("mosec", "litserve")
TIMEOUT = 1.0  # s
_PATIENCE = 1.5  # s after which the client hangs up, so that a server's own 504 can still arrive
_NAME = "overload"


def picture() -> bytes:
    """A JPEG of about 1 KB."""
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8))
    buffer = io.BytesIO()
    coarse.resize((48, 48), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


@dataclass(frozen=True)
class Poster:
    """Sends the same body again and again; see loadgen.client.Sender."""

    session: aiohttp.ClientSession
    url: str
    body: bytes
    headers: dict[str, str]

    async def send(self) -> Response:
        """One exchange."""
        async with self.session.post(self.url, data=self.body, headers=self.headers) as response:
            await response.read()
            return Response(response.status)


@dataclass(frozen=True)
class Target:
    """A server under load: its process, and what to send where."""

    pid: int
    url: str
    body: bytes
    headers: dict[str, str]


@contextmanager
def ours(policy: str) -> Iterator[Target]:
    """Our server under a policy."""
    with serving("googlenet", "--device", f"emulated:{PROFILE}", "--policy", policy) as server:
        headers = {"Content-Type": "image/jpeg", "X-Timeout-Ms": str(round(1e3 * TIMEOUT))}
        yield Target(server.process.pid, f"{server.url}/predict", picture(), headers)


@contextmanager
def peer(name: str, python: str) -> Iterator[Target]:
    """A peer's server in a session of its own, so that nothing of it stays behind."""
    port = free_port()
    wait = str(round(1e3 * TIMEOUT)) if name == "mosec" else str(TIMEOUT)
    script = Path(__file__).parent / "peers" / f"{name}_server.py"
    times = json.dumps(load_profile(PROFILE).service_times)
    process = subprocess.Popen(
        [python, str(script), "--port", str(port), "--timeout", wait],
        env=os.environ | {"SERVICE_TIMES": times},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    jpeg = picture()
    encoded = json.dumps({"image": base64.b64encode(jpeg).decode()}).encode()
    path, body, kind = {
        "mosec": ("/inference", jpeg, "image/jpeg"),
        "litserve": ("/predict", encoded, "application/json"),
    }[name]
    target = Target(process.pid, f"http://127.0.0.1:{port}{path}", body, {"Content-Type": kind})
    try:
        _await_answer(target, process)
        yield target
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_answer(target: Target, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        request = urllib.request.Request(target.url, target.body, target.headers)
        try:
            urllib.request.urlopen(request, timeout=5).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"{target.url} did not become ready")


async def _offer(target: Target, rate: float, duration: float) -> RunLog:
    log = RunLog()
    instants = arrivals.poisson(rate, duration, np.random.default_rng(1))
    async with open_session(_PATIENCE) as session:
        await offer(Poster(session, target.url, target.body, target.headers), instants, log)
    return log


def measure(target: Target, load_: float, duration: float) -> dict[str, Any]:
    """One cell: a short warm-up, then that many seconds of load."""
    capacity = load_profile(PROFILE).capacity
    uvloop.run(_offer(target, 0.5 * capacity, 2.0))
    before = held(target.pid)
    with Watch(target.pid) as watch:
        log = uvloop.run(_offer(target, load_ * capacity, duration))
    after = held(target.pid)
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
        "rss_mb": {"before": before.rss_mb, "peak": watch.peak, "after": after.rss_mb},
        "send_lag_p99_ms": float(lag),
        "duration_s": duration,
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown; refused: 503 and 429, expired: 504 and 408, other: all else that is no good answer."""
    lines = [
        "| server | load | offered /s | goodput /s | of capacity | refused /s | expired /s | other /s "
        "| p50 ms | p99 ms | RSS MB before, peak, after |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, cell in record.items():
        name, load_ = key.split(" @ ")
        counts = {status: n / cell["duration_s"] for status, n in cell["statuses"].items()}
        refused = counts.pop("503", 0.0) + counts.pop("429", 0.0)
        expired = counts.pop("504", 0.0) + counts.pop("408", 0.0)
        other = cell["late_hz"] + sum(rate for status, rate in counts.items() if status != "200")
        times = " | ".join("-" if cell[p] is None else f"{cell[p]:.0f}" for p in ("p50_ms", "p99_ms"))
        memory = ", ".join(f"{megabytes:.0f}" for megabytes in cell["rss_mb"].values())
        lines.append(
            f"| {name} | {load_} | {cell['offered_hz']:.0f} | {cell['goodput_hz']:.0f} "
            f"| {cell['goodput_over_capacity']:.2f} | {refused:.0f} | {expired:.0f} "
            f"| {other:.0f} | {times} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fill the record cell by cell; a cell that stands in it is not measured again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of load a cell")
    parser.add_argument("--peer-python", help="an interpreter with mosec and litserve; without it only ours")
    parser.add_argument("--record", default=_NAME, help="name of the record")
    chosen = parser.parse_args()
    record = load(chosen.record)
    for name in (*OURS, *(PEERS if chosen.peer_python else ())):
        for load_ in LOADS:
            key = f"{name} @ {load_}"
            if key in record:
                continue
            print(f"measuring {key}", flush=True)
            server: AbstractContextManager[Target] = ours(name) if name in OURS else peer(name, chosen.peer_python)
            with server as target:
                record[key] = measure(target, load_, chosen.duration)
            save(chosen.record, record)
    (RECORDS / f"{chosen.record}.md").write_text(f"# Overload, {PROFILE}, time-out 1 s\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
