"""Models loaded again and unloaded while the real server serves."""

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.reload import reload_under_load
from benchmarks.support.harness import Server, serving
from tests.support.http_client import Response, fetch

MODEL = """
import time
from batchwright import Model, Tensor
from neighbour import FACTOR
class Mine(Model):
    inputs = {"x": Tensor("FP32", [SIZE])}
    outputs = {"y": Tensor("FP32", [SIZE])}
    max_batch_size = 4
    def load(self, device):
        LOAD
    def run(self, x):
        time.sleep(0.002)
        return {"y": x * FACTOR}
"""


def write(folder: Path, factor: float, size: int = 1, load: str = "pass") -> None:
    (folder / "neighbour.py").write_text(f"FACTOR = {factor}\n")
    (folder / "model.py").write_text(MODEL.replace("SIZE", str(size)).replace("LOAD", load))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models' files."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with two_models(folder) as running:
            yield running


@pytest.fixture
def server(shared: Server, folder: Path) -> Server:
    """A server whose models are loaded, with the policy of the start."""
    write(folder, 1.0)
    assert load(shared).status == 200
    shared.set_policy("mine", "greedy")
    return shared


@contextmanager
def two_models(folder: Path) -> Iterator[Server]:
    write(folder, 1.0)
    other = folder / "other"
    other.mkdir()
    (other / "beside.py").write_text(
        MODEL.replace("neighbour", "constant").replace("SIZE", "1").replace("LOAD", "pass")
    )
    (other / "constant.py").write_text("FACTOR = 7.0\n")
    models = (f"mine={folder}/model.py:Mine", f"other={other}/beside.py:Mine")
    with serving(*models, "--device", "cpu", "--policy", "greedy") as running:
        yield running


def load(server: Server, model: str = "mine", verb: str = "load", body: bytes = b"") -> Response:
    return fetch(server.url, f"/v2/repository/models/{model}/{verb}", body)


def predict(server: Server, x: list[float], model: str = "mine") -> Response:
    return fetch(server.url, f"/predict/{model}", json.dumps({"inputs": {"x": x}}).encode())


def y(response: Response) -> object:
    return response.json["outputs"]["y"]


def test_a_model_and_its_neighbours_are_read_again(server: Server, folder: Path) -> None:
    assert y(predict(server, [3])) == [3.0]
    for factor in (2.0, 3.0, 4.0):  # within one second, and of the same length: compiled code must not be taken
        (folder / "neighbour.py").write_text(f"FACTOR = {factor}\n")
        assert load(server).status == 200
        assert y(predict(server, [3])) == [3 * factor]
    assert y(predict(server, [3], "other")) == [21.0]
    assert load(server, "other").status == 200
    assert y(predict(server, [3], "other")) == [21.0]


def test_another_signature_is_used_from_the_swap_on(server: Server, folder: Path) -> None:
    former = fetch(server.url, "/live?model=mine").json["id"]
    write(folder, 2.0, size=2)
    assert load(server).status == 200
    assert y(predict(server, [1, 2])) == [2.0, 4.0]
    assert fetch(server.url, "/v2/models/mine").json["inputs"][0]["shape"] == [-1, 2]
    assert predict(server, [1]).status == 400
    form, state = (fetch(server.url, f"/live{path}?model=mine").json for path in ("/form", ""))
    assert form["id"] == state["id"] != former, "the page fetches the form again"


@pytest.mark.parametrize(
    ("write_it", "error"),
    [
        (lambda folder: (folder / "model.py").write_text("x ="), "SyntaxError"),
        (lambda folder: (folder / "model.py").unlink(), "no file"),
        (
            lambda folder: write(folder, 2.0, load="raise OSError('no weights')"),
            "loading mine failed: model.py line 1",
        ),
        (
            lambda folder: (folder / "neighbour.py").write_text("FACTOR = None"),
            "a batch of 1 failed: model.py line 13",
        ),
        (
            lambda folder: (folder / "neighbour.py").write_text("raise KeyboardInterrupt"),
            "mine is not loaded: it raised KeyboardInterrupt",
        ),
    ],
)
def test_a_broken_model_leaves_the_former_one_in_service(
    server: Server, folder: Path, write_it: object, error: str
) -> None:
    write_it(folder)  # type: ignore[operator]
    answer = load(server)
    assert answer.status == 400
    assert error in answer.json["error"]
    assert answer.json["error"].endswith("; the model in service stays")
    assert y(predict(server, [3])) == [3.0]
    write(folder, 5.0)
    assert load(server).status == 200
    assert y(predict(server, [3])) == [15.0]


