"""The HTTP interface of the real server process on an emulated device."""

import gzip
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.harness import Server, serving
from tests.support.http_client import Response, fetch, photograph

EMULATED = ("googlenet", "--device", "emulated:googlenet-tesla-p4")
NEVER = "static:32,max_wait_ms=inf"  # launches nothing until 32 requests are queued


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "greedy") as running:
        yield running


def pixels(seed: int = 0, n: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, 224, 224, 3), np.uint8).tobytes()


def infer(url: str, data: bytes, n: int = 1, **fields: Any) -> Response:
    size = {"binary_data_size": len(data)}
    entry = {"name": "image", "shape": [n, 224, 224, 3], "datatype": "UINT8", "parameters": size}
    document = json.dumps({"inputs": [entry], **fields}).encode()
    headers = {"Inference-Header-Content-Length": str(len(document))}
    return fetch(url, "/v2/models/googlenet/infer", document + data, headers=headers)


def until(condition: Callable[[], bool]) -> None:
    """Poll a condition until it is true, bounded by the time limit of the test."""
    while not condition():
        time.sleep(0.005)


def queue_length(server: Server) -> float:
    return server.metric("batchwright_queue_length")['{model="googlenet"}']


def outcomes(server: Server) -> dict[str, float]:
    found = server.metric("batchwright_requests_total")
    return {labels.split('outcome="')[1][:-2]: value for labels, value in found.items() if value}


def test_a_photograph_gets_five_predictions(server: Server) -> None:
    for path in ("/predict", "/predict/googlenet"):
        answer = fetch(server.url, path, photograph()).json
        assert [p["probability"] for p in answer["predictions"]] == sorted(
            (p["probability"] for p in answer["predictions"]), reverse=True
        )
        assert len(answer["predictions"]) == 5
        assert {"class_index", "label", "probability"} == set(answer["predictions"][0])
        facts = {"batch_size", "waiting_ms", "service_ms", "energy_mj", "energy_source"}
        assert set(answer) == {"model", "predictions"} | facts
        assert answer["batch_size"] == 1
        assert answer["energy_mj"] == pytest.approx(39.502)  # zeta(1) of the profile


def test_multipart_and_compressed_bodies_give_the_same_predictions(server: Server) -> None:
    plain = fetch(server.url, "/predict", photograph()).json["predictions"]
    form = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' + photograph() + b"\r\n--x--"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert fetch(server.url, "/predict", form, headers=headers).json["predictions"] == plain
    packed = fetch(server.url, "/predict", gzip.compress(photograph()), headers={"Content-Encoding": "gzip"})
    assert packed.json["predictions"] == plain


def test_a_raw_body_is_an_encoded_picture_or_pixels(server: Server) -> None:
    raw = {"Inference-Header-Content-Length": "0"}
    picture = fetch(server.url, "/v2/models/googlenet/infer", photograph(), headers=raw)
    assert picture.status == 200
    assert int(picture.headers["inference-header-content-length"]) + 4000 == len(picture.body)
    same = infer(server.url, pixels(), parameters={"binary_data_output": True}).body[-4000:]
    assert fetch(server.url, "/v2/models/googlenet/infer", pixels(), headers=raw).body[-4000:] == same


