"""The threads of a model on the CPU follow the machine: fewer while other work takes a processor."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from policies.cpus import available_cpus
from tests.support.http_client import fetch
from tests.support.logged_server import LoggedServer, logged_server

CODE = """
import time, torch
from pathlib import Path
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {{"x": Tensor("FP32", [1])}}
    outputs = {{"y": Tensor("FP32", [1])}}
    max_batch_size = 2
    def run(self, x):
        waits_for_others = torch.get_num_threads() == {cpus} and Path({taken!r}).exists()
        time.sleep(0.05 if waits_for_others else 0.002 if torch.get_num_threads() == {cpus} else 0.005)
        return {{"y": 2 * x}}
"""


@pytest.mark.slow
@pytest.mark.skipif(available_cpus() == 1, reason="there is one number of threads only")
def test_a_model_uses_fewer_threads_while_all_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    taken, cpus = tmp_path / "taken", available_cpus()
    (tmp_path / "mine.py").write_text(CODE.format(cpus=cpus, taken=str(taken)))

    def call_until_logged(server: LoggedServer, text: str) -> None:
        while not server.logged(text):
            answer = fetch(server.url, "/predict", json.dumps({"inputs": {"x": [1.0]}}).encode())
            assert answer.json["outputs"]["y"] == [2.0]

    with logged_server(tmp_path, f"mine={tmp_path}/mine.py:Mine", "--device", "cpu") as server:
        assert server.logged(f"mine: {cpus} threads; one request alone takes")
        call_until_logged(server, "mine: the learned profile is cached")
        taken.touch()
        call_until_logged(server, f"threads instead of {cpus}; one request alone takes")


COSTLY = """
import time, torch
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {{"x": Tensor("FP32", [1])}}
    outputs = {{"y": Tensor("FP32", [1])}}
    max_batch_size = 2
    def run(self, x):
        takes, whole = (0.050, 0.050) if torch.get_num_threads() == {cpus} else (0.010, 0.075)
        ended, cpu = time.monotonic() + whole, time.thread_time() + takes
        while time.thread_time() < cpu:
            pass
        time.sleep(max(0.0, ended - time.monotonic()))
        return {{"y": 2 * x}}
"""


@pytest.mark.slow
@pytest.mark.skipif(available_cpus() == 1, reason="there is one number of threads only")
def test_a_model_with_a_bound_uses_the_threads_that_save_cpu_time_while_the_rate_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(COSTLY.format(cpus=available_cpus()))
    flags = ("--device", "cpu", "--slo-p95-ms", "500")
    with logged_server(tmp_path, f"mine={tmp_path}/mine.py:Mine", *flags) as server:
        body = json.dumps({"inputs": {"x": [1.0]}}).encode()

        def call(_: int = 0) -> None:
            assert fetch(server.url, "/predict", body).json["outputs"]["y"] == [2.0]

        while not server.logged("which take less CPU time; one request alone takes"):
            call()
            time.sleep(0.2)
        saving = int(server.logged("which take less CPU time")[-1]["event"].split(" threads instead of")[0].split()[-1])
        with ThreadPoolExecutor(16) as pool:
            while not server.logged(f"threads instead of {saving}; one request alone takes"):
                [*pool.map(call, range(64))]
