"""Processes of models: what their deaths do to a server under load, and what the main process has of them."""

import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.support.harness import Server, running, serving
from tests.support.http_client import fetch, photograph
from tests.support.logged_server import logged_server, until

CODE = """
import ctypes, os, time
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}
    max_batch_size = 8
    def samples(self):
        return [self.decode(b"1", ""), self.decode(b"2", "")]
    def run(self, x):
        time.sleep(0.002)
        if (x < 0).any():
            ctypes.string_at(0)
        return {"y": 2 * x}
    def decode(self, body, content_type):
        import numpy
        if body == b"crash":
            ctypes.string_at(0)
        return {"x": numpy.array([float(body)], numpy.float32)}
    def render(self, outputs):
        return float(outputs["y"][0])
"""
FLAGS = ("--device", "cpu", "--policy", "greedy")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(CODE)
    return tmp_path


def worker(server: Server, model: str) -> dict[str, Any]:
    (device,) = fetch(server.url, "/admin/devices").json
    found: dict[str, Any] = device["models"][model]
    return found


def test_a_process_that_is_killed_under_load_costs_no_call_and_a_poisonous_input_fails_alone(folder: Path) -> None:
    with serving(f"one={folder}/one.py:Mine", f"two={folder}/two.py:Mine", *FLAGS) as server:
        before = {model: worker(server, model) for model in ("one", "two")}
        assert before["one"]["pid"] != before["two"]["pid"]
        stop = time.monotonic() + 6.0

        def client(number: int) -> Counter[tuple[int, bool]]:
            ends = Counter[tuple[int, bool]]()
            model = ("one", "two")[number % 2]
            while time.monotonic() < stop:
                answer = fetch(server.url, f"/predict/{model}", b"%d" % number)
                right = answer.status == 200 and answer.json["outputs"] == 2.0 * number
                ends[answer.status, right] += 1
            return ends

        with ThreadPoolExecutor(10) as pool:
            clients = [pool.submit(client, number) for number in range(1, 9)]
            time.sleep(0.5)
            os.kill(before["one"]["pid"], signal.SIGKILL)
            time.sleep(2.0)
            poison = [pool.submit(fetch, server.url, "/predict/one", body) for body in (b"-1", b"crash")]
            ends = sum((each.result() for each in clients), Counter[tuple[int, bool]]())
        assert ends.keys() == {(200, True)}
        assert [each.result().status for each in poison] == [500, 500]
        assert all("WorkerDiedError" in each.result().json["error"] for each in poison)
        after = {model: worker(server, model) for model in ("one", "two")}
        kept = ("pid", "restarts", "last_fault")
        assert [after["two"][key] for key in kept] == [before["two"]["pid"], 0, None]
        assert after["one"]["restarts"] >= 3
        assert after["one"]["last_fault"] == "was killed by SIGSEGV"
        assert server.by_label("batchwright_worker_restarts_total", "reason")["died"] >= 3


def test_the_main_process_never_imports_the_file_and_workers_end_with_it(folder: Path) -> None:
    (folder / "one.py").write_text(
        f"import os\nopen({str(folder / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\n{CODE}"
    )
    with logged_server(folder, f"one={folder}/one.py:Mine", *FLAGS, "--gateways", "2") as server:
        pid = worker(server, "one")["pid"]
        assert {int(line) for line in (folder / "pids").read_text().split()} == {pid}
        assert pid != server.process.pid
        assert psutil.Process(pid).ppid() == server.process.pid
        assert server.logged("--gateways 2 has no effect")
        server.process.kill()
        until(lambda: not psutil.pid_exists(pid))


LISTING = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: open({file!r}, "w").write("\\n".join([*sys.modules, ""])))
from batchwright.commands import serve_model
serve_model()
"""


def test_the_main_process_imports_neither_torch_nor_a_users_file_and_a_network_that_dies_is_loaded_again(
    folder: Path,
) -> None:
    code = LISTING.format(file=str(folder / "modules"))
    models = "squeezenet1_1", f"one={folder}/one.py:Mine"
    with running(sys.executable, "-c", code, *models, *FLAGS, "--weights", "random") as server:
        picture = fetch(server.url, "/predict/squeezenet1_1", photograph()).json["predictions"]
        assert fetch(server.url, "/predict/one", b"3").json["outputs"] == 6.0
        pid = worker(server, "squeezenet1_1")["pid"]
        os.kill(pid, signal.SIGKILL)
        assert fetch(server.url, "/predict/squeezenet1_1", photograph()).json["predictions"] == picture
        after = worker(server, "squeezenet1_1")
        assert (after["restarts"], after["last_fault"], after["pid"] != pid) == (1, "was killed by SIGKILL", True)
        os.kill(server.process.pid, signal.SIGUSR1)
        until(lambda: (folder / "modules").exists() and (folder / "modules").read_text().endswith("\n"))
        modules = {name.partition(".")[0] for name in (folder / "modules").read_text().split()}
        assert {"server", "uvicorn"} <= modules
        assert modules.isdisjoint({"torch", "torchvision", "transformers", "onnxruntime", "one"})
