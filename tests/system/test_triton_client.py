"""NVIDIA's Triton client against the server, unmodified."""

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.support.harness import Server, serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent, at import
    import tritonclient.http as triton
    import tritonclient.http.aio as triton_aio
    from tritonclient.utils import InferenceServerException

PIXELS = np.random.default_rng(1).integers(0, 256, (2, 224, 224, 3), np.uint8)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("resnet18", "--device", "emulated:googlenet-tesla-p4", "--policy", "greedy") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def image(binary: bool, module: Any = triton) -> Any:
    """Return an input of both pictures; as JSON of the first only, since two exceed the limit of 1 MiB."""
    pixels = PIXELS if binary else PIXELS[:1]
    tensor = module.InferInput("image", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    return tensor


@pytest.fixture(scope="module")
def expected(server: Server) -> Any:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        return client.infer("resnet18", [image(True)]).as_numpy("logits")


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_tensors_are_transferred_in_every_encoding(
    client: Any, expected: Any, binary_in: bool, binary_out: bool, packed: str | None
) -> None:
    result = client.infer(
        "resnet18",
        [image(binary_in)],
        outputs=[triton.InferRequestedOutput("logits", binary_data=binary_out)],
        request_id="7",
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
    )
    np.testing.assert_array_equal(result.as_numpy("logits"), expected if binary_in else expected[:1])
    assert result.get_response()["id"] == "7"
    assert result.get_response()["parameters"]["energy_source"] == "literature"


@pytest.mark.parametrize("binary", [True, False])
def test_classification_ranks_the_logits(client: Any, expected: Any, binary: bool) -> None:
    output = triton.InferRequestedOutput("logits", binary_data=binary, class_count=3)
    classes = client.infer("resnet18", [image(True)], outputs=[output]).as_numpy("logits")
    assert classes.shape == (2, 3)
    for row, logits in zip(classes, expected, strict=True):
        texts = [entry.decode() if isinstance(entry, bytes) else entry for entry in row]
        ranked = [int(text.split(":")[1]) for text in texts]
        assert ranked == np.argsort(-logits)[:3].tolist()
        assert texts[0].endswith(f":class {ranked[0]}")


def test_encoded_pictures_are_bytes_elements(client: Any) -> None:
    from tests.support.http_client import photograph

    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([photograph()], dtype=np.object_))
    assert client.infer("resnet18", [tensor]).as_numpy("logits").shape == (1, 1000)


def test_asynchronous_calls_get_their_own_results(client: Any, expected: Any) -> None:
    pending = [client.async_infer("resnet18", [image(True)], request_id=str(n)) for n in range(8)]
    for n, call in enumerate(pending):
        result = call.get_result()
        assert result.get_response()["id"] == str(n)
        np.testing.assert_array_equal(result.as_numpy("logits"), expected)


def test_the_asyncio_client_gets_the_same_results(server: Server, expected: Any) -> None:
    async def calls() -> list[Any]:
        async with triton_aio.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert await client.is_server_ready()
            tensors = [image(True, triton_aio) for _ in range(4)]
            return await asyncio.gather(*(client.infer("resnet18", [tensor]) for tensor in tensors))

    for result in asyncio.run(calls()):
        np.testing.assert_array_equal(result.as_numpy("logits"), expected)


def test_the_client_reads_all_documents(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("resnet18")
    assert client.get_server_metadata()["name"] == "batchwright"
    assert client.get_model_metadata("resnet18", "1")["versions"] == ["1"]
    assert client.get_model_config("resnet18")["max_batch_size"] == 32
    assert client.get_model_repository_index()[0]["name"] == "resnet18"
    assert client.get_inference_statistics()["model_stats"][0]["inference_count"] >= 0
    assert client.get_inference_statistics("resnet18", "1")["model_stats"][0]["version"] == "1"


def test_the_client_unloads_and_loads_models(client: Any) -> None:
    client.unload_model("resnet18")
    assert not client.is_model_ready("resnet18")
    with pytest.raises(InferenceServerException, match="resnet18 is unloaded"):
        client.infer("resnet18", [image(True)])
    client.load_model("resnet18")
    assert client.is_model_ready("resnet18")
    with pytest.raises(InferenceServerException, match="send none"):
        client.load_model("resnet18", config="{}")
    with pytest.raises(InferenceServerException, match="no model 'alexnet'"):
        client.load_model("alexnet")
    assert client.infer("resnet18", [image(True)]).as_numpy("logits").shape[1] == 1000


def test_error_messages_reach_the_client(client: Any) -> None:
    wrong = triton.InferInput("image", [1, 2], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 2), np.float32))
    with pytest.raises(InferenceServerException, match="the model takes `image` as UINT8"):
        client.infer("resnet18", [wrong])
    with pytest.raises(InferenceServerException, match="no model 'alexnet'"):
        client.infer("alexnet", [image(True)])
