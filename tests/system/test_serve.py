"""The real server process on an emulated device, as its users meet it."""

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
from tests.support.http_client import Reply, ask, photograph

EMULATED = ("googlenet", "--device", "emulated:googlenet-tesla-p4")
NEVER = "static:32,max_wait_ms=inf"  # launches nothing until 32 wait


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "greedy") as running:
        yield running


def pixels(seed: int = 0, n: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, 224, 224, 3), np.uint8).tobytes()


def infer(url: str, data: bytes, n: int = 1, **fields: Any) -> Reply:
    size = {"binary_data_size": len(data)}
    entry = {"name": "image", "shape": [n, 224, 224, 3], "datatype": "UINT8", "parameters": size}
    document = json.dumps({"inputs": [entry], **fields}).encode()
    headers = {"Inference-Header-Content-Length": str(len(document))}
    return ask(url, "/v2/models/googlenet/infer", document + data, headers=headers)


def until(holds: Callable[[], bool]) -> None:
    """Poll a condition of another process; the test's own time limit is the bound."""
    while not holds():
        time.sleep(0.005)


def queue_length(server: Server) -> float:
    return server.metric("batchwright_queue_length")['{model="googlenet"}']


def outcomes(server: Server) -> dict[str, float]:
    found = server.metric("batchwright_requests_total")
    return {labels.split('outcome="')[1][:-2]: value for labels, value in found.items() if value}


def test_a_photograph_comes_back_as_five_predictions(server: Server) -> None:
    for path in ("/predict", "/predict/googlenet"):
        answer = ask(server.url, path, photograph()).json
        assert [p["probability"] for p in answer["predictions"]] == sorted(
            (p["probability"] for p in answer["predictions"]), reverse=True
        )
        assert len(answer["predictions"]) == 5
        assert {"class_index", "label", "probability"} == set(answer["predictions"][0])
        facts = {"batch_size", "waiting_ms", "service_ms", "energy_mj", "energy_source"}
        assert set(answer) == {"model", "predictions"} | facts
        assert answer["batch_size"] == 1
        assert answer["energy_mj"] == pytest.approx(39.502)  # zeta(1) of the profile


def test_multipart_and_compressed_bodies_are_the_same_picture(server: Server) -> None:
    plain = ask(server.url, "/predict", photograph()).json["predictions"]
    form = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' + photograph() + b"\r\n--x--"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert ask(server.url, "/predict", form, headers=headers).json["predictions"] == plain
    packed = ask(server.url, "/predict", gzip.compress(photograph()), headers={"Content-Encoding": "gzip"})
    assert packed.json["predictions"] == plain


def test_a_raw_body_is_a_picture_or_pixels(server: Server) -> None:
    raw = {"Inference-Header-Content-Length": "0"}
    picture = ask(server.url, "/v2/models/googlenet/infer", photograph(), headers=raw)
    assert picture.status == 200
    assert int(picture.headers["inference-header-content-length"]) + 4000 == len(picture.body)
    same = infer(server.url, pixels(), parameters={"binary_data_output": True}).body[-4000:]
    assert ask(server.url, "/v2/models/googlenet/infer", pixels(), headers=raw).body[-4000:] == same


def test_many_samples_in_one_call_are_answered_each_for_itself(server: Server) -> None:
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
        ("POST", "/predict", gzip.compress(bytes(70_000_000)), {"Content-Encoding": "gzip"}, 413),
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
def test_every_error_has_its_status_and_says_what_to_do(
    server: Server, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    reply = ask(server.url, path, body, method, headers)
    assert reply.status == status, reply.body
    assert set(reply.json) == {"error"}
    assert "\n" not in reply.json["error"]


def test_an_announced_length_over_the_limit_is_refused_before_the_body_comes(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_the_documents_of_the_protocol_are_there(server: Server) -> None:
    assert ask(server.url, "/v2/health/live").status == 200
    assert ask(server.url, "/v2/health/ready").status == 200
    assert "binary_tensor_data" in ask(server.url, "/v2").json["extensions"]
    for base in ("/v2/models/googlenet", "/v2/models/googlenet/versions/1"):
        metadata = ask(server.url, base).json
        assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}]
        assert metadata["parameters"] == {"weights": "emulated"}
        assert ask(server.url, f"{base}/ready").status == 200
        assert ask(server.url, f"{base}/config").json["max_batch_size"] == 32
        assert ask(server.url, f"{base}/stats").json["model_stats"][0]["name"] == "googlenet"
    assert len(ask(server.url, "/v2/models/stats").json["model_stats"]) == 1
    assert ask(server.url, "/v2/repository/index", b"").json[0]["state"] == "READY"
    assert ask(server.url, "/openapi.json").status == 200
    page = ask(server.url, "/").body.decode()
    assert "googlenet" in page
    assert f"{server.url}/predict" in page


def test_statistics_grow_with_what_was_served(server: Server) -> None:
    def stats() -> Any:
        return ask(server.url, "/v2/models/googlenet/stats").json["model_stats"][0]

    before = stats()
    infer(server.url, pixels() * 3, 3)
    after = stats()
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
    assert after["inference_stats"]["queue"]["count"] - before["inference_stats"]["queue"]["count"] == 1
    assert sum(b["compute_infer"]["count"] for b in after["batch_stats"]) == after["execution_count"]


