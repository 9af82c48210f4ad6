"""The real server in front of other servers: answers, faults, and servers that die and return under requests."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.harness import Server, run_json, serving
from tests.support.fake_upstream import FakeUpstream, Inference, error, metadata, upstream
from tests.support.http_client import Response, fetch
from tests.support.triton import infer
from tests.system.test_faults import until


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def fake() -> Iterator[FakeUpstream]:
    with upstream() as running:
        yield running


def predict(server: Server, *values: float) -> Response:
    return fetch(server.url, "/predict/m", json.dumps({"inputs": {"x": values}}).encode())


def status(server: Server, path: str) -> int:
    return fetch(server.url, path).status


def ready(server: Server) -> bool:
    return {status(server, path) for path in ("/v2/health/ready", "/v2/models/m/ready")} == {200}


def refuse_negative(call: Inference) -> Any:
    return error(422, "a negative number") if (call.floats() < 0).any() else call.echo()


def test_answers_are_those_of_the_other_server_which_needs_no_torch(fake: FakeUpstream) -> None:
    with serving(f"m={fake.spec}", "--policy", "timeout:2") as server:
        values = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        np.testing.assert_array_equal(infer(server.url, "m", x=values)["out_x"], values)
        answer = predict(server, 1.0, 2.5).json
        assert (answer["outputs"], answer["energy_source"]) == ({"out_x": [1.0, 2.5]}, "none")
        loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in loaded
        metadata = fetch(server.url, "/v2/models/m").json
        assert (metadata["platform"], metadata["inputs"][0]["shape"]) == ("oip", [-1, 2])
        assert server.by_label("batchwright_device_up", "device") == {fake.device: 1.0}
        report = run_json("generate-load", server.url, "--rate", "50", "--duration", "2")
        assert report["ok"] == report["scheduled"] > 0
    assert max(fake.batches) <= 8


def test_a_sample_that_the_other_server_refuses_fails_alone(fake: FakeUpstream) -> None:
    with serving(f"m={fake.spec}", "--policy", "timeout:20") as server:
        fake.reply = refuse_negative
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda n: predict(server, -n if n % 6 == 5 else n, 0), range(24)))
        for n, answer in enumerate(answers):
            if n % 6 == 5:
                assert answer.status == 400
                assert answer.json == {"error": "echo answered 422: a negative number"}
            else:
                assert answer.json["outputs"] == {"out_x": [n, 0]}
        fake.reply = lambda call: error(500, "out of order")
        answer = predict(server, 1, 1)
        assert (answer.status, answer.json["error"]) == (500, "echo answered 500: out of order")
        fake.reply = lambda call: (200, {}, b"{}")
        answer = predict(server, 1, 1)
        assert answer.status == 500
        assert "the response of echo is not valid: KeyError" in answer.json["error"]
        assert ready(server)
        faults = server.by_label("batchwright_device_faults_total", "error")
        assert faults.keys() == {"ModelError"}, "what the other server refuses is no fault of it"
        fake.reply = lambda call: error(503, "busy")
        answer = predict(server, 1, 1)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        fake.reply = Inference.echo
        until(lambda: predict(server, 1, 1).status == 200)


class Clients:
    """Four clients that call in a closed loop until they are stopped; what they saw."""

    def __init__(self, server: Server, call: Callable[[Server, int], Response]) -> None:
        self.seen: list[tuple[int, Any]] = []
        self._server, self._call = server, call
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(4)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, n: int) -> None:
        while not self._stop.is_set():
            answer = self._call(self._server, n)
            right = answer.status != 200 or answer.json["outputs"] == {"out_x": [n, 1]}
            retry = answer.headers.get("retry-after")
            self.seen.append((answer.status if right else -1, retry))
            if answer.status != 200:
                self._stop.wait(0.02)

    def statuses(self) -> Counter[tuple[int, Any]]:
        return Counter(self.seen)


def test_a_server_that_is_killed_and_restarted_under_requests(fake: FakeUpstream) -> None:
    with serving(f"m={fake.spec}", "--policy", "greedy") as server:
        with Clients(server, lambda server, n: predict(server, n, 1)) as clients:
            for _ in range(3):
                until(lambda: ready(server))
                fake.stop()
                until(lambda: status(server, "/v2/models/m/ready") == status(server, "/v2/health/ready") == 503)
                assert status(server, "/v2/health/live") == 200
                assert server.total("batchwright_device_up") == 0.0
                live = fetch(server.url, "/live?model=m").json
                assert (live["status"], live["devices"][0]["up"]) == ("unavailable", False)
                fake.start()
                until(lambda: ready(server))
            before = len(clients.seen)
            until(lambda: len(clients.seen) > before + 20)
        seen = clients.statuses()
        assert seen.keys() == {(200, None), (503, "1")}, seen
        assert {each for each, _ in clients.seen[-4:]} == {200}
        assert server.process.poll() is None


def test_a_server_that_dies_while_idle_is_noticed_and_its_return_too(fake: FakeUpstream) -> None:
    with serving(f"m={fake.spec}", "--policy", "greedy") as server:
        assert ready(server)
        fake.drop_connections()
        assert predict(server, 1, 1).status == 200
        fake.ready = 400
        until(lambda: not ready(server))
        body = json.dumps({"inputs": {"x": [1, 1]}}).encode()
        answer = fetch(server.url, "/predict/m", body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["error"] == f"{fake.device} does not answer for now; send the request again"
        fake.ready = 200
        until(lambda: ready(server))
        fake.stop()
        until(lambda: not ready(server))


def test_of_two_servers_one_is_killed_and_no_call_is_lost(fake: FakeUpstream) -> None:
    with upstream() as other, serving(f"m={fake.spec},{other.spec[4:]}", "--policy", "greedy") as server:
        with Clients(server, lambda server, n: predict(server, n, 1)) as clients:
            for victim in (fake, other, fake):
                before = len(clients.seen)
                until(lambda before=before: len(clients.seen) > before + 20)  # type: ignore[misc]
                victim.stop()
                until(lambda: server.total("batchwright_device_up") == 1.0)
                assert ready(server)
                victim.start()
                until(lambda: server.total("batchwright_device_up") == 2.0)
        assert clients.statuses().keys() == {(200, None)}
        assert min(server.by_label("batchwright_batches_total", "device").values()) > 0


def test_a_call_that_hangs_longer_than_the_batch_timeout(fake: FakeUpstream) -> None:
    release = threading.Event()

    def hang(call: Inference) -> Any:
        release.wait(30)
        return call.echo()

    with serving(f"m={fake.spec}", "--policy", "greedy", "--hung-after-s", "0.3") as server:
        fake.reply = hang
        answer = predict(server, 1, 1)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        fake.reply = Inference.echo
        until(lambda: predict(server, 1, 1).status == 200)
        assert "BatchTimeoutError" in server.by_label("batchwright_device_faults_total", "error")
        release.set()


def test_profile_model_measures_through_it_and_the_server_uses_that_profile(fake: FakeUpstream, tmp_path: Path) -> None:
    profile = run_json("profile-model", f"m={fake.spec}", "--quick", "--energy-time", "0")
    assert (profile["device"], profile["batch_size"][-1]) == (fake.device, 8)
    assert f"http://127.0.0.1:{fake.port}/echo, fake, version 1" in profile["note"]
    (cached,) = tmp_path.glob("batchwright/profiles/*")
    with serving(f"m={fake.spec}") as server:
        policy = fetch(server.url, "/admin/models/m/policy").json
        assert policy["profile"] == profile["name"]
    assert [*tmp_path.glob("batchwright/profiles/*")] == [cached]


def test_profile_model_needs_one_server(fake: FakeUpstream) -> None:
    with pytest.raises(RuntimeError, match="names 2 servers; name one here"):
        run_json("profile-model", f"m={fake.spec},{fake.spec[4:]}", "--quick")
    with pytest.raises(RuntimeError, match="no meter 'gpu'; give cpu, cuda:N or none"):
        run_json("profile-model", f"m={fake.spec}", "--quick", "--meter", "gpu")
    with pytest.raises(RuntimeError, match="m runs on another server, not on --device cpu; leave it out"):
        run_json("profile-model", f"m={fake.spec}", "--quick", "--device", "cpu")
    with pytest.raises(RuntimeError, match="--meter cpu is for a model of another server, oip:URL; leave it out"):
        run_json("profile-model", "googlenet", "--quick", "--meter", "cpu")


def test_a_model_that_another_server_has_replaced_is_loaded_again(fake: FakeUpstream) -> None:
    with serving(f"m={fake.spec}", "--policy", "timeout:2") as server:
        fake.stop()
        until(lambda: not ready(server))
        fake.metadata = metadata(x=("FP32", [-1, 3]))
        fake.start()
        assert predict(server, 1, 2).status == 503, "its signature is another one"
        assert fetch(server.url, "/v2/repository/models/m/load", b"").status == 200
        until(lambda: ready(server))
        assert predict(server, 1, 2, 3).json["outputs"] == {"out_x": [1, 2, 3]}
        fake.metadata = {"inputs": 3}
        answer = fetch(server.url, "/v2/repository/models/m/load", b"")
        assert answer.status == 400
        assert answer.json["error"].endswith("; the model in service stays")
        assert predict(server, 1, 2, 3).json["outputs"] == {"out_x": [1, 2, 3]}


def test_a_model_that_only_one_of_two_servers_has_replaced_is_not_loaded(fake: FakeUpstream) -> None:
    with upstream() as other, serving(f"m={fake.spec},{other.spec[4:]}", "--policy", "timeout:2") as server:
        fake.stop()
        fake.metadata = metadata(x=("FP32", [-1, 3]))
        fake.start()
        answer = fetch(server.url, "/v2/repository/models/m/load", b"")
        assert answer.status == 400
        assert "m differs between" in answer.json["error"]
        assert predict(server, 1, 2).json["outputs"] == {"out_x": [1, 2]}
        other.metadata = fake.metadata
        assert fetch(server.url, "/v2/repository/models/m/load", b"").status == 200
        assert predict(server, 1, 2, 3).json["outputs"] == {"out_x": [1, 2, 3]}