def test_a_model_that_hangs_while_it_is_loaded_holds_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path, 1.0)
    flags = ("--device", "cpu", "--policy", "greedy", "--hung-after-s", "2")
    with serving(f"mine={tmp_path}/model.py:Mine", *flags) as server:
        (tmp_path / "neighbour.py").write_text(
            "import time\nclass Hangs:\n    __array_priority__ = 99\n"
            "    def __rmul__(self, x):\n        time.sleep(60)\nFACTOR = Hangs()\n"
        )
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(load, server)
            while not loading.done():
                began = time.monotonic()
                assert y(predict(server, [3])) == [3.0]
                assert time.monotonic() - began < 2, "it waited for the batch that hangs"
                time.sleep(0.02)
        assert loading.result().status == 400
        assert "a batch of 1 failed: it did not end within 2 s" in loading.result().json["error"]
        assert y(predict(server, [3])) == [3.0]


def test_with_replace_the_former_process_ends_before_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pids, code = tmp_path / "pids", MODEL.replace("SIZE", "1").replace("from neighbour import FACTOR", "FACTOR = 2.0")
    alone = f"import os; others = [p for p in open({str(pids)!r}).read().split() if os.path.exists('/proc/' + p)]"
    note = f"{alone}; assert not others, others; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')"
    pids.touch()
    (tmp_path / "model.py").write_text(code.replace("LOAD", note))
    with serving(
        f"mine={tmp_path}/model.py:Mine", "--device", "cpu", "--policy", "greedy", "--reload", "replace"
    ) as one:
        assert y(predict(one, [3])) == [6.0]
        assert load(one).status == 200
        assert y(predict(one, [3])) == [6.0]
        assert len(pids.read_text().split()) == 2
        (tmp_path / "model.py").write_text(code.replace("LOAD", "raise ValueError"))
        assert load(one).status == 400
        assert (predict(one, [3]).status, fetch(one.url, "/v2/models/mine/ready").status) == (503, 503)


def test_the_server_stops_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with two_models(tmp_path) as server:
        write(tmp_path, 2.0, load="time.sleep(60)")
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(load, server)
            time.sleep(0.5)
            assert y(predict(server, [3])) == [3.0]
            assert not loading.done()
            server.process.terminate()
            assert server.process.wait(20) == 0
            answer = loading.result()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "the server is stopping" in answer.json["error"]


def test_unloading_rejects_new_calls_and_loading_serves_again(server: Server) -> None:
    def rejections() -> list[float]:
        outcomes, reasons = (server.metric(f"batchwright_{name}_total") for name in ("requests", "rejected"))
        rejected = outcomes.get('{model="mine",outcome="rejected"}', 0.0)
        return [rejected, reasons.get('{model="mine",reason="unloaded"}', 0.0)]

    before = rejections()
    assert load(server, verb="unload", body=b'{"parameters": {"unload_dependents": false}}').status == 200
    assert load(server, verb="unload").status == 200, "again"
    rejected = predict(server, [3])
    assert rejected.status == 503
    assert rejected.json == {"error": "mine is unloaded; load it by POST /v2/repository/models/mine/load"}
    assert rejections() == [count + 1 for count in before], "it has not failed"
    index = fetch(server.url, "/v2/repository/index", b"").json
    assert [(each["name"], each["state"], each["reason"]) for each in index] == [
        ("mine", "UNAVAILABLE", "unloaded"),
        ("other", "READY", ""),
    ]
    assert fetch(server.url, "/v2/models/mine/ready").status == 503
    assert fetch(server.url, "/v2/models/other/ready").status == 200
    assert fetch(server.url, "/live?model=mine").json["status"] == "unloaded", "the page goes on"
    assert fetch(server.url, "/live?model=other").json["status"] == "ready"
    assert y(predict(server, [3], "other")) == [21.0]
    assert load(server).status == 200
    assert y(predict(server, [3])) == [3.0]


