"""Processes of a server with gateways: start, stop, and what happens when one is killed or hangs."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from benchmarks.servers.fault_injection import order_fault
from benchmarks.support.harness import Server, serving
from tests.support.fork_server import run_serve_model
from tests.support.gateway_processes import LoggedServer, gateways, logged_server, processes, serving_process, until
from tests.support.http_client import fetch, photograph
from tests.system.test_lifecycle import READY, stop_under_load
from tests.system.test_serve import EMULATED, infer, pixels

TWO = ("--policy", "greedy", "--gateways", "2")
NEVER = ("--policy", "static:32,max_wait_ms=inf", "--gateways", "2")


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, which servers leave empty; its path is short enough for sockets."""
    with TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)
        until(lambda: not [*Path(name).glob("batchwright-*")])


def gone(left: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in left)


class Client:
    """A client that calls in a loop on new connections, and counts what it sees."""

    def __init__(self, server: Server) -> None:
        self.seen: Counter[int | str] = Counter()
        self.last: int | str = 0
        self._server = server
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                answer = infer(self._server.url, pixels())
                self.last = answer.status
                if answer.status == 503:
                    assert answer.headers["retry-after"]
            except (OSError, http.client.HTTPException) as error:
                self.last = type(error).__name__
            self.seen[self.last] += 1

    def stop(self) -> "Counter[int | str]":
        self._stopped.set()
        self._thread.join(60)
        return self.seen


def test_a_gateway_that_is_killed_costs_only_its_own_connections_and_is_started_again(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, *TWO, "--log-level", "debug") as server:
        serving_at = serving_process(server)
        clients = [Client(server) for _ in range(4)]
        for _ in range(3):
            found = gateways(server)
            assert len(found) == 2
            before = len(server.logged("slots"))
            found[0].kill()
            until(lambda f=found: len(now := gateways(server)) == 2 and f[0] not in now)  # type: ignore[misc]
            until(lambda b=before: len(server.logged("slots")) > b)  # type: ignore[misc]  # it is connected
        seen = Counter[int | str]()
        for client in clients:
            seen += client.stop()
        assert seen[200] > 50
        assert sum(count for key, count in seen.items() if key != 200) <= 3 * 4 * 2, seen
        assert not seen[503]
        assert serving_process(server) == serving_at
        assert len(server.logged("was killed by signal 9; it is started again")) == 3
        check_slots(server)


def check_slots(server: LoggedServer) -> None:
    """Check that all slots become free when there are no calls."""

    def latest() -> dict[str, int]:
        return {line["event"]: line["free"] for line in server.logged("slots")}

    most = max(line["free"] for line in server.logged("slots"))
    until(lambda: set(latest().values()) == {most})


def test_a_serving_process_that_is_killed_is_started_again_while_gateways_answer_503(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, *TWO, "--log-level", "debug") as server:
        before = gateways(server)
        for kill in range(2):
            clients = [Client(server) for _ in range(4)]
            until(lambda c=clients: all(each.seen[200] > 5 for each in c))  # type: ignore[misc]
            killed = serving_process(server)
            killed.kill()
            until(lambda: fetch(server.url, READY).status == 503)
            for path, body in (("/predict", photograph()), ("/v2", None), ("/metrics", None)):
                answer = fetch(server.url, path, body)
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert "does not answer for now" in answer.json["error"]
            assert fetch(server.url, "/v2/health/live").status == 200, "the supervisor starts it again"
            until(lambda: fetch(server.url, READY).status == 200)
            until(lambda c=clients: all(each.last == 200 for each in c))  # type: ignore[misc]
            for client in clients:
                assert set(client.stop()) == {200, 503}
            assert serving_process(server) != killed
            assert gateways(server) == before
            assert fetch(server.url, "/v2").status == 200
            until(lambda k=kill: len(server.logged("ready on")) == k + 2)  # type: ignore[misc]
        check_slots(server)


def test_all_processes_end_when_the_supervisor_is_killed(temporary: Path) -> None:
    with serving(*EMULATED, *TWO, "--drain-delay-s", "600") as server:
        left = processes(server)
        assert len(left) == 3
        client = Client(server)
        until(lambda: client.seen[200] > 5)
        server.process.kill()
        until(lambda: gone(left))
        client.stop()
        assert not [*temporary.iterdir()]


def test_a_gateway_that_hangs_does_not_stop_others() -> None:
    with serving(*EMULATED, *TWO) as server:
        hung, other = gateways(server)
        hung.suspend()
        try:
            seen = set()
            for _ in range(20):
                try:
                    seen.add(fetch(server.url, "/v2/health/live").status)
                    seen.add(infer(server.url, pixels()).status)
                except TimeoutError:  # a connection that it accepted before
                    continue
            assert seen == {200}
            assert other.is_running()
        finally:
            hung.resume()


def test_a_server_ends_although_a_gateway_hangs(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, *TWO, module="tests.support.short_stop_timeout") as server:
        left = processes(server)
        gateways(server)[0].suspend()
        server.process.terminate()
        assert server.process.wait(60) == 0
        until(lambda: gone(left))


