"""The worker of a model: what its deaths, hangs and ends do to the calls."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from policies.types import SpecError
from server.errors import WorkerDiedError
from server.workers.remote_model import RemoteModel, open_model
from server.workers.worker import Lane

CODE = """
import ctypes, dataclasses, os, threading, time
import numpy as np
from batchwright import Model, Tensor

@dataclasses.dataclass
class Label:
    label: str
    score: float

class Mine(Model):
    inputs = {"x": Tensor("FP32", [2])}
    outputs = {"y": Tensor("FP32", [2])}
    max_batch_size = 8

    def load(self, device):
        self.thread = threading.get_ident()

    def samples(self):
        return [{"x": np.ones(2, np.float32)}]

    def run(self, x):
        assert self.thread == threading.get_ident()
        value = x[0, 0]
        if value == 1:
            ctypes.string_at(0)
        if value == 2:
            os._exit(7)
        if value == 3:
            time.sleep(60)
        if value == 4:
            raise KeyError("four")
        return {"y": 2 * x}

    def decode(self, body, content_type):
        if body == b"crash":
            time.sleep(0.2)
            ctypes.string_at(0)
        if body == b"slow":
            time.sleep(60)
        time.sleep(0.01)
        value = self.thread > 0 if body == b"loaded" else float(body)
        return {"x": np.full(2, value, np.float32)}

    def render(self, outputs):
        return Label("none", 0.0) if outputs["y"][0] == 0 else lambda: 1
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[RemoteModel]:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    model = open_model(f"{file}:Mine")
    yield model
    model.worker.close()


def batch(value: float, size: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(2, value, np.float32)} for _ in range(size)]


def run(lane: Lane, inputs: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    rows: list[dict[str, np.ndarray]] = lane.call("serve", inputs, 0, None, [])[0]
    return rows


def ended(pid: int) -> bool:
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_the_main_process_has_the_description_and_not_the_file(model: RemoteModel, tmp_path: Path) -> None:
    assert (type(model).__name__, model.max_batch_size, model.torch, model.inputs["x"].shape) == (
        "Mine",
        8,
        False,
        (2,),
    )
    assert model.samples()[0]["x"].tolist() == [1, 1]
    assert not any(str(tmp_path) in name for name in sys.modules)
    lane = model.worker.load("loading m", "cpu", "auto")
    rows = run(lane, batch(5))
    assert [row["y"].tolist() for row in rows] == [[10, 10]] * 3
    assert model.decode(b"3", "").samples[0]["x"].tolist() == [3, 3]


@pytest.mark.parametrize(("value", "how"), [(1, "was killed by SIGSEGV"), (2, "ended with exit code 7")])
def test_a_crash_is_the_error_of_its_batch_and_the_next_process_serves(
    model: RemoteModel, value: float, how: str
) -> None:
    lane = model.worker.load("loading m", "cpu", "auto")
    with pytest.raises(WorkerDiedError, match=how):
        run(lane, batch(value))
    with pytest.raises(WorkerDiedError):
        run(lane, batch(5))
    again = model.worker.batches()
    assert len(run(again, batch(5))) == 3
    assert model.worker.restarts == 1
    assert how in str(model.worker.last_fault)


def test_an_exception_leaves_the_process_and_names_the_line(model: RemoteModel) -> None:
    lane, pid = model.worker.load("loading m", "cpu", "auto"), model.worker.pid
    with pytest.raises(KeyError, match="'four'") as caught:
        run(lane, batch(4))
    line = 1 + CODE.splitlines().index('            raise KeyError("four")')
    assert vars(caught.value)["place"] == f"mine.py line {line}"
    assert len(run(lane, batch(5))) == 3
    assert model.worker.pid == pid


def test_a_batch_that_hangs_fails_when_its_process_is_replaced(model: RemoteModel) -> None:
    lane = model.worker.load("loading m", "cpu", "auto")
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(run, lane, batch(3))
        time.sleep(0.1)
        model.worker.replace(lane.process)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            hung.result(10)
    model.worker.replace(lane.process)  # another runs by now, or none
    again = model.worker.batches()
    assert len(run(again, batch(5))) == 3


@pytest.mark.slow
def test_an_input_that_ends_the_process_while_it_is_decoded_fails_alone(model: RemoteModel) -> None:
    with ThreadPoolExecutor(8) as pool:
        bad = pool.submit(model.decode, b"crash", "")
        good = [pool.submit(model.decode, b"%d" % number, "") for number in range(60)]
        assert [each.result(30).samples[0]["x"][0] for each in good] == [*range(60)]
        with pytest.raises(WorkerDiedError, match="SIGSEGV"):
            bad.result(30)


def test_what_render_returns_arrives_as_json_and_what_is_none_is_an_error(model: RemoteModel) -> None:
    assert model.render({"y": np.zeros(2)}) == {"label": "none", "score": 0.0}
    with pytest.raises(TypeError, match="not JSON serializable"):
        model.render({"y": np.ones(2)})
    assert model.decode(b"3", "").samples[0]["x"].tolist() == [3, 3]


def test_a_process_that_died_between_two_calls_is_loaded_again_before_the_next(model: RemoteModel) -> None:
    model.worker.load("loading m", "cpu", "auto")
    assert model.decode(b"loaded", "").samples[0]["x"].tolist() == [1, 1]
    pid = model.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert model.decode(b"loaded", "").samples[0]["x"].tolist() == [1, 1]
    lane = model.worker.batches()
    assert model.worker.pid != pid
    assert len(run(lane, batch(5))) == 3


def test_a_worker_that_is_closed_starts_no_process_any_more(model: RemoteModel) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(model.decode, b"slow", "")
        time.sleep(0.2)
        model.worker.close()
        with pytest.raises(WorkerDiedError):
            slow.result(10)
    with pytest.raises(WorkerDiedError, match="unloaded"):
        model.decode(b"1", "")


def test_a_load_that_hangs_ends_when_the_worker_is_closed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        CODE.replace("        self.thread =", "        time.sleep(60)\n        self.thread =")
    )
    model = open_model(f"{tmp_path}/mine.py:Mine")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(model.worker.load, "loading m", "cpu", "auto")
        time.sleep(0.3)
        model.worker.close()
        with pytest.raises(WorkerDiedError):
            loading.result(10)


