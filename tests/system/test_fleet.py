"""One real server process with two emulated devices of different speed."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.fault_injection import order_fault
from benchmarks.support.harness import Server, running
from policies.profile import load_profile
from tests.support.http_client import Response, fetch
from tests.system.test_faults import pixels, until

FAST = "googlenet-tesla-p4-x10"


@dataclass(frozen=True)
class Pair:
    """A server with a fast and a slow device, and the files that inject faults into each."""

    server: Server
    orders: tuple[Path, Path]
    pool: ThreadPoolExecutor

    def infer(self, seed: int) -> Response:
        raw = {"Inference-Header-Content-Length": "0"}
        return fetch(self.server.url, "/v2/models/googlenet/infer", pixels(seed), headers=raw)

    def load(self, calls: int) -> list[Response]:
        """Send calls, sixteen at a time."""
        return list(self.pool.map(self.infer, range(calls)))

    def serve(self, index: int, serving: bool) -> Response:
        body = json.dumps({"serving": serving}).encode()
        return fetch(self.server.url, f"/admin/devices/{index}", body, "PUT")

    def devices(self) -> Any:
        return fetch(self.server.url, "/admin/devices").json

    def batches(self) -> list[float]:
        """Return the number of batches of the fast device and of the slow one."""
        counted = self.server.metric("batchwright_batch_size_count")
        return [next(n for labels, n in counted.items() if kind in labels) for kind in (FAST, "slow.json")]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    fast = load_profile(FAST)
    slow = tmp_path / "slow.json"
    slow.write_text(replace(fast, name="slow", service_times=tuple(2.0 * t for t in fast.service_times)).to_json())
    orders = tmp_path / "orders"
    monkeypatch.setenv("DRILL_FILE", str(orders))
    device = f"emulated:{FAST},emulated:{slow}"
    command = [
        sys.executable,
        "-m",
        "benchmarks.servers.fault_injection",
        "googlenet",
        "--device",
        device,
        "--policy",
        "greedy",
    ]
    with running(*command) as server, ThreadPoolExecutor(17) as pool:
        yield Pair(server, (orders, tmp_path / "orders.1"), pool)


def test_a_device_is_taken_out_of_service_and_back_under_load_without_failed_calls(pair: Pair) -> None:
    assert {reply.status for reply in pair.load(64)} == {200}
    assert min(pair.batches()) > 0, "both serve"

    concurrent = pair.pool.submit(lambda: [pair.infer(n) for n in range(40)])
    taken = pair.serve(1, False)
    assert (taken.status, taken.json["serving"], taken.json["up"]) == (200, False, True)
    until(lambda: pair.devices()[1]["open_calls"] == 0)
    before = pair.batches()
    assert {reply.status for reply in [*pair.load(64), *concurrent.result()]} == {200}
    after = pair.batches()
    assert after[0] > before[0]
    assert after[1] == before[1], "it gets no new calls"
    rejected = pair.serve(0, False)
    assert rejected.status == 400
    assert "is the last device that serves" in rejected.json["error"]

    assert pair.serve(1, True).json["serving"] is True
    assert {reply.status for reply in pair.load(64)} == {200}
    assert pair.batches()[1] > after[1]


def test_a_lost_device_fails_no_call_and_the_last_one_ends_the_process(pair: Pair) -> None:
    alone = [reply.body[-4000:] for reply in map(pair.infer, range(64))]
    order_fault(pair.orders[0], "lost")
    after_loss = pair.load(64)
    assert {reply.status for reply in after_loss} == {200}
    assert [reply.body[-4000:] for reply in after_loss] == alone, "each call got its own result"
    assert [(device["up"], device["serving"]) for device in pair.devices()] == [(False, False), (True, True)]
    assert sorted(pair.server.metric("batchwright_device_up").values()) == [0.0, 1.0]
    assert fetch(pair.server.url, "/v2/health/ready").status == 200

    swapped = fetch(pair.server.url, "/admin/models/googlenet/policy", b'{"policy": "smdp:w2=1"}', "PUT").json
    assert swapped["profile"] == "slow", "of the first serving device"
    assert [policy["spec"] for policy in swapped["devices"].values()] == ["smdp:w2=1"] * 2

    order_fault(pair.orders[1], "lost")
    assert pair.infer(0).status == 503
    assert pair.server.process.wait(timeout=30) == 3