def test_the_policy_can_be_read_swapped_and_solved_again(server: Server) -> None:
    path = "/admin/models/googlenet/policy"
    fixed = {"name", "spec", "parameters", "rows", "expected_response_time_ms", "expected_power_w", "arrival_rate_hz"}
    answer = ask(server.url, path, b'{"policy": "smdp:w2=1.6"}', "PUT").json
    assert set(answer) == fixed | {"profile"}
    assert answer["spec"] == "smdp:w2=1.6"
    assert len(answer["rows"]) == 49
    assert answer["expected_response_time_ms"] > 0
    assert ask(server.url, "/admin/models/googlenet/solve", b"").json["spec"] == "smdp:w2=1.6"
    assert ask(server.url, "/predict", photograph()).status == 200
    assert 'policy="smdp",spec="smdp:w2=1.6"' in next(iter(server.metric("batchwright_policy_info")))
    refused = ask(server.url, path, b'{"policy": "lazy:slo_ms=100"}', "PUT")
    assert refused.status == 400
    assert "start the server with --stages K" in refused.json["error"]
    assert ask(server.url, path, b'{"policy": "greedy"}', "PUT").json["rows"] == []
    assert ask(server.url, path).json["name"] == "greedy"


def test_requests_are_counted_by_what_came_of_them(server: Server) -> None:
    before = outcomes(server)
    ask(server.url, "/predict", photograph())
    ask(server.url, "/predict", b"no picture")
    after = outcomes(server)
    assert after["ok"] - before["ok"] == 1
    assert after["bad_input"] - before.get("bad_input", 0) == 1
    joules = next(iter(server.metric("batchwright_energy_joules_total").values()))
    assert next(iter(server.metric("batchwright_device_energy_joules_total").values())) == pytest.approx(joules)


def test_a_full_queue_refuses_with_retry_after_and_a_passed_time_out_is_504() -> None:
    with serving(*EMULATED, "--policy", NEVER, "--queue-capacity", "32") as server, ThreadPoolExecutor() as pool:
        headers = {"X-Timeout-Ms": "700"}
        waiting = [pool.submit(ask, server.url, "/predict", photograph(), headers=headers) for _ in range(4)]
        until(lambda: queue_length(server) == 4)
        refused = infer(server.url, pixels(n=29), 29)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert infer(server.url, pixels(n=33), 33).status == 413, "33 can never be admitted together"
        assert {future.result().status for future in waiting} == {504}
        assert infer(server.url, pixels(), parameters={"timeout": 50_000}).status == 504
        assert outcomes(server) == {"rejected": 29, "bad_input": 1, "expired": 5}
        assert server.metric("batchwright_batches_total") == {}, "nobody was run"


def test_a_client_that_leaves_takes_its_waiting_request_with_it() -> None:
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


def test_a_swap_while_requests_wait_loses_nobody() -> None:
    with serving(*EMULATED, "--policy", NEVER) as server, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(5)]
        until(lambda: queue_length(server) == 5)
        ask(server.url, "/admin/models/googlenet/policy", b'{"policy": "greedy"}', "PUT")
        assert [future.result().status for future in waiting] == [200] * 5


def test_sigterm_answers_what_was_accepted_refuses_what_is_new_and_exits_0(tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    sizes = {"batch_size": [1, 32], "service_time_s": [1.0, 1.0]}
    slow.write_text(json.dumps({"schema": "batchwright.profile/1", "name": "slow", **sizes}))
    arguments = ("googlenet", "--device", f"emulated:{slow}", "--policy", NEVER)
    with serving(*arguments) as server, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(infer, server.url, pixels(n)) for n in range(10)]
        until(lambda: queue_length(server) == 10)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server.url, "/v2/health/ready").status == 503)
        refused = infer(server.url, pixels())
        assert refused.status == 503
        assert refused.headers["retry-after"]
        assert ask(server.url, "/v2/models/googlenet/ready").status == 503
        assert [future.result().status for future in waiting] == [200] * 10
        assert server.process.wait(timeout=30) == 0


def test_solving_again_keeps_the_weight_that_a_flag_gave() -> None:
    with serving(*EMULATED, "--w2", "1.6") as server:
        before = ask(server.url, "/admin/models/googlenet/policy").json
        after = ask(server.url, "/admin/models/googlenet/solve", b"").json
        assert before["parameters"]["w2"] == after["parameters"]["w2"] == "1.6"
        assert before["rows"] == after["rows"]


def test_two_models_share_a_device() -> None:
    arguments = ("googlenet", "resnet18", *EMULATED[1:], "--policy", "greedy", "--policy", "resnet18=static:2")
    with serving(*arguments) as server:
        assert ask(server.url, "/predict", photograph()).status == 400, "which one?"
        assert ask(server.url, "/predict/googlenet", photograph()).json["model"] == "googlenet"
        assert ask(server.url, "/admin/models/resnet18/policy").json["spec"] == "static:2"
        with ThreadPoolExecutor() as pool:
            pair = [pool.submit(ask, server.url, "/predict/resnet18", photograph()) for _ in range(2)]
            assert [future.result().json["batch_size"] for future in pair] == [2, 2]