def test_a_file_that_ends_its_process_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(SpecError, match=r"mine.py:Mine: the model's process ended with exit code 5 while the file was"):
        open_model(f"{tmp_path}/mine.py:Mine")


def test_a_process_that_the_model_has_forked_keeps_no_call_waiting_and_ends_with_it(tmp_path: Path) -> None:
    code = CODE.replace(
        "        self.thread =", "        if os.fork() == 0:\n            time.sleep(60)\n        self.thread ="
    )
    (tmp_path / "mine.py").write_text(code)
    model = open_model(f"{tmp_path}/mine.py:Mine")
    lane = model.worker.load("loading m", "cpu", "auto")
    assert model.worker.pid is not None
    (forked,) = psutil.Process(model.worker.pid).children()
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(run, lane, batch(3))
        time.sleep(0.1)
        model.worker.replace(lane.process)
        with pytest.raises(WorkerDiedError):
            hung.result(10)
    assert ended(forked.pid)
    model.worker.close()


def test_a_closed_worker_ends_and_so_does_one_that_nothing_refers_to(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    for close in (True, False):
        model = open_model(f"{tmp_path}/mine.py:Mine")
        pid = model.worker.pid
        assert pid is not None
        if close:
            model.worker.close()
        del model
        assert ended(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_a_worker_ends_with_the_process_that_started_it(how: signal.Signals | None, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    program = (
        "import sys, threading\nfrom server.workers.remote_model import open_model\nmodels = []\n"
        f"def start():\n    models.append(open_model({str(tmp_path / 'mine.py:Mine')!r}))\n"
        "thread = threading.Thread(target=start)\nthread.start()\nthread.join()\n"
        "print(models[0].worker.pid, models[0].decode(b'1', '').samples[0]['x'][0], flush=True)\nsys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        pid, decoded = process.stdout.readline().split()
        assert decoded == "1.0", "it lives on after the thread that asked for it"
        if how is not None:
            os.kill(process.pid, how)
        process.stdin.close()
    assert ended(int(pid))


def test_calls_of_many_threads_use_threads_of_the_worker(model: RemoteModel) -> None:
    lock, found = threading.Lock(), []

    def call(number: int) -> None:
        value = model.decode(b"%d" % number, "").samples[0]["x"][0]
        with lock:
            found.append((number, value))

    with ThreadPoolExecutor(16) as pool:
        [*pool.map(call, range(200))]
    assert sorted(found) == [(number, number) for number in range(200)]
    assert model.worker.restarts == 0