def test_each_sample_of_a_call_gets_its_own_output(server: Server) -> None:
    alone = [infer(server.url, pixels(seed)).json["outputs"][0]["data"] for seed in range(3)]
    together = infer(server.url, b"".join(pixels(seed) for seed in range(3)), 3).json
    assert together["outputs"][0]["shape"] == [3, 1000]
    assert together["outputs"][0]["data"] == list(chain(*alone))
    assert set(together["parameters"]) == {"batch_size", "waiting_ms", "service_ms", "energy_mj", "energy_source"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nowhere", None, {}, 404),
        ("GET", "/predict", None, {}, 405),
        ("GET", "/v2/models/googlenet/infer", None, {}, 405),
        ("POST", "/predict", b"no picture", {}, 400),
        ("POST", "/predict", b"", {}, 400),
        ("POST", "/predict/alexnet", b"x", {}, 404),
        ("POST", "/predict", b"x", {"X-Timeout-Ms": "soon"}, 400),
        ("POST", "/predict", b"x", {"Content-Encoding": "br"}, 415),
        ("POST", "/predict", b"x", {"Content-Encoding": "gzip"}, 400),
        ("POST", "/predict", b"x", {"Content-Type": "multipart/form-data"}, 400),
        ("POST", "/predict", b"x", {"Content-Type": "multipart/form-data; boundary=y"}, 400),
        ("POST", "/predict", gzip.compress(bytes(70_000_000), 1), {"Content-Encoding": "gzip"}, 413),
        ("POST", "/v2/models/googlenet/infer", b"{", {}, 400),
        ("POST", "/v2/models/googlenet/infer", b"{}", {"Inference-Header-Content-Length": "9"}, 400),
        ("POST", "/v2/models/alexnet/infer", b"{}", {}, 404),
        ("GET", "/v2/models/googlenet/versions/2", None, {}, 404),
        ("PUT", "/admin/models/googlenet/policy", b"", {}, 400),
        ("PUT", "/admin/models/googlenet/policy", b'{"policy": "clever"}', {}, 400),
        ("PUT", "/admin/models/googlenet/policy", b'{"policy": "static:33"}', {}, 400),
        ("PUT", "/admin/models/alexnet/policy", b'{"policy": "greedy"}', {}, 404),
    ],
)
def test_every_error_has_its_status_and_one_line_of_text(
    server: Server, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    reply = fetch(server.url, path, body, method, headers)
    assert reply.status == status, reply.body
    assert set(reply.json) == {"error"}
    assert "\n" not in reply.json["error"]


def test_a_content_length_over_the_limit_is_rejected_before_the_body(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_the_documents_of_the_protocol_are_served(server: Server) -> None:
    assert fetch(server.url, "/v2/health/live").status == 200
    assert fetch(server.url, "/v2/health/ready").status == 200
    assert "binary_tensor_data" in fetch(server.url, "/v2").json["extensions"]
    for base in ("/v2/models/googlenet", "/v2/models/googlenet/versions/1"):
        metadata = fetch(server.url, base).json
        assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}]
        assert metadata["parameters"] == {"weights": "emulated", "exif_orientation": "ignored"}
        assert server.metric("batchwright_random_weights") == {'{model="googlenet"}': 0.0}
        assert fetch(server.url, f"{base}/ready").status == 200
        assert fetch(server.url, f"{base}/config").json["max_batch_size"] == 32
        assert fetch(server.url, f"{base}/stats").json["model_stats"][0]["name"] == "googlenet"
    assert len(fetch(server.url, "/v2/models/stats").json["model_stats"]) == 1
    assert fetch(server.url, "/v2/repository/index", b"").json[0]["state"] == "READY"
    assert fetch(server.url, "/openapi.json").status == 200
    page = fetch(server.url, "/").body.decode()
    assert "googlenet" in page
    assert f"{server.url}/predict" in page


def test_statistics_count_served_calls_and_samples(server: Server) -> None:
    def stats() -> Any:
        return fetch(server.url, "/v2/models/googlenet/stats").json["model_stats"][0]

    before = stats()
    infer(server.url, pixels() * 3, 3)
    after = stats()
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
    assert after["inference_stats"]["queue"]["count"] - before["inference_stats"]["queue"]["count"] == 1
    assert sum(b["compute_infer"]["count"] for b in after["batch_stats"]) == after["execution_count"]


def test_the_policy_can_be_read_swapped_and_solved_again(server: Server) -> None:
    path = "/admin/models/googlenet/policy"
    resource = {"resource", "resource_unit", "expected_resource"}
    fixed = {"name", "spec", "parameters", "rows", "expected_response_time_ms", "expected_power_w", "arrival_rate_hz"}
    answer = fetch(server.url, path, b'{"policy": "smdp:w2=1.6"}', "PUT").json
    assert (
        set(answer) == fixed | {"profile", "objective_ms", "age_margin_ms", "solved_for_sizes", "warnings"} | resource
    )
    assert (answer["objective_ms"], answer["warnings"]) == (None, [])
    assert answer["spec"] == "smdp:w2=1.6"
    assert len(answer["rows"]) == 49
    assert answer["expected_response_time_ms"] > 0
    assert fetch(server.url, "/admin/models/googlenet/solve", b"").json["spec"] == "smdp:w2=1.6"
    assert fetch(server.url, "/predict", photograph()).status == 200
    assert 'policy="smdp",spec="smdp:w2=1.6"' in next(iter(server.metric("batchwright_policy_info")))
    rejected = fetch(server.url, path, b'{"policy": "lazy:slo_ms=100"}', "PUT")
    assert rejected.status == 400
    assert "start the server with --stages K" in rejected.json["error"]
    assert fetch(server.url, path, b'{"policy": "greedy"}', "PUT").json["rows"] == []
    assert fetch(server.url, path).json["name"] == "greedy"


def test_an_objective_stays_promised_when_a_policy_that_ignores_it_is_set_and_cannot_be_forgotten() -> None:
    with serving(*EMULATED, "--max-batch-size", "4", "--slo-p95-ms", "1") as server:
        path = "/admin/models/googlenet/policy"
        answer = fetch(server.url, path, b'{"policy": "greedy"}', "PUT").json
        assert answer["objective_ms"] == 1.0
        assert "cannot be kept" in answer["warnings"][0]
        assert "policy 'greedy' does not pursue the objective" in answer["warnings"][1]
        assert fetch(server.url, "/live/policy").json["warnings"] == answer["warnings"]
        assert fetch(server.url, "/live").json["slo_ms"] == 1.0
        assert fetch(server.url, "/predict", photograph()).status == 200
        assert server.metric("batchwright_objective_seconds") == {'{model="googlenet"}': 0.001}
        assert server.metric("batchwright_objective_share") == {'{model="googlenet"}': 0.95}
        assert server.metric("batchwright_deadline_missed_total") == {'{model="googlenet"}': 1.0}
        assert len(fetch(server.url, path, b'{"policy": "smdp"}', "PUT").json["warnings"]) == 1
        conflict = fetch(server.url, path, b'{"policy": "smdp:slo_p95_ms=2"}', "PUT")
        assert conflict.status == 400
        assert "start the server without --slo-p95-ms and with the value in --policy" in conflict.json["error"]


