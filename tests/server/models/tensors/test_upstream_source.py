"""Models of other servers: what is read from them, what is sent, and what is wrong with their answers."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.types import SpecError
from server.errors import BadInputError, DeviceUnavailableError, ModelError
from server.models.sources import source_of
from server.models.tensors import upstream_connection
from server.models.tensors.upstream_source import UpstreamModel
from server.models.upstream_spec import upstreams_of
from tests.support.certificates import certificate
from tests.support.fake_upstream import LENGTH, FakeUpstream, Inference, error, metadata, upstream

SAMPLES = [{"x": np.array([n, n + 0.5], np.float32)} for n in range(3)]


_models: list[UpstreamModel] = []


@pytest.fixture(autouse=True)
def _close_models() -> Iterator[None]:
    yield
    for model in _models:
        model.close()
    _models.clear()


def model_of(fake: FakeUpstream) -> UpstreamModel:
    _models.append(UpstreamModel(upstreams_of(fake.spec)[0]))
    return _models[-1]


@pytest.fixture
def fake() -> Iterator[FakeUpstream]:
    with upstream() as running:
        yield running


NUMBERS = {
    "BOOL": np.array([True, False]),
    **{f"UINT{8 * size}": np.array([0, 2 ** (8 * size) - 1], f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.array([-(2 ** (8 * size - 1)), 7], f"<i{size}") for size in (1, 2, 4, 8)},
    "FP16": np.array([0.5, -65504], np.float16),
    "FP32": np.array([0.1, np.inf], np.float32),
    "FP64": np.array([0.1, -1e300]),
    "BF16": np.array([0.15625, -3e38], np.float32),
    "BYTES": np.array([b"", b"\0\xff caf\xc3\xa9"], object),
}


def test_all_datatypes_arrive_and_return_unchanged_in_one_call() -> None:
    described = metadata(**{datatype.lower(): (datatype, [-1, 2]) for datatype in NUMBERS})
    with upstream(metadata=described) as fake:
        model = model_of(fake)
        samples = [{name.lower(): array[::step] for name, array in NUMBERS.items()} for step in (1, -1)]
        outputs = model.infer(samples)
    for datatype, array in NUMBERS.items():
        found = outputs[f"out_{datatype.lower()}"]
        expected = np.stack([array, array[::-1]])
        if datatype == "BF16":
            np.testing.assert_allclose(found, expected, rtol=2**-8)
        else:
            np.testing.assert_array_equal(found, expected)
        assert found.dtype == array.dtype
    assert fake.batches == [2]


def test_a_scalar_and_a_shape_that_varies() -> None:
    with upstream(metadata=metadata(n=("INT64", [-1]), s=("FP32", [-1, -1, 3]))) as fake:
        model = model_of(fake)
        samples = [{"n": np.array(k), "s": np.full((2, 3), k, np.float32)} for k in range(40)]
        outputs = model.infer(samples)
    assert outputs["out_n"].tolist() == list(range(40))
    assert outputs["out_s"].shape == (40, 2, 3)
    assert outputs["out_s"][:, 1, 2].tolist() == list(range(40))


def test_outputs_as_json_are_read_too(fake: FakeUpstream) -> None:
    def reply(call: Inference) -> Any:
        output = {"name": "out_x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
        return 200, {}, json.dumps({"outputs": [output]}).encode()

    fake.reply = reply
    assert model_of(fake).infer(SAMPLES[:1])["out_x"].tolist() == [[1.0, 2.5]]


def test_null_and_absent_are_the_same_in_all_documents_of_a_server(fake: FakeUpstream) -> None:
    fake.metadata = {
        **{name: [{**each, "parameters": None} for each in fake.metadata[name]] for name in ("inputs", "outputs")},
        "name": "echo",
        "versions": None,
        "platform": None,
        "parameters": None,
    }
    fake.config = {"max_batch_size": 8, "parameters": None, "dynamic_batching": None}
    fake.server = {"name": "fake", "version": None, "extensions": None}
    model = model_of(fake)
    assert model.description.about == "unknown platform, version unknown"
    output = {"name": "out_x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0.5], "parameters": None}
    document = {"id": None, "model_version": None, "parameters": None, "outputs": [output]}
    fake.reply = lambda call: (200, {}, json.dumps(document).encode())
    assert model.infer(SAMPLES[:1])["out_x"].tolist() == [[0, 0.5]]
    fake.reply = lambda call: (400, {}, b'{"error": null}')
    with pytest.raises(BadInputError, match=r"answered 400: no message$"):
        model.infer(SAMPLES[:1])


def test_a_server_that_lacks_binary_tensors_is_told_so_until_it_has_answered_a_batch(fake: FakeUpstream) -> None:
    fake.server = {"name": "mlserver", "version": "1", "extensions": []}
    fake.reply = lambda call: error(422, "input data is not JSON")
    model = model_of(fake)
    with pytest.raises(BadInputError, match="not JSON; its server does not list the extension binary_tensor_data"):
        model.infer(SAMPLES[:1])
    fake.reply = Inference.echo
    model.infer(SAMPLES[:1])
    fake.reply = lambda call: error(422, "a wrong value")
    with pytest.raises(BadInputError, match=r"a wrong value$"):
        model.infer(SAMPLES[:1])


def test_a_large_batch_is_sent_whole_in_parts() -> None:
    with upstream(metadata=metadata(x=("FP32", [-1, 300_000])), config=None) as fake:
        rng = np.random.default_rng(0)
        samples = [{"x": rng.normal(size=300_000).astype(np.float32)} for _ in range(20)]
        outputs = model_of(fake).infer(samples)
    np.testing.assert_array_equal(outputs["out_x"], np.stack([sample["x"] for sample in samples]))


def test_a_server_that_speaks_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path, "upstream")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with upstream(tls=tls) as fake:
        with pytest.raises(SpecError, match="CERTIFICATE_VERIFY_FAILED"):
            model_of(fake)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        model = model_of(fake)
        model.check_ready(5.0)
        assert model.infer(SAMPLES)["out_x"].tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
        fake.drop_connections()
        assert len(model.infer(SAMPLES)["out_x"]) == 3


def test_signature_and_largest_batch_are_those_of_the_server(fake: FakeUpstream) -> None:
    source = source_of(fake.spec)
    source.check("m", "pretrained", None)
    served, _ = source.load("m", "pretrained", 32, 1)
    assert (served.max_batch_size, served.platform, source.max_batch_size) == (8, "oip", 8)
    assert source.settings("m") == f"http://127.0.0.1:{fake.port}/echo, fake, version 1"
    with pytest.raises(SpecError, match="m is a model of another server, which is not emulated"):
        source.emulate("m", 8)
    with pytest.raises(SpecError, match="leave out --stages"):
        source.check("m", "pretrained", 4)
    with pytest.raises(SpecError, match="leave out --weights"):
        source.check("m", "weights.pt", None)


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_without_configuration_has_no_largest_batch_of_its_own(fake: FakeUpstream, status: int) -> None:
    fake.config = None
    source = source_of(fake.spec)
    source.check("m", "pretrained", None)
    assert source.load("m", "pretrained", 77, 1)[0].max_batch_size == 77


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"max_batch_size": 0}}, "max_batch_size 0, so it takes no batches; set max_batch_size, or"),
        ({"config": {"name": "echo"}}, "max_batch_size None, so it takes no batches"),
        ({"config": b"[]"}, "config is no JSON object"),
        ({"metadata": metadata(x=("FP32", [1, 4])), "config": None}, r"shape \[1, 4\], so it takes no batches; set"),
        ({"metadata": metadata(x=("FP32", []))}, r"shape \[\], so it takes no batches"),
        ({"metadata": metadata(x=("FP8", [-1, 4]))}, "input x has the datatype 'FP8', which is not served"),
        ({"metadata": metadata(x=("FP32", [-1, 0]))}, "metadata of its inputs are malformed"),
        ({"metadata": metadata()}, "the metadata have no inputs"),
        ({"metadata": {"inputs": [{"name": "x"}]}}, "metadata of its inputs are malformed .KeyError"),
        ({"metadata": {"inputs": 3}}, "metadata of its inputs are malformed"),
        ({"metadata": b"<html>"}, "is no JSON object; is it an inference server"),
        (
            {"metadata": None},
            "the server answers 404 to GET /v2/models/echo .nothing at .*; name a model that is ready",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_an_error_of_one_line(change: dict[str, Any], message: str) -> None:
    with upstream(**change) as fake, pytest.raises(SpecError, match=message) as caught:
        source_of(fake.spec).check("m", "pretrained", None)
    assert "\n" not in str(caught.value)
    assert fake.spec in str(caught.value)


def test_no_server_and_no_http_are_errors_of_one_line() -> None:
    with upstream() as gone:
        pass
    with pytest.raises(SpecError, match=r"does not answer: .*refused; start that server first, or fix the URL"):
        model_of(gone)
    with pytest.raises(SpecError, match=r"no-such-host\.invalid:1 does not answer"):
        UpstreamModel(upstreams_of("oip:http://no-such-host.invalid:1/m")[0])
    with raw_server(b"SSH-2.0-OpenSSH\r\n") as port, pytest.raises(SpecError, match="does not answer in HTTP"):
        UpstreamModel(upstreams_of(f"oip:http://127.0.0.1:{port}/m")[0])
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n") as port, pytest.raises(SpecError, match="does not answer"):
        UpstreamModel(upstreams_of(f"oip:https://127.0.0.1:{port}/m")[0])
    keyed = raw_server(b'HTTP/1.1 401 X\r\n\r\n{"error": "no key"}')
    with (
        keyed as port,
        pytest.raises(SpecError, match=r"answers 401 to GET .* \(no key\); no key is sent, so let that"),
    ):
        UpstreamModel(upstreams_of(f"oip:http://127.0.0.1:{port}/m")[0])


class raw_server:  # noqa: N801  (a context manager)
    """Answers every connection with these bytes, and closes it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> int:
        threading.Thread(target=self._serve, daemon=True).start()
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            connected.recv(65536)
            connected.sendall(self._answer)
            connected.close()


