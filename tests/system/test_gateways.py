"""A server with gateways behaves like one without."""

import gzip
import hashlib
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.harness import Server, command_line, running, serving
from tests.support.certificates import certificate, install
from tests.support.gateway_processes import gateways, logged_server, processes, until
from tests.support.http_client import Response, fetch, photograph
from tests.system.test_reload import load, predict, write, y
from tests.system.test_security import KEYS, POLICY, ROOT, USER, exchange
from tests.system.test_serve import EMULATED, infer, outcomes, pixels

TWO = ("--gateways", "2")
INFER = "/v2/models/googlenet/infer"
RAW = {"Inference-Header-Content-Length": "0"}
VARYING = {"waiting_ms", "service_ms", "arrival_rate_hz"}  # facts of responses


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "greedy", *TWO) as running:
        yield running


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    """The same server without gateways."""
    with serving(*EMULATED, "--policy", "greedy", "--gateways", "0") as running:
        yield running


def comparable(response: Response, url: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body, without what differs from one request to the next."""
    headers = {name: value for name, value in response.headers.items() if name not in ("x-request-id", "date")}
    text = response.body.decode("latin-1").replace(url, "URL").replace(" (refitted)", "")  # as on a busy machine
    if response.headers.get("content-encoding") == "gzip" and "inference-header-content-length" in headers:
        text = gzip.decompress(response.body).decode("latin-1")
    for fact in VARYING:
        text = re.sub(rf'"{fact}":[\d.e+-]+', f'"{fact}":0', text)
    for length in ("content-length", "inference-header-content-length"):
        if '"service_ms"' in text or '"arrival_rate_hz"' in text:
            headers.pop(length, None)
    return response.status, headers, text


def bytes_tensor(*elements: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in elements)


def call(data: bytes, n: int = 1, datatype: str = "UINT8", **fields: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a binary infer call."""
    shape = [n] if datatype == "BYTES" else [n, 224, 224, 3]
    entry = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    document = json.dumps({"inputs": [entry], **fields}).encode()
    return document + data, {"Inference-Header-Content-Length": str(len(document))}


FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' + photograph() + b"\r\n--x--"
AS_JSON = json.dumps(
    {"inputs": [{"name": "image", "shape": [1, 224, 224, 3], "datatype": "UINT8", "data": [7] * 150_528}]}
).encode()
CLASSES = [{"name": "logits", "parameters": {"classification": 3}}]
BINARY = {"binary_data_output": True}
REQUESTS: dict[str, tuple[str, str, bytes | None, dict[str, str]]] = {
    "jpeg": ("POST", "/predict", photograph(), {}),
    "jpeg of a named model": ("POST", "/predict/googlenet", photograph(), {}),
    "multipart": ("POST", "/predict", FORM, {"Content-Type": "multipart/form-data; boundary=x"}),
    "gzip": ("POST", "/predict", gzip.compress(photograph()), {"Content-Encoding": "gzip"}),
    "raw pixels": ("POST", INFER, pixels(), RAW),
    "raw picture": ("POST", INFER, photograph(), RAW),
    "binary": ("POST", INFER, *call(pixels(n=3), 3, id="7")),
    "binary answer": ("POST", INFER, *call(pixels(), parameters=BINARY)),
    "version": ("POST", "/v2/models/googlenet/versions/1/infer", *call(pixels())),
    "json": ("POST", INFER, AS_JSON, {}),
    "bytes": ("POST", INFER, *call(bytes_tensor(photograph(), photograph()), 2, "BYTES")),
    "classification": ("POST", INFER, *call(pixels(), outputs=CLASSES)),
    "packed answer": ("POST", INFER, pixels(), RAW | {"Accept-Encoding": "gzip"}),
    "query": ("POST", "/predict?x=1", photograph(), {}),
    "no picture": ("POST", "/predict", b"no picture", {}),
    "no body": ("POST", "/predict", b"", {}),
    "no json": ("POST", INFER, b"{", {}),
    "another input": ("POST", INFER, *call(pixels(), inputs=[])),
    "no model": ("POST", "/predict/alexnet", b"x", {}),
    "no model of the protocol": ("POST", "/v2/models/alexnet/infer", b"{}", {}),
    "no version": ("POST", "/v2/models/googlenet/versions/2/infer", b"{}", {}),
    "no route": ("GET", "/nowhere", None, {}),
    "no route for a body": ("POST", "/nowhere", b"x", {}),
    "not get": ("GET", "/predict", None, {}),
    "not put": ("PUT", INFER, b"x", {}),
    "not head": ("HEAD", "/v2", None, {}),
    "too much packed": ("POST", "/predict", gzip.compress(bytes(70_000_000), 1), {"Content-Encoding": "gzip"}),
    "too much json": ("POST", INFER, b" " * 2**21, {}),
    "too large settings": ("PUT", POLICY, b" " * 2**21, {}),
    "encoding": ("POST", "/predict", b"x", {"Content-Encoding": "br"}),
    "bad time-out": ("POST", "/predict", b"x", {"X-Timeout-Ms": "soon"}),
    "late": ("POST", "/predict", photograph(), {"X-Timeout-Ms": "0.001"}),
    "many samples": ("POST", INFER, *call(pixels(n=2), 1100)),
    "live": ("GET", "/v2/health/live", None, {}),
    "ready": ("GET", "/v2/health/ready", None, {}),
    "metadata": ("GET", "/v2", None, {}),
    "model": ("GET", "/v2/models/googlenet", None, {}),
    "model ready": ("GET", "/v2/models/googlenet/ready", None, {}),
    "config": ("GET", "/v2/models/googlenet/config", None, {}),
    "index": ("POST", "/v2/repository/index", b"", {}),
    "policy": ("GET", POLICY, None, {}),
    "set policy": ("PUT", POLICY, b'{"policy": "greedy"}', {}),
    "bad policy": ("PUT", POLICY, b'{"policy": "clever"}', {}),
    "other origin": ("PUT", POLICY, b'{"policy": "serial"}', {"Origin": "http://evil.example"}),
    "rebound name": ("GET", POLICY, None, {"Host": "evil.example"}),
    "docs": ("GET", "/docs", None, {}),
    "openapi": ("GET", "/openapi.json", None, {}),
    "form": ("GET", "/live/form?model=googlenet", None, {}),
    "asset": ("GET", "/assets/app.js", None, {"Accept-Encoding": "gzip"}),
    "head of an asset": ("HEAD", "/assets/style.css", None, {}),
    "load": ("POST", "/v2/repository/models/googlenet/load", b"", {}),
    "load with settings": ("POST", "/v2/repository/models/googlenet/load", b"[]", {}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_gets_the_same_response(server: Server, single: Server, name: str) -> None:
    method, path, body, headers = REQUESTS[name]
    given, expected = (comparable(fetch(each.url, path, body, method, headers), each.url) for each in (server, single))
    assert given == expected


@pytest.mark.parametrize("target", [b"//[", b"/%00%0a%ff", b"*", b"http://x/v2", b"/v2?", b"/v2/../v2", b"/\xff"])
@pytest.mark.parametrize("method", [b"GET", b"POST", b"OPTIONS"])
def test_an_odd_target_gets_the_same_response(server: Server, single: Server, target: bytes, method: bytes) -> None:
    sent = method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

    def answer(each: Server) -> bytes:
        return re.sub(rb"x-request-id: .*\r\n", b"", exchange(each.url, sent))

    head, _, body = answer(server).partition(b"\r\n\r\n")
    expected_head, _, expected_body = answer(single).partition(b"\r\n\r\n")
    assert (body, sorted(head.split(b"\r\n"))) == (expected_body, sorted(expected_head.split(b"\r\n")))


def test_a_chunked_body_is_served(server: Server) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    body = b"%x\r\n" % len(photograph()) + photograph() + b"\r\n0\r\n\r\n"
    assert exchange(server.url, head % b"/predict" + body).startswith(b"HTTP/1.1 200")
    policy = b'12\r\n{"policy":"greedy"\r\n1\r\n}\r\n0\r\n\r\n'
    put = (head % POLICY.encode()).replace(b"POST", b"PUT").replace(b"Host: x", b"Host: localhost")
    assert exchange(server.url, put + policy).startswith(b"HTTP/1.1 200"), "passed on"


def test_ids_of_requests_are_returned_by_both_processes(server: Server) -> None:
    for path, body in (("/v2", None), ("/predict", photograph()), ("/nowhere", b"x")):
        assert fetch(server.url, path, body, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
        assert len(fetch(server.url, path, body).headers["x-request-id"]) > 10


def test_the_page_has_the_address_of_the_client(server: Server) -> None:
    assert f"{server.url}/predict" in fetch(server.url, "/").body.decode()
    page = fetch(server.url, "/", headers={"Host": "models.example", "X-Forwarded-Proto": "https"}).body.decode()
    assert "http://models.example/predict" in page
    assert fetch(server.url, "/live").json["status"] == "ready"


def test_calls_of_all_gateways_are_counted_once(server: Server) -> None:
    time.sleep(0.5)  # the calls of tests before are counted
    before = outcomes(server)
    for _ in range(10):
        assert infer(server.url, pixels(n=2), 2).status == 200
    fetch(server.url, "/predict", b"no picture")
    fetch(server.url, INFER, b"{")
    until(lambda: outcomes(server)["ok"] - before.get("ok", 0) == 20)
    until(lambda: outcomes(server)["bad_input"] - before.get("bad_input", 0) == 2)
    time.sleep(0.5)
    assert outcomes(server)["ok"] - before.get("ok", 0) == 20
    stats = fetch(server.url, "/v2/models/googlenet/stats").json["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] >= 10
    assert server.total("batchwright_response_seconds_count") > 0


def test_a_full_queue_rejects_and_an_expired_request_gets_504() -> None:
    arguments = ("--policy", "static:32,max_wait_ms=inf", "--queue-capacity", "32", *TWO)
    with serving(*EMULATED, *arguments) as server, ThreadPoolExecutor(4) as pool:
        late = {"X-Timeout-Ms": "900"}
        waiting = [pool.submit(fetch, server.url, "/predict", photograph(), headers=late) for _ in range(4)]
        until(lambda: server.total("batchwright_queue_length") == 4)
        rejected = infer(server.url, pixels(n=29), 29)
        assert (rejected.status, rejected.headers["retry-after"]) == (503, "1")
        assert "queue" in rejected.json["error"]
        assert infer(server.url, pixels(n=33), 33).status == 413
        assert {future.result().status for future in waiting} == {504}
        until(lambda: outcomes(server) == {"rejected": 29, "bad_input": 1, "expired": 4})
        assert server.total("batchwright_rejected_total") == 29


def test_a_disconnect_removes_the_queued_request() -> None:
    raw = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(pixels())}\r\n".encode()
    raw += b"Inference-Header-Content-Length: 0\r\n\r\n" + pixels()
    with serving(*EMULATED, "--policy", "static:32,max_wait_ms=inf", *TWO) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(raw)
            until(lambda: server.total("batchwright_queue_length") == 1)
        until(lambda: server.total("batchwright_queue_length") == 0)
        until(lambda: outcomes(server) == {"cancelled": 1})


OWN = """
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}
    max_batch_size = 4
    def run(self, x):
        return {"y": 2 * x}
    def decode(self, body, content_type):
        import numpy
        return {"x": numpy.array([float(body)], numpy.float32)}
    def render(self, outputs):
        return {"twice": float(outputs["y"][0])}
"""


def repeated(connection: http.client.HTTPConnection, body: bytes) -> Response:
    """The response to a call on a connection that is kept, with the same head each time."""
    connection.request("POST", "/predict/mine", body)
    response = connection.getresponse()
    return Response(response.status, dict(response.getheaders()), response.read())


def test_models_of_users_are_loaded_again_and_unloaded_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path, 1.0)
    (tmp_path / "own.py").write_text(OWN)
    models = (f"mine={tmp_path}/model.py:Mine", f"own={tmp_path}/own.py:Mine")
    with serving(*models, "--device", "cpu", "--policy", "greedy", *TWO) as server:
        assert y(predict(server, [3])) == [3.0]
        assert fetch(server.url, "/predict/own", b"4").json["outputs"]["twice"] == 8.0
        assert fetch(server.url, "/predict/own", b"four").status in (400, 500)
        assert fetch(server.url, "/predict", b"4").status == 400, "several models"
        write(tmp_path, 2.0, size=2)
        with ThreadPoolExecutor() as pool:
            loading = pool.submit(load, server)
            while not loading.done():
                answer = predict(server, [1])
                assert answer.status == 200 or (answer.status in (400, 503) and loading.result().status == 200)
        assert predict(server, [1]).status == 400
        for _ in range(10):
            assert y(predict(server, [1, 2])) == [2.0, 4.0]
        assert fetch(server.url, "/v2/models/mine").json["inputs"][0]["shape"] == [-1, 2]
        for model, body in (("mine", b'{"inputs": {"x": [1, 2]}}'), ("own", b"4")):
            assert load(server, model, "unload").status == 200
            rejected = fetch(server.url, f"/predict/{model}", body)
            assert rejected.headers["retry-after"] == "1"
            assert "is unloaded" in rejected.json["error"]
            assert load(server, model).status == 200
            assert fetch(server.url, f"/predict/{model}", body).status == 200
        kept = [http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30) for _ in range(4)]
        for connection in kept:
            assert repeated(connection, b'{"inputs": {"x": [1, 2]}}').status == 200
        (tmp_path / "model.py").write_text(OWN)
        assert load(server).status == 200
        for connection in kept:
            assert repeated(connection, b"5" + b" " * 24).json["outputs"]["twice"] == 10.0
            connection.close()
        until(lambda: fetch(server.url, "/predict/mine", b"5").status == 200)
        assert fetch(server.url, "/predict/mine", b"5").json["outputs"]["twice"] == 10.0, (
            "its decode is used from now on"
        )


def test_one_rate_limit_holds_over_all_gateways_and_keys_are_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    limited = f"limited predict {hashlib.sha256(b'l').hexdigest()} 2\n"
    file.write_text(KEYS + limited)
    arguments = ("--policy", "greedy", "--api-key-file", str(file), *TWO)
    with logged_server(tmp_path, *EMULATED, *arguments) as server:
        assert fetch(server.url, "/predict", photograph()).status == 401
        assert fetch(server.url, "/predict", photograph(), headers=ROOT).status == 403
        assert fetch(server.url, "/predict", photograph(), headers=USER).status == 200
        assert fetch(server.url, POLICY, headers=USER).status == 403
        assert fetch(server.url, POLICY, headers=ROOT).status == 200
        assert fetch(server.url, "/metrics").status == 200
        until(lambda: server.total("batchwright_refusals_total") == 3)
        key = {"Authorization": "Bearer l"}
        with ThreadPoolExecutor(8) as pool:
            began = time.monotonic()
            answers = list(pool.map(lambda _: fetch(server.url, "/v2", headers=key), range(120)))
            taken = time.monotonic() - began
        admitted = [answer for answer in answers if answer.status == 200]
        assert 0 < len(admitted) <= 2 * (1 + taken) + 1
        assert {answer.status for answer in answers if "retry-after" in answer.headers} == {429}
        assert len([answer for answer in answers if answer.status == 429]) == 120 - len(admitted)
        file.write_text(KEYS.splitlines()[1])
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(server.logged("SIGHUP: the API key file was reloaded")) == 2)
        assert {fetch(server.url, "/v2", headers=USER).status for _ in range(20)} == {401}
        file.write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(server.logged("API key file was not reloaded")) == 2)
        assert {fetch(server.url, POLICY, headers=ROOT).status for _ in range(20)} == {200}


