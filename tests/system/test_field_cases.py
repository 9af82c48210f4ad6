"""Cases of public reports about other inference servers, tried on this one. Each test names its report."""

import gzip
import http.client
import io
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.support.harness import Server, command_line, free_port, serving, start_process
from server.models.images.codec import ImageCodec
from tests.support.http_client import Response, fetch

MODELS = """
import numpy as np
from batchwright import Model, Tensor


class Texts(Model):
    inputs = {"text": Tensor("BYTES", [1])}
    outputs = {"text": Tensor("BYTES", [1])}

    def run(self, text):
        return {"text": text}


class Rows(Model):
    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"y": Tensor("FP32", [4])}

    def run(self, x):
        if (x == 13).any():
            raise RuntimeError("unlucky")
        return {"y": x}

    def render(self, outputs):
        if (outputs["y"] == 7).any():
            raise KeyError("lucky")
        return outputs


class Slow(Rows):
    def load(self, device):
        import time
        print("loading", flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("field") / "field.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Server]:
    models = (f"texts={file}:Texts", f"rows={file}:Rows")
    with serving(*models, "--device", "cpu", "--policy", "timeout:50", "--max-batch-size", "8") as running:
        yield running


def infer(url: str, model: str, tensor: dict[str, Any], headers: dict[str, str] | None = None, **more: Any) -> Response:
    body = json.dumps({"inputs": [tensor], **more}).encode()
    return fetch(url, f"/v2/models/{model}/infer", body, headers=headers)


def rows(shape: Any, data: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": shape, "data": data}


@pytest.mark.parametrize("shape", [[-1, 4], [4], [], [0, 4], [1, -4], [1, 4, 1], [2**40, 4], [1.0, 4], "14", None])
def test_a_shape_that_is_none_is_answered_with_400_and_the_server_goes_on(server: Server, shape: Any) -> None:
    """triton-inference-server/server#3563, triton-inference-server/core#96: the server ended."""
    answer = infer(server.url, "rows", rows(shape, [1, 2, 3, 4]))
    assert answer.status in (400, 413)  # 413: of more samples than a call may have
    assert answer.json["error"]
    assert infer(server.url, "rows", rows([1, 4], [1, 2, 3, 4])).status == 200


def test_nested_data_are_those_of_the_flat_form(server: Server) -> None:
    """triton-inference-server/server#4405 (BYTES), kserve/kserve#2955 (FP32): an error, for nested data."""
    for data in (["a", "b\0"], [["a"], ["b\0"]]):
        tensor = {"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": data}
        assert infer(server.url, "texts", tensor).json["outputs"][0]["data"] == ["a", "b\0"]
    nested, flat = [[1, 2, 3, 4], [5, 6, 7.5, 8]], [1, 2, 3, 4, 5, 6, 7.5, 8]
    for numbers in (nested, flat):
        assert infer(server.url, "rows", rows([2, 4], numbers)).json["outputs"][0]["data"] == flat


def test_a_compressed_answer_says_so_and_an_unknown_compression_is_answered_with_415(server: Server) -> None:
    """triton-inference-server/server#5185 and #2736: Content-Encoding was missing."""
    tensor = rows([64, 4], list(range(14, 270)))
    plain = infer(server.url, "rows", tensor)
    answer = infer(server.url, "rows", tensor, {"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.body))["outputs"] == plain.json["outputs"]
    refused = infer(server.url, "rows", tensor, {"Content-Encoding": "br"})
    assert (refused.status, "br" in refused.json["error"]) == (415, True)


def test_the_id_of_a_call_is_that_of_its_answer(server: Server) -> None:
    """kserve/kserve#3019, kserve/kserve#2944: it was lost, and a missing one was an error."""
    tensor = rows([1, 4], [1, 2, 3, 4])
    assert infer(server.url, "rows", tensor, id="größer-1").json["id"] == "größer-1"
    assert "id" not in infer(server.url, "rows", tensor).json
    assert "id" not in infer(server.url, "rows", tensor, id=None).json


def test_what_one_sample_raises_is_no_answer_of_the_others_in_its_batch(server: Server) -> None:
    """Lightning-AI/LitServe#340: all calls of the batch got the exception of one."""
    values = [1, 13, 2, 7, 3]
    calls = [json.dumps({"inputs": {"x": [value] * 4}}).encode() for value in values]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = [*pool.map(lambda body: fetch(server.url, "/predict/rows", body), calls)]
    assert [answer.status for answer in answers] == [200, 500, 200, 500, 200]
    assert [answer.json["outputs"]["y"][0] for answer in answers if answer.status == 200] == [1, 2, 3]


def test_a_connection_is_kept_longer_than_a_proxy_keeps_it(server: Server) -> None:
    """kserve/kserve#5446, ray-project/ray#54127: after 5 s, while proxies keep their connections for 60 s."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for pause in (0, 6):
        time.sleep(pause)
        connection.request("POST", "/predict/rows", json.dumps({"inputs": {"x": [1, 2, 3, 4]}}))
        assert connection.getresponse().read()
        assert connection.sock is not None, "the server closes the connection"
    connection.close()


@pytest.mark.parametrize(
    ("mode", "options"), [("L", {}), ("1", {}), ("P", {"transparency": bytes([0, 128])}), ("I;16", {}), ("LA", {})]
)
def test_images_that_are_not_rgb_are_decoded(mode: str, options: dict[str, Any]) -> None:
    """pytorch/serve#65 (a black and white JPEG), meta-pytorch/torchcodec#1731 (a palette with transparency)."""
    grey = np.linspace(0, 255, 256 * 256).reshape(256, 256)
    image = (
        Image.fromarray((257 * grey).astype(np.uint16)) if mode == "I;16" else Image.fromarray(grey.astype(np.uint8))
    )
    image = image if mode == "I;16" else image.convert(mode)
    data = io.BytesIO()
    image.save(data, "PNG", **options)
    codec = ImageCodec()
    decoded = codec.decode(data.getvalue(), codec.decode_cost(data.getvalue()))
    blocks, expected = (each.reshape(14, 16, 14, 16, -1).mean((1, 3)) for each in (decoded, grey[16:240, 16:240]))
    assert abs(blocks - expected).max() < 12, "dithering keeps the mean of a block"


def test_a_server_listens_on_both_families(file: Path) -> None:
    """kserve/kserve#4558: on IPv4 only, so that in a cluster of IPv6 the probes failed."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    with serving(f"rows={file}:Rows", "--device", "cpu", "--policy", "greedy", "--host", "::") as running:
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{running.url.rsplit(':', 1)[1]}"
            assert fetch(url, "/v2/health/ready").status == 200


def test_a_signal_while_a_model_is_loaded_ends_the_server(file: Path, tmp_path: Path) -> None:
    """triton-inference-server/core#324: it waited, or crashed, until the model was loaded."""
    log = tmp_path / "log"
    command = [*command_line("serve-model"), f"slow={file}:Slow", "--device", "cpu", "--port", str(free_port())]
    with log.open("w") as output:
        process: subprocess.Popen[bytes] = start_process(command, output.fileno())
        while "loading" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (143, -signal.SIGTERM)
    assert "Traceback" not in log.read_text()
