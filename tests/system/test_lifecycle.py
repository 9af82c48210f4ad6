"""The server process: errors at its start, draining and signals."""

import http.client
import json
import pickle
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.harness import Server, command_line, serving
from tests.support.fork_server import run_serve_model, start_process
from tests.support.http_client import fetch, photograph
from tests.system.test_serve import EMULATED, infer, pixels, queue_length, until

READY = "/v2/health/ready"


def test_all_errors_are_reported_in_one_line_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("prot: 1\nqueue_capacity: 4\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_serve_model(
            *("googlenet", "resnet18", "--device", "emulated:googlenet-tesla-p4", "--port", port),
            *("--policy", "clever", "--policy", "resnet18=static:64", "--policy", "alexnet=greedy"),
            *("--profile", "nowhere", "--config", str(file)),
            BATCHWRIGHT_PROT="1",
            BATCHWRIGHT_HOTS="x",
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("serve-model: ")
    assert done.stderr.count("\n") == 1
    for part in (
        "BATCHWRIGHT_HOTS",
        "BATCHWRIGHT_PROT",
        "prot",
        "alexnet",
        "nowhere",
        f"cannot listen on 127.0.0.1:{port}",
    ):
        assert part in done.stderr, part


def test_a_pickle_with_code_is_rejected_and_not_executed(tmp_path: Path) -> None:
    trace = tmp_path / "executed"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    plain, zipped = tmp_path / "plain.pt", tmp_path / "zipped.pt"
    plain.write_bytes(pickle.dumps({"weight": Malicious()}))
    torch.save({"weight": Malicious()}, zipped)
    for weights in (plain, zipped):
        done = run_serve_model("squeezenet1_1", "--device", "cpu", "--port", "0", "--weights", str(weights))
        assert done.returncode == 2
        assert "cannot be read" in done.stderr.splitlines()[-1]
        assert not any("Traceback" in line for line in done.stderr.splitlines())
        assert not trace.exists()


def test_without_weights_and_network_no_server_starts(tmp_path: Path) -> None:
    offline = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    done = run_serve_model("squeezenet1_1", "--device", "cpu", "--port", "0", **offline)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("serve-model: no weights for squeezenet1_1: the download failed (")
    assert "put https://download.pytorch.org/models/squeezenet1_1-" in line
    assert f".pth into {tmp_path / 'hub' / 'checkpoints'}, or give --weights FILE, or --weights random" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_profile_is_measured_ends_the_server(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = (*command_line("serve-model"), "squeezenet1_1", "--device", "cpu", "--weights", "random", "--port", "0")
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = start_process((*line, "--profile-first"), stderr.fileno())
    try:
        until(lambda: "measuring a quick profile" in log.read_text())
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60.0) == code
    finally:
        process.kill()
    rest = log.read_text().partition("measuring a quick profile")[2]
    assert "terminate" not in rest
    assert ("interrupted before the server was ready" in rest) == (number == signal.SIGINT)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """An emulated device whose batches take 30 s."""
    file = tmp_path / "slow.json"
    sizes = {"batch_size": [1, 2], "service_time_s": [30.0, 30.0]}
    file.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "slow", **sizes}))
    return f"emulated:{file}"


def test_during_the_drain_delay_calls_are_served_while_readiness_is_503() -> None:
    with serving(*EMULATED, "--policy", "greedy", "--drain-delay-s", "3") as server:
        assert fetch(server.url, READY).status == 200
        server.process.send_signal(signal.SIGTERM)
        until(lambda: fetch(server.url, READY).status == 503)
        assert fetch(server.url, "/predict", photograph()).status == 200
        assert infer(server.url, pixels()).status == 200
        assert fetch(server.url, "/v2/models/googlenet/ready").status == 503
        assert fetch(server.url, "/v2/repository/index", b"").json[0]["state"] == "UNAVAILABLE"
        assert fetch(server.url, "/v2/health/live").status == 200
        assert server.process.wait(timeout=30) == 0


def stop_under_load(server: Server, think: float) -> list[Counter[int]]:
    """Send SIGTERM to a server while clients call, and return the numbers of answers that each got by status.

    A client calls on one keep-alive connection until a 503 or a refused connection. One whose connection breaks raises.
    """
    answered = [Counter[int]() for _ in range(16)]
    with ThreadPoolExecutor(len(answered)) as pool:
        clients = [pool.submit(_call_until_refused, server.url, think, each) for each in answered]
        until(lambda: all(each[200] > 1 for each in answered) or any(client.done() for client in clients))
        server.process.terminate()
        for client in clients:
            client.result()
    return answered


def _call_until_refused(url: str, think: float, answered: Counter[int]) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    while not answered[503]:
        try:
            connection.request("POST", "/predict", photograph())
        except ConnectionRefusedError:
            break
        response = connection.getresponse()
        response.read()
        answered[response.status] += 1
        time.sleep(think)
    connection.close()


@pytest.mark.parametrize(("delay", "think"), [("0", 0.0), ("0", 0.1), ("0.2", 0.0), ("0.2", 0.1)])
def test_a_drain_under_load_breaks_no_connection(delay: str, think: float) -> None:
    for _ in range(2):
        with serving(*EMULATED, "--policy", "greedy", "--drain-delay-s", delay) as server:
            assert all(set(answered) <= {200, 503} for answered in stop_under_load(server, think))
            assert server.process.wait(timeout=60) == 0


def test_an_unfinished_upload_does_not_delay_the_exit_after_a_second_signal() -> None:
    with serving(*EMULATED, "--policy", "greedy") as server, socket.socket() as connection:
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: fetch(server.url, READY).status == 503)
        time.sleep(1.5)  # the drain is over and only this connection is open
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=8) == 0, "less than the shutdown timeout of 10 s"


def test_a_second_signal_ends_the_drain_delay() -> None:
    with serving(*EMULATED, "--policy", "greedy", "--drain-delay-s", "600") as server:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: fetch(server.url, READY).status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0


def test_sigint_has_no_drain_delay() -> None:
    with serving(*EMULATED, "--policy", "greedy", "--drain-delay-s", "600") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) == 0


def test_a_second_signal_ends_the_drain(slow: str) -> None:
    arguments = ("googlenet", "--device", slow, "--policy", "serial")  # one request is in service, the other waits
    with serving(*arguments) as server, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(infer, server.url, pixels()) for _ in range(2)]
        until(lambda: queue_length(server) == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: fetch(server.url, READY).status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
        assert {future.result().status for future in waiting} == {503}
