"""Device faults, injected into a real server process by benchmarks/servers/fault_injection.py."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.servers.fault_injection import order_fault
from benchmarks.support.harness import Server, running
from tests.support.http_client import Response, fetch

_RAW = {"Inference-Header-Content-Length": "0"}
POISON, NOT_A_NUMBER = b"POISON", b"NOTNUM"


@dataclass(frozen=True)
class Drill:
    server: Server
    orders: Path

    def order(self, text: str) -> None:
        order_fault(self.orders, text)

    def infer(self, data: bytes) -> Response:
        return fetch(self.server.url, "/v2/models/googlenet/infer", data, headers=_RAW)


@contextmanager
def drill(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Iterator[Drill]:
    orders = folder / "orders"
    monkeypatch.setenv("DRILL_FILE", str(orders))
    command = [
        sys.executable,
        "-m",
        "benchmarks.servers.fault_injection",
        "googlenet",
        "--device",
        "emulated:googlenet-tesla-p4",
    ]
    with running(*command, *arguments) as server:
        yield Drill(server, orders)


def pixels(seed: int, begins: bytes = b"") -> bytes:
    drawn = np.random.default_rng(seed).integers(0, 256, 224 * 224 * 3, np.uint8).tobytes()
    return begins + drawn[len(begins) :]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def together(drill: Drill, bodies: list[bytes]) -> list[Response]:
    """Send all bodies in one batch, by a static policy of that batch size."""
    change = f'{{"policy": "static:{len(bodies)},max_wait_ms=inf"}}'.encode()
    assert fetch(drill.server.url, "/admin/models/googlenet/policy", change, "PUT").status == 200
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(drill.infer, bodies))


def test_faults_that_the_server_recovers_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with drill(tmp_path, monkeypatch, "--policy", "greedy") as running_drill:
        valid = [pixels(seed) for seed in range(12)]
        alone = [running_drill.infer(body).body[-4000:] for body in valid]

        poisoned = together(running_drill, [*valid, pixels(90, POISON), pixels(91, NOT_A_NUMBER)])
        assert [reply.status for reply in poisoned] == [200] * 12 + [500, 500]
        assert [reply.body[-4000:] for reply in poisoned[:12]] == alone, "each call got its own result"
        assert poisoned[12].json["error"] == "the model failed on this input alone, with ValueError"
        assert "NotFiniteError" in poisoned[13].json["error"]

        running_drill.order("error:1")
        after_error = together(running_drill, valid)
        assert [reply.body[-4000:] for reply in after_error] == alone, "a transient error fails no call"

        running_drill.order("oom:4")
        after_oom = together(running_drill, valid)
        assert [reply.body[-4000:] for reply in after_oom] == alone
        policy = fetch(running_drill.server.url, "/admin/models/googlenet/policy").json
        assert policy["spec"] == "greedy", "batches of twelve no longer fit"
        again = together(running_drill, valid[:3])
        assert [reply.body[-4000:] for reply in again] == alone[:3]
        rejected = fetch(running_drill.server.url, "/admin/models/googlenet/policy", b'{"policy": "static:4"}', "PUT")
        assert rejected.status == 400, "the largest batch that fits is three"
        assert "3" in rejected.json["error"]
        faults = running_drill.server.metric("batchwright_device_faults_total")
        assert faults['{error="OutOfMemoryError",model="googlenet"}'] >= 1
        assert fetch(running_drill.server.url, "/v2/health/live").status == 200


@pytest.mark.parametrize("order", ["hang", "lost"])
def test_a_lost_device_answers_all_calls_503_and_ends_the_process_with_code_3(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--policy", "static:5,max_wait_ms=inf", "--hung-after-s", "1")
    with drill(tmp_path, monkeypatch, *arguments) as running_drill, ThreadPoolExecutor() as pool:
        running_drill.order(order)
        calls: list[Future[Response]] = [pool.submit(running_drill.infer, pixels(seed)) for seed in range(5)]
        replies = [call.result() for call in calls]
        assert [reply.status for reply in replies] == [503] * 5
        assert all(reply.headers["retry-after"] for reply in replies)
        assert running_drill.server.process.wait(timeout=30) == 3