def test_a_body_that_is_sent_slowly_is_served_by_the_model_that_admitted_it(server: Server, folder: Path) -> None:
    body = b'{"inputs": {"x": [3]}}'
    head = b"POST /predict/mine HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow:
        slow.sendall(head + body[:5])
        time.sleep(0.2)
        write(folder, 2.0)
        for factor in (2.0, 4.0):
            (folder / "neighbour.py").write_text(f"FACTOR = {factor}\n")
            assert load(server).status == 200
            assert y(predict(server, [3])) == [3 * factor]
        slow.sendall(body[5:])
        answer = slow.recv(2000)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"y":[3.0]' in answer


def test_a_policy_that_was_set_meanwhile_stays(server: Server) -> None:
    path = "/admin/models/mine/policy"
    assert fetch(server.url, path, b'{"policy": "static:3,max_wait_ms=5"}', "PUT").status == 200
    assert load(server).status == 200
    assert fetch(server.url, path).json["spec"] == "static:3,max_wait_ms=5"


@pytest.mark.parametrize(
    ("model", "body", "status", "error"),
    [
        (
            "unknown",
            b"",
            404,
            "no model 'unknown'; the server's configuration lists mine, other",
        ),
        ("mine", b'{"parameters": {"config": "{}"}}', 400, "send none"),
        ("mine", b'{"parameters": 3}', 400, "send none"),
        ("mine", b"[]", 400, "send none"),
        ("mine", b"x" * 2000, 413, "send none"),
    ],
)
def test_bad_calls_change_nothing(server: Server, model: str, body: bytes, status: int, error: str) -> None:
    for verb in ("load", "unload"):
        answer = load(server, model, verb, body)
        assert answer.status == status
        assert error in answer.json["error"]
    assert y(predict(server, [3])) == [3.0]


def test_loading_needs_the_admin_scope(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [f"{scope} {scope} {hashlib.sha256(scope.encode()).hexdigest()}" for scope in ("predict", "admin")]
    keys.write_text("\n".join(lines))
    write(tmp_path, 1.0)
    emulated = ("--device", "emulated:googlenet-tesla-p4")
    with serving(f"mine={tmp_path}/model.py:Mine", *emulated, "--api-key-file", str(keys)) as server:
        for key, status in (("predict", 403), ("admin", 200)):
            for verb in ("load", "unload", "load"):
                path, headers = f"/v2/repository/models/mine/{verb}", {"Authorization": f"Bearer {key}"}
                assert fetch(server.url, path, b"", headers=headers).status == status
        assert fetch(server.url, "/v2/repository/models/mine/load", b"").status == 401
    with serving(f"mine={tmp_path}/model.py:Mine", *emulated) as server:
        foreign = {"Origin": "http://evil.example"}
        assert fetch(server.url, "/v2/repository/models/mine/unload", b"", headers=foreign).status == 403


@pytest.mark.slow
def test_nothing_is_lost_when_models_are_loaded_again_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("benchmarks.reload._RATE", 50.0)  # two fifths of the calls, which take most of the time
    record = reload_under_load(2, pause=0.5)
    for part in ("measured_profile", "given_profile"):
        assert record[part]["sent"] == record[part]["answered"], part
        assert record[part]["versions_answered"] == 3
        assert record[part]["old_after_new"] == 0
    broken = record["broken_and_unloaded"]
    assert broken["broken_file"]["status"] == 400
    assert broken["while_unloaded"].keys() == {"503"}
    assert all(broken[part].keys() == {"200"} for part in ("before_unload", "after_load", "other"))