def test_sigterm_answers_accepted_calls_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    slow = tmp_path / "slow.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1.0, 1.0]}
    slow.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "slow", **sizes}))
    with serving("googlenet", "--device", f"emulated:{slow}", *NEVER) as server, ThreadPoolExecutor(16) as pool:
        left = processes(server)
        assert len([*temporary.iterdir()]) == 1
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(10)]
        until(lambda: server.total("batchwright_queue_length") == 10)
        server.process.terminate()
        until(lambda: fetch(server.url, READY).status == 503)
        rejected = infer(server.url, pixels())
        assert (rejected.status, rejected.headers["connection"]) == (503, "close")
        assert rejected.headers["retry-after"]
        assert fetch(server.url, "/v2/models/googlenet/ready").status == 503
        assert [future.result().status for future in waiting] == [200] * 10
        assert server.process.wait(timeout=30) == 0
        assert gone(left)


@pytest.mark.parametrize(("delay", "think"), [("0", 0.0), ("0.5", 0.1)])
def test_a_drain_under_load_breaks_no_connection(delay: str, think: float) -> None:
    with serving(*EMULATED, *TWO, "--drain-delay-s", delay) as server:
        assert all(set(answered) <= {200, 503} for answered in stop_under_load(server, think))
        assert server.process.wait(timeout=60) == 0


def test_calls_are_served_during_the_drain_delay_which_a_second_signal_ends() -> None:
    with serving(*EMULATED, *TWO, "--drain-delay-s", "600") as server:
        left = processes(server)
        server.process.terminate()
        until(lambda: fetch(server.url, READY).status == 503)
        assert infer(server.url, pixels()).status == 200
        assert fetch(server.url, "/v2").status == 200
        assert fetch(server.url, "/v2/health/live").status == 200
        server.process.terminate()
        assert server.process.wait(timeout=15) == 0
        assert gone(left)


def test_an_interrupt_has_no_drain_delay() -> None:
    with serving(*EMULATED, *TWO, "--drain-delay-s", "600") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=15) == 0


def test_an_unfinished_upload_does_not_delay_the_exit_after_a_second_signal() -> None:
    with serving(*EMULATED, *TWO) as server, socket.socket() as connection:
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        server.process.terminate()
        until(lambda: fetch(server.url, READY).status == 503)
        time.sleep(1.5)
        server.process.terminate()
        assert server.process.wait(timeout=8) == 0


def test_a_signal_while_the_serving_process_starts_again_ends_the_server(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, *TWO) as server:
        left = processes(server)
        serving_process(server).kill()
        until(lambda: server.logged("the serving process was killed by signal 9"))
        server.process.terminate()
        assert server.process.wait(timeout=15) in (0, 143)
        assert gone(left)


def test_a_signal_before_the_server_is_ready_ends_all_processes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli", *EMULATED, *TWO, "--port", "0"], stderr=subprocess.DEVNULL
    ) as process:
        started = Server("", process)
        until(lambda: process.poll() is not None or len(processes(started)) == 3)
        left = processes(started)
        process.terminate()
        assert process.wait(15) in (0, 143)
        until(lambda: gone(left))


def test_the_loss_of_the_device_ends_the_server_with_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fault"
    monkeypatch.setenv("DRILL_FILE", str(file))
    order_fault(file, "none")
    with logged_server(tmp_path, *EMULATED, *TWO, module="benchmarks.servers.fault_injection") as server:
        left = processes(server)
        assert infer(server.url, pixels()).status == 200
        order_fault(file, "lost")
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(infer, server.url, pixels()) for _ in range(2)]
            assert {answer.result().status for answer in answers} <= {500, 503}
        assert server.process.wait(timeout=30) == 3
        until(lambda: gone(left))


def test_bad_settings_are_reported_in_one_line_by_the_command_itself(temporary: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_serve_model(*EMULATED, *TWO, "--port", port)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        done = run_serve_model(*EMULATED, "--gateways", "2", "--port", port, "--policy", "clever", BATCHWRIGHT_HOTS="x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    for part in ("clever", "BATCHWRIGHT_HOTS", "cannot listen on"):
        assert part in done.stderr
    done = run_serve_model(*EMULATED, "--gateways", "2", "--port", "0", "--policy", "clever")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = run_serve_model(*EMULATED, "--gateways", "65")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gateways" in done.stderr


def test_a_folder_that_is_no_good_for_sockets_is_reported(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    done = run_serve_model(*EMULATED, *TWO, "--port", "0", TMPDIR=str(long))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "set TMPDIR to a shorter one" in done.stderr


def test_a_hang_up_ends_a_server_without_files_to_reload() -> None:
    with serving(*EMULATED, *TWO) as server:
        left = processes(server)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(10) == -signal.SIGHUP
        until(lambda: gone(left))


def test_a_server_that_others_reach_without_a_key_warns(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, *TWO, "--host", "0.0.0.0") as server:
        assert len(server.logged("clients that reach 0.0.0.0 need no key")) == 1


def test_modules_of_the_current_directory_shadow_nothing(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    command = str(Path(sys.executable).with_name("serve-model"))
    if not os.access(command, os.X_OK):
        pytest.skip("the package is not installed")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([command, *EMULATED, *TWO, "--port", "0"], cwd=tmp_path, stderr=log)
    started = LoggedServer("", process, tmp_path / "log")
    try:
        until(lambda: process.poll() is not None or started.logged("ready on"))
        assert process.poll() is None, (tmp_path / "log").read_text()
    finally:
        process.terminate()
        process.wait(30)