def test_requests_are_counted_by_outcome(server: Server) -> None:
    before = outcomes(server)
    fetch(server.url, "/predict", photograph())
    fetch(server.url, "/predict", b"no picture")
    after = outcomes(server)
    assert after["ok"] - before.get("ok", 0) == 1
    assert after["bad_input"] - before.get("bad_input", 0) == 1
    joules = next(iter(server.metric("batchwright_energy_joules_total").values()))
    assert next(iter(server.metric("batchwright_device_energy_joules_total").values())) == pytest.approx(joules)


def test_a_full_queue_rejects_with_retry_after_and_an_expired_request_gets_504() -> None:
    with serving(*EMULATED, "--policy", NEVER, "--queue-capacity", "32") as server, ThreadPoolExecutor() as pool:
        headers = {"X-Timeout-Ms": "700"}
        waiting = [pool.submit(fetch, server.url, "/predict", photograph(), headers=headers) for _ in range(4)]
        until(lambda: queue_length(server) == 4)
        rejected = infer(server.url, pixels(n=29), 29)
        assert rejected.status == 503
        assert int(rejected.headers["retry-after"]) >= 1
        assert infer(server.url, pixels(n=33), 33).status == 413, "33 samples exceed the queue capacity"
        assert {future.result().status for future in waiting} == {504}
        assert infer(server.url, pixels(), parameters={"timeout": 50_000}).status == 504
        assert outcomes(server) == {"rejected": 29, "bad_input": 1, "expired": 5}
        assert server.metric("batchwright_batches_total") == {}, "no batch was launched"


def test_a_disconnect_removes_the_queued_request() -> None:
    with serving(*EMULATED, "--policy", NEVER) as server:
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photograph())}\r\n\r\n".encode()
        raw = f"POST /v2/models/googlenet/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(pixels())}\r\n".encode()
        raw += b"Inference-Header-Content-Length: 0\r\n\r\n" + pixels()
        for number, message in enumerate((head + photograph(), raw), 1):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
                connection.sendall(message)
                until(lambda: queue_length(server) == 1)
            until(lambda: queue_length(server) == 0)
            until(lambda n=number: outcomes(server).get("cancelled") == n)  # type: ignore[misc]


def test_queued_requests_survive_a_policy_swap() -> None:
    with serving(*EMULATED, "--policy", NEVER) as server, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(5)]
        until(lambda: queue_length(server) == 5)
        fetch(server.url, "/admin/models/googlenet/policy", b'{"policy": "greedy"}', "PUT")
        assert [future.result().status for future in waiting] == [200] * 5


def test_sigterm_completes_accepted_calls_rejects_new_ones_and_exits_0(tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1.0, 1.0]}
    slow.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "slow", **sizes}))
    arguments = ("googlenet", "--device", f"emulated:{slow}", "--policy", NEVER)
    with serving(*arguments) as server, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(10)]
        until(lambda: queue_length(server) == 10)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: fetch(server.url, "/v2/health/ready").status == 503)
        rejected = infer(server.url, pixels())
        assert rejected.status == 503
        assert rejected.headers["retry-after"]
        assert fetch(server.url, "/v2/models/googlenet/ready").status == 503
        assert [future.result().status for future in waiting] == [200] * 10
        assert server.process.wait(timeout=30) == 0


def test_solving_again_keeps_the_weight_of_the_flag() -> None:
    with serving(*EMULATED, "--w2", "1.6") as server:
        before = fetch(server.url, "/admin/models/googlenet/policy").json
        after = fetch(server.url, "/admin/models/googlenet/solve", b"").json
        assert before["parameters"]["w2"] == after["parameters"]["w2"] == "1.6"
        assert before["rows"] == after["rows"]


def test_two_models_share_a_device() -> None:
    arguments = ("googlenet", "resnet18", *EMULATED[1:], "--policy", "greedy", "--policy", "resnet18=static:2")
    with serving(*arguments) as server:
        assert fetch(server.url, "/predict", photograph()).status == 400, "the model must be named"
        assert fetch(server.url, "/predict/googlenet", photograph()).json["model"] == "googlenet"
        assert fetch(server.url, "/admin/models/resnet18/policy").json["spec"] == "static:2"
        with ThreadPoolExecutor() as pool:
            pair = [pool.submit(fetch, server.url, "/predict/resnet18", photograph()) for _ in range(2)]
            assert [future.result().json["batch_size"] for future in pair] == [2, 2]
