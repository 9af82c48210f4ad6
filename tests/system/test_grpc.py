"""The Open Inference Protocol over gRPC, by gRPC's own client and by NVIDIA's, unmodified."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from benchmarks.support.harness import free_port
from server.api.grpc.messages import message_class
from tests.support.certificates import certificate, install
from tests.support.fork_server import run_serve_model
from tests.support.grpc_client import SERVICE, call, grpc_server, infer_request, infer_response
from tests.support.http_client import photograph
from tests.support.logged_server import LoggedServer, until
from tests.system.test_tracing import collector

Code: Any = grpc.StatusCode
EMULATED = ("--device", "emulated:googlenet-tesla-p4")
PIXELS = np.random.default_rng(1).integers(0, 256, (2, 224, 224, 3), np.uint8)
MODEL = """
from batchwright import Model, Tensor
class Mine(Model):
    inputs = {"x": Tensor("FP32", [2]), "k": Tensor("INT8", [1])}
    outputs = {"y": Tensor("FP32", [2])}
    def run(self, x, k):
        return {"y": x * k}
"""


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LoggedServer, str]]:
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "mine.py").write_text(MODEL)
    models = ("resnet18", f"mine={folder}/mine.py:Mine")
    with grpc_server(folder, *models, *EMULATED, "--policy", "greedy") as started:
        yield started


@pytest.fixture
def channel(started: tuple[LoggedServer, str]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(started[1]) as channel:
        yield channel


@pytest.fixture
def client(started: tuple[LoggedServer, str]) -> Iterator[Any]:
    with triton.InferenceServerClient(started[1]) as client:
        yield client


def tensor(array: Any, name: str = "image", datatype: str = "UINT8", module: Any = triton) -> Any:
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def http_logits(server: LoggedServer, pixels: Any) -> Any:
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        return client.infer("resnet18", [tensor(pixels, module=triton_http)]).as_numpy("logits")


@pytest.mark.parametrize("times", [1, 8])  # eight make a message that is translated in a thread
def test_answers_are_those_of_http(started: tuple[LoggedServer, str], client: Any, times: int) -> None:
    pixels = np.tile(PIXELS, (times, 1, 1, 1))
    result = client.infer("resnet18", [tensor(pixels)], model_version="1", request_id="7")
    np.testing.assert_array_equal(result.as_numpy("logits"), http_logits(started[0], pixels))
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "resnet18", "1")
    assert response.parameters["energy_source"].string_param == "literature"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages_are_rejected(client: Any, algorithm: str) -> None:
    with pytest.raises(InferenceServerException) as rejected:
        client.infer("resnet18", [tensor(PIXELS)], compression_algorithm=algorithm)
    assert rejected.value.status() == "StatusCode.UNIMPLEMENTED"


def test_classes_and_encoded_pictures_are_those_of_http(started: tuple[LoggedServer, str], client: Any) -> None:
    pictures = np.array([photograph()], np.object_)
    answers = []
    for module, address in ((triton, started[1]), (triton_http, started[0].url.removeprefix("http://"))):
        output = module.InferRequestedOutput("logits", class_count=3)
        with module.InferenceServerClient(address) as each:
            result = each.infer("resnet18", [tensor(pictures, "image", "BYTES", module)], outputs=[output])
        answers.append(result.as_numpy("logits").tolist())
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 3


def test_typed_contents_are_read_as_raw_ones(channel: grpc.Channel) -> None:
    x, k = np.array([[1.5, -2.0]], np.float32), np.array([[3]], np.int8)
    typed = message_class("ModelInferRequest")(model_name="mine")
    typed.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend(x[0].tolist())
    typed.inputs.add(name="k", datatype="INT8", shape=[1, 1]).contents.int_contents.append(3)
    raw = message_class("ModelInferRequest")(model_name="mine", raw_input_contents=[x.tobytes(), k.tobytes()])
    raw.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    raw.inputs.add(name="k", datatype="INT8", shape=[1, 1])
    answers = [call(channel, "ModelInfer", sent.SerializeToString()) for sent in (typed, raw)]
    assert [answer[0] for answer in answers] == [Code.OK, Code.OK]
    np.testing.assert_array_equal(infer_response(answers[0][3]), infer_response(answers[1][3]))


def test_the_client_reads_all_documents(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("resnet18")
    assert client.get_server_metadata().name == "batchwright"
    metadata = client.get_model_metadata("mine", "1")
    assert [(each.name, each.datatype, [*each.shape]) for each in metadata.inputs] == [
        ("x", "FP32", [-1, 2]),
        ("k", "INT8", [-1, 1]),
    ]
    config = client.get_model_config("resnet18").config
    assert config.max_batch_size == 32
    assert config.HasField("dynamic_batching")
    assert [(each.data_type, [*each.dims]) for each in config.input] == [(2, [224, 224, 3])]  # TYPE_UINT8
    index = client.get_model_repository_index().models
    assert {(each.name, each.state) for each in index} == {("resnet18", "READY"), ("mine", "READY")}
    assert {each.name for each in client.get_inference_statistics().model_stats} == {"resnet18", "mine"}


def test_statistics_count_calls(client: Any) -> None:
    def statistics() -> Any:
        (found,) = client.get_inference_statistics("resnet18").model_stats
        return found

    before = statistics()
    client.infer("resnet18", [tensor(PIXELS)])
    until(lambda: statistics().inference_count >= before.inference_count + 2)
    until(lambda: statistics().inference_stats.success.count > before.inference_stats.success.count)
    assert statistics().inference_stats.queue.count > 0


def test_models_are_unloaded_and_loaded(client: Any) -> None:
    client.unload_model("resnet18")
    until(lambda: not client.is_model_ready("resnet18"))
    with pytest.raises(InferenceServerException, match="resnet18 is unloaded") as unloaded:
        client.infer("resnet18", [tensor(PIXELS)])
    assert unloaded.value.status() == "StatusCode.UNAVAILABLE"
    client.load_model("resnet18")
    assert client.is_model_ready("resnet18")
    with pytest.raises(InferenceServerException, match="send none"):
        client.load_model("resnet18", config="{}")
    assert client.infer("resnet18", [tensor(PIXELS)]).as_numpy("logits").shape == (2, 1000)


@pytest.mark.parametrize(
    ("method", "message", "code", "text"),
    [
        ("ModelInfer", infer_request("alexnet", image=PIXELS), Code.NOT_FOUND, "no model 'alexnet'"),
        ("ModelInfer", infer_request("resnet18", image=PIXELS[:, 1:]), Code.INVALID_ARGUMENT, "the shape is"),
        ("ModelInfer", infer_request("resnet18", pixels=PIXELS), Code.INVALID_ARGUMENT, "the input's name is"),
        ("ModelInfer", infer_request("resnet18"), Code.INVALID_ARGUMENT, "`inputs` is"),
        ("ModelInfer", b"\xff\xff", Code.INVALID_ARGUMENT, "the message is no ModelInferRequest"),
        ("ModelMetadata", b"\x0a\x07alexnet", Code.NOT_FOUND, "no model 'alexnet'"),
        ("ModelMetadata", b"\x0a\x05stats", Code.NOT_FOUND, "no model 'stats'"),
        ("ModelReady", b"\x0a\x03a/b", Code.NOT_FOUND, "no model 'a/b'"),
        ("ModelConfig", b"\xff", Code.INVALID_ARGUMENT, "the message is no ModelRequest"),
        ("ModelConfig", b"\x0a\x08resnet18\x12\x012", Code.NOT_FOUND, "no version '2'"),
        ("RepositoryModelLoad", b"\x12\x07alexnet", Code.NOT_FOUND, "no model 'alexnet'"),
        ("ModelStreamInfer", b"", Code.UNIMPLEMENTED, ""),
        ("SystemSharedMemoryRegister", b"", Code.UNIMPLEMENTED, ""),
    ],
)
def test_errors_have_their_status(channel: grpc.Channel, method: str, message: bytes, code: Any, text: str) -> None:
    found, details, metadata, _ = call(channel, method, message, [("x-request-id", "mine-1")])
    assert (found, text in details) == (code, True), details
    assert code is Code.UNIMPLEMENTED or metadata["x-request-id"] == "mine-1"


def test_two_hundred_concurrent_calls_get_their_own_answers_beside_bad_ones(started: tuple[LoggedServer, str]) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (200, 224, 224, 3), np.uint8)
    expected = np.concatenate([http_logits(started[0], part) for part in np.split(pixels, 8)])

    async def calls() -> list[Any]:
        async with grpc.aio.insecure_channel(started[1]) as one, grpc.aio.insecure_channel(started[1]) as two:
            infer = [channel.unary_unary(f"{SERVICE}ModelInfer") for channel in (one, two)]
            good = [infer_request("resnet18", image=image[None]) for image in pixels]
            bad = [message[: len(message) // 2] for message in good[:50]]
            sent = [infer[n % 2](message) for n, message in enumerate((*good, *bad))]
            return await asyncio.gather(*sent, return_exceptions=True)

    answers = asyncio.run(calls())
    for answer, logits in zip(answers[:200], expected, strict=True):
        np.testing.assert_array_equal(infer_response(answer)[0], logits)
    assert {error.code() for error in answers[200:]} == {Code.INVALID_ARGUMENT}


def test_all_calls_of_a_burst_are_answered(started: tuple[LoggedServer, str]) -> None:
    async def burst() -> list[Any]:
        async with grpc.aio.insecure_channel(started[1]) as channel:
            live = channel.unary_unary(f"{SERVICE}ServerLive")
            return await asyncio.gather(*(live(b"") for _ in range(3000)))

    assert set(asyncio.run(burst())) == {message_class("ServerLiveResponse")(live=True).SerializeToString()}


def test_trace_context_is_answered(channel: grpc.Channel) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    _, _, metadata, _ = call(channel, "ServerMetadata", b"", [("traceparent", f"00-{trace}-b7ad6b7169203331-01")])
    assert metadata["traceparent"].split("-")[1] == trace


def test_the_span_of_a_call_is_linked_with_that_of_its_batch(tmp_path: Path) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with collector() as (url, spans):
        arguments = ("--policy", "greedy", "--otlp-endpoint", url)
        with (
            grpc_server(tmp_path, "resnet18", *EMULATED, *arguments) as (_, address),
            grpc.insecure_channel(address) as channel,
        ):
            message = infer_request("resnet18", image=PIXELS[:1])
            code, _, metadata, _ = call(channel, "ModelInfer", message, [("traceparent", parent)])
            assert code is Code.OK
        named = {span.name: span for span in spans}
    infer, batch = named[f"POST {SERVICE}ModelInfer"], named["batch"]
    assert infer.parent_span_id.hex() == "b7ad6b7169203331"
    assert metadata["traceparent"].split("-")[2] == infer.span_id.hex()
    assert [link.span_id for link in batch.links] == [infer.span_id]
    assert [link.span_id for link in infer.links] == [batch.span_id]


@pytest.fixture
def waiting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LoggedServer, grpc.Channel]]:
    """A server whose policy waits for a batch of eight for a long time."""
    arguments = ("--policy", "static:8,max_wait_ms=1e6", "--queue-capacity", "8", "--max-batch-size", "8")
    with (
        grpc_server(tmp_path, "resnet18", *EMULATED, *arguments) as (server, address),
        grpc.insecure_channel(address) as channel,
    ):
        yield server, channel


def queue_length(server: LoggedServer) -> float:
    return sum(sample.value for sample in server.samples("batchwright_queue_length"))


def outcomes(server: LoggedServer) -> dict[str, float]:
    samples = server.samples("batchwright_requests_total")
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.value}


def test_calls_leave_the_queue_at_their_deadline_and_when_they_are_cancelled(
    waiting: tuple[LoggedServer, grpc.Channel],
) -> None:
    server, channel = waiting
    infer = channel.unary_unary(f"{SERVICE}ModelInfer")
    one = infer_request("resnet18", image=PIXELS[:1])

    grpc.channel_ready_future(channel).result()
    code, *_ = call(channel, "ModelInfer", one, timeout=2)
    assert code is Code.DEADLINE_EXCEEDED
    until(lambda: sum(outcomes(server).values()) == 1)
    assert outcomes(server) == {"expired": 1.0}
    until(lambda: queue_length(server) == 0)

    timed = message_class("ModelInferRequest").FromString(one)
    timed.parameters["timeout"].int64_param = 300_000  # microseconds
    code, details, *_ = call(channel, "ModelInfer", timed.SerializeToString())
    assert code is Code.DEADLINE_EXCEEDED, details
    until(lambda: sum(outcomes(server).values()) == 2)
    assert outcomes(server) == {"expired": 2.0}

    cancelled = [infer.future(one) for _ in range(3)]
    until(lambda: queue_length(server) == 3)
    for each in cancelled:
        each.cancel()
    until(lambda: queue_length(server) == 0)
    until(lambda: outcomes(server) == {"expired": 2.0, "cancelled": 3.0})

    waits = [infer.future(one) for _ in range(7)]
    until(lambda: queue_length(server) == 7)
    code, details, metadata, _ = call(channel, "ModelInfer", infer_request("resnet18", image=PIXELS))
    assert (code, "retry-after" in metadata) == (Code.UNAVAILABLE, True), details
    waits.append(infer.future(one))
    answers = [infer_response(each.result()) for each in waits]
    assert all(np.array_equal(answers[0], answer) for answer in answers)
    assert not [line for line in server.log if line["level"] == "error"]


def test_accepted_calls_are_answered_when_the_server_stops(waiting: tuple[LoggedServer, grpc.Channel]) -> None:
    server, channel = waiting
    waits = channel.unary_unary(f"{SERVICE}ModelInfer").future(infer_request("resnet18", image=PIXELS))
    until(lambda: queue_length(server) == 2)
    server.process.send_signal(signal.SIGTERM)
    assert infer_response(waits.result()).shape == (2, 1000)
    assert server.process.wait(timeout=60) == 0


def test_keys_scopes_and_rate_limits_are_those_of_http(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    entries = [("user", "predict", ""), ("boss", "admin", ""), ("slow", "predict", "0.001")]
    keys.write_text("".join(f"{n} {scope} {sha256(n.encode()).hexdigest()} {rate}\n" for n, scope, rate in entries))
    arguments = (*EMULATED, "--policy", "greedy", "--api-key-file", str(keys))
    infer = infer_request("resnet18", image=PIXELS)
    with (
        grpc_server(tmp_path, "resnet18", *arguments) as (server, address),
        grpc.insecure_channel(address) as channel,
    ):

        def code_of(method: str, message: bytes, key: str | None) -> Any:
            metadata = [] if key is None else [("authorization", f"Bearer {key}")]
            return call(channel, method, message, metadata)[0]

        assert code_of("ServerLive", b"", None) is Code.OK
        assert code_of("ServerReady", b"", None) is Code.OK
        assert code_of("ModelInfer", infer, "user") is Code.OK
        assert code_of("ModelInfer", infer, None) is Code.UNAUTHENTICATED
        assert code_of("ModelInfer", infer, "other") is Code.UNAUTHENTICATED
        assert code_of("ModelInfer", infer, "boss") is Code.PERMISSION_DENIED
        assert code_of("ModelMetadata", b"\x0a\x08resnet18", None) is Code.UNAUTHENTICATED
        assert code_of("RepositoryModelLoad", b"\x12\x08resnet18", "user") is Code.PERMISSION_DENIED
        assert code_of("RepositoryModelLoad", b"\x12\x08resnet18", "boss") is Code.OK
        assert code_of("ModelInfer", infer, "slow") is Code.OK
        assert code_of("ModelInfer", infer, "slow") is Code.RESOURCE_EXHAUSTED

        def denied() -> dict[str, float]:
            return {each.labels["status"]: each.value for each in server.samples("batchwright_refusals_total")}

        until(lambda: denied() == {"401": 3.0, "403": 2.0, "429": 1.0})


def test_the_key_is_checked_before_the_message_is_received_which_has_a_time_limit(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"user predict {sha256(b'user').hexdigest()}\n")
    arguments = ("--policy", "greedy", "--api-key-file", str(keys), "--body-timeout-s", "1")
    with grpc_server(tmp_path, "resnet18", *EMULATED, *arguments) as (_, address):

        async def codes() -> list[Any]:
            async with grpc.aio.insecure_channel(address) as channel:
                live, infer = [channel.stream_unary(f"{SERVICE}{name}") for name in ("ServerLive", "ModelInfer")]
                made = [infer(metadata=[("authorization", f"Bearer {key}")]) for key in ("other", "user")]
                return [await each.code() for each in (live(), *made)]  # none sends a message

        assert asyncio.run(codes()) == [Code.OK, Code.UNAUTHENTICATED, Code.DEADLINE_EXCEEDED]


def test_the_certificate_is_that_of_http_and_can_be_replaced(tmp_path: Path) -> None:
    first, second = certificate(tmp_path, "first"), certificate(tmp_path, "second")
    cert, key = install(tmp_path, *first)
    arguments = (*EMULATED, "--policy", "greedy", "--tls-cert", str(cert), "--tls-key", str(key))
    with grpc_server(tmp_path, "resnet18", *arguments) as (server, address):

        def code_with(trusted: Path) -> Any:
            with grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted.read_bytes())) as channel:
                return call(channel, "ModelInfer", infer_request("resnet18", image=PIXELS))[0]

        assert code_with(first[0]) is Code.OK
        assert code_with(second[0]) is Code.UNAVAILABLE
        with grpc.insecure_channel(address) as plain:
            assert call(plain, "ServerLive")[0] is Code.UNAVAILABLE
        install(tmp_path, *second)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.logged("was reloaded"))
        assert code_with(second[0]) is Code.OK
        assert code_with(first[0]) is Code.UNAVAILABLE


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_serve_model("resnet18", *EMULATED, "--port", "0", "--grpc-port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--grpc-port" in done.stderr


def test_the_ports_have_to_differ() -> None:
    port = str(free_port())
    done = run_serve_model("resnet18", *EMULATED, "--port", port, "--grpc-port", port)
    assert done.returncode == 2
    assert f"--port and --grpc-port are both {port}" in done.stderr


def test_a_missing_package_is_reported_with_the_extra() -> None:
    words = ["serve-model", "resnet18", *EMULATED, "--policy", "greedy", "--port", "0", "--grpc-port", "0"]
    program = f"import sys; sys.modules['grpc'] = None; sys.argv = {words!r}; from server.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--grpc-port needs grpc" in done.stderr
    assert "install the extra grpc: pip install grpcio protobuf" in done.stderr


def test_the_server_imports_grpc_only_for_its_port() -> None:
    program = "import sys, server.cli, server.app.serving; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