def test_tls_is_served_and_its_pages_have_https(tmp_path: Path) -> None:
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    files = install(tmp_path, *first)
    tls = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    with logged_server(tmp_path, *EMULATED, "--policy", "greedy", *tls, *TWO) as server:
        assert server.url.startswith("https://127.0.0.1:")
        port = int(server.url.rpartition(":")[2])
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=20, context=ssl.create_default_context(cafile=str(first[0]))
        )
        connection.request("GET", "/")
        assert f"https://127.0.0.1:{port}/predict" in connection.getresponse().read().decode()
        connection.request("POST", "/predict", photograph())
        assert len(json.loads(connection.getresponse().read())["predictions"]) == 5
        connection.close()
        install(tmp_path, *second)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(server.logged("the TLS certificate was reloaded")) == 2)
        shown = {ssl.get_server_certificate(("127.0.0.1", port)) for _ in range(8)}
        assert shown == {second[0].read_text()}


def test_ipv6_and_a_free_port(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, "--policy", "greedy", "--host", "::1", *TWO) as server:
        assert server.url.startswith("http://[::1]:")
        assert fetch(server.url, "/predict", photograph()).status == 200


def test_each_process_logs_what_it_does_once(tmp_path: Path) -> None:
    with logged_server(tmp_path, *EMULATED, "--policy", "greedy", "--log-level", "debug", *TWO) as server:
        for name, (path, body) in {"a": ("/predict", photograph()), "b": ("/v2", None), "c": ("/x", b"y")}.items():
            fetch(server.url, path, body, headers={"X-Request-Id": name})
        until(lambda: len(server.logged("request")) >= 3)
        time.sleep(0.3)
        logged = sorted(
            (line["request_id"], line["path"], line["status"]) for line in server.log if line["event"] == "request"
        )
        assert logged == [("a", "/predict", 200), ("b", "/v2", 200), ("c", "/x", 404)]
        assert len(server.logged("ready on")) == 1
        assert len([line for line in server.log if line["event"] == "batch"]) == 1


def test_a_gateway_imports_no_device_solver_or_plots() -> None:
    code = (
        "import sys; import server.app.gateway; "
        "print({'torch', 'matplotlib', 'scipy.special', 'fastapi', 'aiohttp', 'opentelemetry', 'prometheus_client'} "
        "& sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_gateway_takes_little_memory() -> None:
    line = [*command_line("serve-model"), *EMULATED, "--policy", "greedy", *TWO]
    with running(*line, files=4096) as server:  # not forked: a fork has the memory of its parent
        for _ in range(4):
            assert infer(server.url, pixels(), 1).status == 200
        found = gateways(server)
        assert len(found) == 2
        assert len(processes(server)) == 3
        for each in found:
            memory = each.memory_info()
            assert memory.rss - memory.shared < 60e6


def test_answers_of_concurrent_calls_are_their_own(server: Server, single: Server) -> None:
    expected = [infer(single.url, pixels(n)).json["outputs"] for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            given = list(pool.map(lambda n: infer(server.url, pixels(n)).json["outputs"], range(16)))
            np.testing.assert_equal(given, expected)
