"""Signals to all processes of a server with gateways, as systemd sends them, and at the start."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.support.harness import serving
from server.gateways.setup import FLEET_SOCKET
from tests.support.http_client import fetch
from tests.system.test_lifecycle import READY
from tests.system.test_serve import infer, pixels, queue_length, until

_GATEWAY = "import batchwright.commands; from server.app.gateway import main; main()"


@pytest.mark.parametrize("supervisor_first", [True, False])
def test_sigterm_to_all_processes_answers_accepted_calls(tmp_path: Path, supervisor_first: bool) -> None:
    slow = tmp_path / "slow.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1.0, 1.0]}
    slow.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "slow", **sizes}))
    arguments = ("--policy", "static:32,max_wait_ms=inf", "--gateways", "2", "--drain-delay-s", "0.5")
    with serving("googlenet", "--device", f"emulated:{slow}", *arguments) as server, ThreadPoolExecutor() as pool:
        supervisor = psutil.Process(server.process.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(4)]
        until(lambda: queue_length(server) == 4)
        for process in processes if supervisor_first else reversed(processes):
            process.terminate()
        until(lambda: fetch(server.url, READY).status == 503)
        assert [future.result().status for future in waiting] == [200] * 4
        assert server.process.wait(timeout=30) == 0


@contextmanager
def gateway(folder: Path) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """A gateway without a serving process, and the end of the pipe that its supervisor would hold."""
    alive, held = os.pipe()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        passed = bound.fileno(), os.open(os.devnull, os.O_RDWR), alive
        command = [sys.executable, "-c", _GATEWAY, str(folder), "1", *map(str, passed)]
        with subprocess.Popen(command, pass_fds=passed, stderr=subprocess.PIPE, text=True) as process:
            for descriptor in passed[1:]:
                os.close(descriptor)
            yield process, held


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_gateway_that_waits_for_the_serving_process_ends_with_the_supervisor_alone(
    tmp_path: Path, number: signal.Signals
) -> None:
    with socket.socket(socket.AF_UNIX) as silent, gateway(tmp_path) as (process, held):
        silent.bind(str(tmp_path / FLEET_SOCKET))
        silent.listen()
        connection, _ = silent.accept()
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.close(held)
        _, log = process.communicate(timeout=20)
        connection.close()
    assert (process.returncode, log) == (0, "")


def test_a_gateway_whose_supervisor_is_gone_when_it_starts_ends_without_a_traceback(tmp_path: Path) -> None:
    with gateway(tmp_path) as (process, held):
        os.close(held)
        _, log = process.communicate(timeout=20)
    assert (process.returncode, log) == (0, "")
