"""Captured graphs, uploads and page-locked memory on a CUDA device; run by `pytest -m gpu tests/gpu`."""

import asyncio
import logging
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from server.backends.buckets import bucket_sizes
from server.backends.cuda import networks
from server.backends.cuda.graph import GraphDevice
from server.backends.cuda.page_locked import page_locked
from server.backends.cuda.runtime import CudaRuntime
from server.backends.cuda.uploads import UploadedSample
from server.backends.executor import Batch, Standby, ThreadExecutor
from server.backends.model_devices import ModelDevices
from server.backends.torch_images import make_image_device
from server.errors import NotFiniteError
from server.models.images.codec import Pixels, synthetic_images
from server.models.images.torchvision_source import PixelNet, load_image_model
from server.models.model import ServedModel

pytestmark = pytest.mark.gpu
LARGEST = 20
_Loaded = tuple[ServedModel[Any], PixelNet]


@pytest.fixture(scope="module", params=["resnet18", "googlenet"])
def loaded(request: pytest.FixtureRequest) -> _Loaded:
    """The model on the GPU, fp16."""
    model, net = load_image_model(request.param, "random", LARGEST)
    net.move_to(torch.device("cuda:0"), torch.float16)
    torch.backends.cudnn.benchmark = True
    torch.cuda.synchronize()
    return model, net


@pytest.fixture(scope="module")
def samples(loaded: _Loaded) -> list[Pixels]:
    return list(synthetic_images(loaded[0].codec, LARGEST, np.random.default_rng(1)))


@pytest.fixture(scope="module")
def expected(loaded: _Loaded, samples: Sequence[Pixels]) -> NDArray[np.float32]:
    """Logits of the same network without a graph."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = loaded[1](torch.from_numpy(np.stack(samples)).cuda()).float().cpu().numpy()
    return logits


@pytest.fixture
def device(loaded: _Loaded, caplog: pytest.LogCaptureFixture) -> GraphDevice:
    caplog.set_level(logging.WARNING)
    return GraphDevice(*loaded, CudaRuntime(torch.device("cuda:0")))


def assert_close(outputs: Sequence[Any], expected: NDArray[np.float32]) -> None:
    found = np.stack(outputs)
    assert np.linalg.norm(found - expected) <= 0.1 * np.linalg.norm(expected)


def test_every_bucket_is_captured_and_gives_the_logits_of_the_network(
    device: GraphDevice, samples: list[Pixels], expected: NDArray[np.float32], caplog: pytest.LogCaptureFixture
) -> None:
    for size in reversed(bucket_sizes(LARGEST)):
        assert_close(device.serve(Batch("m", samples[:size])), expected[:size])
    for size in (17, 3, 20, 1, 20):  # again, with both buffers
        assert_close(device.serve(Batch("m", samples[-size:])), expected[-size:])
    assert "not captured" not in caplog.text


def test_uploaded_samples_give_the_same_logits_in_any_order(
    device: GraphDevice, samples: list[Pixels], expected: NDArray[np.float32]
) -> None:
    async def scenario() -> None:
        for shift in range(3):
            order = np.roll(np.arange(LARGEST), shift)
            inputs = [device.upload(samples[at]) for at in order]
            assert all(isinstance(each, UploadedSample) for each in inputs)
            await asyncio.sleep(0)
            inputs[5] = samples[order[5]]
            assert_close(device.serve(Batch("m", inputs)), expected[order])

    asyncio.run(scenario())


def test_samples_are_copied_from_page_locked_shared_memory(
    device: GraphDevice, samples: list[Pixels], expected: NDArray[np.float32], caplog: pytest.LogCaptureFixture
) -> None:
    size = samples[0].nbytes
    mapped = mmap.mmap(-1, 4 * (size + 4096))
    remove = page_locked.add(mapped)
    assert not caplog.text, "it was not page-locked"
    arrays = []
    for number in range(4):
        array: Pixels = np.ndarray(samples[0].shape, np.uint8, mapped, number * (size + 4096) + 100)
        array[:] = samples[number]
        arrays.append(array)
    assert_close(device.serve(Batch("m", [device.upload(array) for array in arrays])), expected[:4])
    remove()


def test_a_standby_launch_runs_while_the_outputs_before_are_collected(
    device: GraphDevice, samples: list[Pixels], expected: NDArray[np.float32]
) -> None:
    async def scenario() -> None:
        for size in (LARGEST, 1):
            await executor.run(Batch("m", samples[:size]))
        standby, following = Standby(), asyncio.get_running_loop().create_future()
        inputs = [executor.upload("m", each) for each in samples]
        standby.offer(Batch("m", inputs, standby=standby), following)
        first = await executor.run(Batch("m", samples[:1], standby=standby))
        second = await following
        assert_close(first.outputs, expected[:1])
        assert_close(second.outputs, expected)
        assert second.started >= first.finished

    executor = ThreadExecutor(ModelDevices({"m": device}), "d")
    try:
        asyncio.run(scenario())
    finally:
        executor.close()


def test_all_implementations_have_close_logits_and_outputs_that_are_not_finite_are_noticed(
    loaded: _Loaded, samples: list[Pixels]
) -> None:
    model, net = loaded
    runtime = CudaRuntime(torch.device("cuda:0"))
    batches = networks.reference_batches(net, runtime, samples)
    choice = networks.choose(
        networks.implementations(net), lambda network: networks.seconds_per_batch(network, runtime, batches, 0.1)
    )
    assert choice is not None
    assert {*choice.times} == {"eager", "fused", "fused-but-stem"}
    broken = GraphDevice(model, lambda pixels: net(pixels) / 0.0, runtime)
    with pytest.raises(NotFiniteError):
        broken.serve(Batch("m", [np.zeros(model.codec.shape, np.uint8)] * 2))


def test_whole_server_path_has_the_logits_of_the_cpu(samples: list[Pixels], loaded: _Loaded) -> None:
    name = loaded[0].name
    exact = make_image_device(*load_image_model(name, "random"), torch.device("cpu"), "fp32")
    graphs = GraphDevice(*loaded, CudaRuntime(torch.device("cuda:0")))
    outputs = exact.serve(Batch(name, samples[:4]))
    assert_close(graphs.serve(Batch(name, samples[:4])), np.stack(outputs))
