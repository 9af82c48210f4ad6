"""Each fault of the device, with the real server process under benchmarks/servers/fault_injection.py."""

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
from tests.support.http_client import Reply, ask

_RAW = {"Inference-Header-Content-Length": "0"}
POISON, NOT_A_NUMBER = b"POISON", b"NOTNUM"


@dataclass(frozen=True)
class Drill:
    server: Server
    orders: Path

    def order(self, text: str) -> None:
        order_fault(self.orders, text)

    def infer(self, data: bytes) -> Reply:
        return ask(self.server.url, "/v2/models/googlenet/infer", data, headers=_RAW)


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


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.005)


def together(drill: Drill, bodies: list[bytes]) -> list[Reply]:
    """All of them in one batch: the policy waits for just so many."""
    change = f'{{"policy": "static:{len(bodies)},max_wait_ms=inf"}}'.encode()
    assert ask(drill.server.url, "/admin/models/googlenet/policy", change, "PUT").status == 200
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(drill.infer, bodies))


def test_faults_that_a_server_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with drill(tmp_path, monkeypatch, "--policy", "greedy") as running_drill:
        good = [pixels(seed) for seed in range(12)]
        alone = [running_drill.infer(body).body[-4000:] for body in good]

        poisoned = together(running_drill, [*good, pixels(90, POISON), pixels(91, NOT_A_NUMBER)])
        assert [reply.status for reply in poisoned] == [200] * 12 + [500, 500]
        assert [reply.body[-4000:] for reply in poisoned[:12]] == alone, "everybody got their own answer"
        assert poisoned[12].json["error"] == "the device failed on this input alone, with ValueError"
        assert "NotFiniteError" in poisoned[13].json["error"]

        running_drill.order("error:1")
        shaken = together(running_drill, good)
        assert [reply.body[-4000:] for reply in shaken] == alone, "an error that passes costs nobody an answer"

        running_drill.order("oom:4")
        tight = together(running_drill, good)
        assert [reply.body[-4000:] for reply in tight] == alone
        policy = ask(running_drill.server.url, "/admin/models/googlenet/policy").json
        assert policy["spec"] == "greedy", "twelve at once can never be served again"
        again = together(running_drill, good[:3])
        assert [reply.body[-4000:] for reply in again] == alone[:3]
        refused = ask(running_drill.server.url, "/admin/models/googlenet/policy", b'{"policy": "static:4"}', "PUT")
        assert refused.status == 400, "three was the largest batch that fitted"
        assert "3" in refused.json["error"]
        faults = running_drill.server.metric("batchwright_device_faults_total")
        assert faults['{error="OutOfMemoryError",model="googlenet"}'] >= 1
        assert ask(running_drill.server.url, "/v2/health/live").status == 200


@pytest.mark.parametrize("order", ["hang", "lost"])
def test_a_lost_device_answers_everybody_503_and_ends_the_server_for_its_supervisor(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--policy", "static:5,max_wait_ms=inf", "--hung-after-s", "1")
    with drill(tmp_path, monkeypatch, *arguments) as running_drill, ThreadPoolExecutor() as pool:
        running_drill.order(order)
        calls: list[Future[Reply]] = [pool.submit(running_drill.infer, pixels(seed)) for seed in range(5)]
        replies = [call.result() for call in calls]
        assert [reply.status for reply in replies] == [503] * 5
        assert all(reply.headers["retry-after"] for reply in replies)
        assert running_drill.server.process.wait(timeout=30) == 3