@contextmanager
def endless_server(begin: bytes, more: bytes) -> Iterator[int]:
    """A server that sends `more` again and again to its only connection, until that is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send() -> None:
            connected, _ = listening.accept()
            with connected, suppress(OSError):
                connected.sendall(begin)
                while True:
                    connected.sendall(more)
                    time.sleep(0.001)

        thread = threading.Thread(target=send)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def edited(**changes: Any) -> Callable[[Inference], Any]:
    """An echo whose only output has these entries."""

    def reply(call: Inference) -> Any:
        _, headers, body = call.echo()
        length = int(headers[LENGTH])
        document = json.loads(body[:length])
        document["outputs"][0].update(changes)
        head = json.dumps(document).encode()
        return 200, {LENGTH: str(len(head))}, head + body[length:]

    return reply


BINARY_24 = {"binary_data_size": 24}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda call: (200, {}, b"not JSON"), "JSONDecodeError"),
        (lambda call: (200, {}, b"[]"), "TypeError"),
        (lambda call: (200, {}, b"{}"), "KeyError: 'outputs'"),
        (lambda call: (200, {LENGTH: "many"}, b"{}"), "ValueError"),
        (lambda call: (200, {LENGTH: "-1"}, b'{"outputs": []}'), "not valid"),
        (lambda call: (200, {LENGTH: "999999999999"}, b'{"outputs": []}'), "15 bytes, of which 999999999999"),
        (lambda call: (200, {}, b'{"outputs": [{}]}'), "KeyError: 'name'"),
        (edited(parameters={"binary_data_size": 20}), "FP32 .3, 2. takes 24 bytes; 20 bytes follow"),
        (edited(parameters={"binary_data_size": 400}), "of which .* are described"),
        (edited(parameters={"binary_data_size": -24}), "and -24 bytes"),
        (edited(parameters={"binary_data_size": "24"}), "and 24 bytes"),
        (edited(shape=[3, -2]), r"shape \[3, -2\]"),
        (edited(shape=[4, 2]), "takes 32 bytes"),
        (edited(shape=3), "TypeError"),
        (edited(datatype="FP8"), "KeyError: 'FP8'"),
        (edited(datatype="BYTES"), "not valid"),
        (edited(parameters={}), "KeyError: 'data'"),
        (edited(parameters={}, data=[1]), r"does not fit shape \[3, 2\]"),
    ],
)
def test_a_malformed_response_is_an_error_of_the_model(
    fake: FakeUpstream, reply: Callable[[Inference], Any], message: str
) -> None:
    model = model_of(fake)
    fake.reply = reply
    with pytest.raises(ModelError, match=message) as caught:
        model.infer(SAMPLES)
    assert "\n" not in str(caught.value)
    fake.reply = Inference.echo
    assert model.infer(SAMPLES)["out_x"][2].tolist() == [2.0, 2.5], "the connection is still usable"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"X-Long": "a" * 70_000}, "does not answer in HTTP: got more than 65536 bytes when reading header line"),
        ({f"X-{n}": "a" for n in range(200)}, "does not answer in HTTP: got more than 100 headers"),
        ({"Content-Length": str(2**40)}, "1099511627776 bytes, over the maximum"),
    ],
)
def test_a_response_that_is_too_large_is_an_error_of_the_model(
    fake: FakeUpstream, headers: dict[str, str], message: str
) -> None:
    model = model_of(fake)
    fake.reply = lambda call: (200, headers, b"{}")
    with pytest.raises(ModelError, match=message):
        model.infer(SAMPLES)
    fake.reply = Inference.echo
    assert len(model.infer(SAMPLES)["out_x"]) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadInputError),
        (413, BadInputError),
        (422, BadInputError),
        (500, ModelError),
        (501, ModelError),
        (302, ModelError),
        *((status, DeviceUnavailableError) for status in (401, 403, 404, 429, 502, 503, 504)),
    ],
)
def test_an_error_of_the_server_has_its_message(fake: FakeUpstream, status: int, kind: type[Exception]) -> None:
    model = model_of(fake)
    fake.reply = lambda call: error(status, "the first\nreason")
    with pytest.raises(kind, match=f"echo answered {status}: the first reason"):
        model.infer(SAMPLES)
    fake.reply = lambda call: (status, {}, b"\xff plain")
    with pytest.raises(kind, match="plain"):
        model.infer(SAMPLES)


def test_a_model_that_is_not_ready_any_more_is_not_the_fault_of_the_sample(fake: FakeUpstream) -> None:
    model = model_of(fake)
    fake.reply = lambda call: error(400, "Request for unknown model: 'echo' is not found")
    with pytest.raises(BadInputError, match="unknown model"):
        model.infer(SAMPLES[:1])
    fake.ready = 400
    with pytest.raises(DeviceUnavailableError, match="answers 400: the model is not ready"):
        model.infer(SAMPLES[:1])


@pytest.mark.parametrize("headers", [b"Transfer-Encoding: chunked\r\n", b""])
def test_a_response_without_a_length_is_read_up_to_a_maximum(
    fake: FakeUpstream, headers: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(fake)
    monkeypatch.setattr(upstream_connection, "_MAX_RESPONSE", 2**21)
    body = b"100000\r\n%s\r\n" % bytes(2**20) if headers else bytes(2**20)
    with raw_server(b"HTTP/1.1 200 OK\r\n%s\r\n" % headers + 3 * body) as port:
        model._connection._upstream = upstreams_of(f"oip:http://127.0.0.1:{port}/echo")[0]
        with pytest.raises(ModelError, match="over the maximum of 2097152"):
            model.infer(SAMPLES)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_response_that_never_ends_is_given_up_after_the_timeout(fake: FakeUpstream, answer: bytes) -> None:
    model = model_of(fake)
    with endless_server(answer, b"HTTP/1.1 100 Continue\r\n\r\n" if b"100" in answer else b"a") as port:
        model._connection._upstream = upstreams_of(f"oip:http://127.0.0.1:{port}/echo")[0]
        with pytest.raises(DeviceUnavailableError, match=r"does not answer within 0\.2 s"):
            model.check_ready(0.2)


def test_one_connection_is_kept_alive_and_opened_again_when_the_server_has_closed_it(fake: FakeUpstream) -> None:
    model = model_of(fake)
    for _ in range(5):
        model.infer(SAMPLES)
    opened = fake.connections
    fake.drop_connections()
    assert len(model.infer(SAMPLES)["out_x"]) == 3
    assert fake.connections == opened + 1
    fake.reply = lambda call: (200, {**call.echo()[1], "Connection": "close"}, call.echo()[2])
    for _ in range(3):
        assert len(model.infer(SAMPLES)["out_x"]) == 3


def test_a_fresh_connection_that_breaks_is_not_tried_again(fake: FakeUpstream) -> None:
    model = model_of(fake)
    calls = []

    def hang_up(call: Inference) -> Any:
        calls.append(call)
        fake.drop_connections()
        return call.echo()

    fake.reply = hang_up
    with pytest.raises(DeviceUnavailableError):
        model.infer(SAMPLES)
    assert len(calls) == 1
    with pytest.raises(DeviceUnavailableError):
        model.infer(SAMPLES)


def test_an_answer_before_the_body_is_read_is_the_answer() -> None:
    described = metadata(x=("FP32", [-1, 1_000_000]))
    with upstream(metadata=described) as fake:
        model = model_of(fake)
    text = b'{"error": "the body is too large"}'
    answer = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    with raw_server(answer) as port:
        model._connection._upstream = upstreams_of(f"oip:http://127.0.0.1:{port}/echo")[0]
        with pytest.raises((BadInputError, DeviceUnavailableError)):  # a reset may overtake the answer
            model.infer([{"x": np.zeros(1_000_000, np.float32)}] * 4)


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({"versions": ["1", 2]}, "fake, version 1 2"),
        ({"versions": 3, "platform": None}, "unknown platform, version unknown"),
    ],
)
def test_platform_and_versions_are_named_as_far_as_the_server_has_them(given: dict[str, Any], about: str) -> None:
    with upstream(metadata={**metadata(x=("FP32", [-1, 2])), **given}) as fake:
        assert model_of(fake).description.about == about


def test_readiness_and_a_changed_signature(fake: FakeUpstream) -> None:
    model = model_of(fake)
    model.check_ready(5.0)
    model.check_signature(5.0)
    fake.ready = 400
    with pytest.raises(DeviceUnavailableError, match="answers 400: the model is not ready"):
        model.check_ready(5.0)
    fake.config = {"max_batch_size": 16}
    model.check_signature(5.0)
    fake.config = {"max_batch_size": 4}
    with pytest.raises(DeviceUnavailableError, match="the largest batch is 8 and 4; load the model again"):
        model.check_signature(5.0)
    fake.metadata = metadata(x=("FP32", [-1, 3]))
    with pytest.raises(DeviceUnavailableError, match=r"input x is FP32 \[-1, 2\] and FP32 \[-1, 3\]"):
        model.check_signature(5.0)
    fake.metadata = metadata(z=("FP32", [-1, 2]))
    with pytest.raises(DeviceUnavailableError, match=r"input x is FP32 \[-1, 2\] and missing"):
        model.check_signature(5.0)
    fake.metadata = None
    with pytest.raises(DeviceUnavailableError, match="404"):
        model.check_signature(5.0)
