"""The CPU device of image models: batches, stages, errors and device specs."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from policies.cpus import available_cpus
from policies.types import SpecError
from server.backends import torch_device, torch_images
from server.backends.activations import ActivationBuffers, ActivationRow
from server.backends.executor import Batch, ThreadExecutor
from server.backends.real_device import Precision, cpu_threads, device_settings, find_device, resolve_precision
from server.backends.torch_device import describe_unusable_gpu, resolve_device
from server.backends.torch_images import ImageDevice, make_image_device, place
from server.backends.warm_up import warm_up
from server.energy.nvml import Driver, NvmlError
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError
from server.models.images.codec import ImageCodec, Pixels, synthetic_images
from server.models.images.torchvision_source import PixelNet, load_image_model
from server.models.model import ServedModel
from tests.support.closeness import BOUNDS, logits, relative_l2

NAMES = ("resnet18", "googlenet")


pytestmark = pytest.mark.usefixtures("few_calibration_images", "small_images_in_the_module")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, ServedModel[ImageCodec]]]:
    threads = torch.get_num_threads()
    yield {}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def devices(models: dict[str, ServedModel[ImageCodec]]) -> dict[str, ImageDevice]:
    loaded = [load_image_model(name, "random", max_batch_size=5) for name in NAMES]
    models.update({model.name: model for model, _ in loaded})
    return {model.name: make_image_device(model, net, torch.device("cpu")) for model, net in loaded}


@pytest.fixture(scope="module")
def device(devices: dict[str, ImageDevice]) -> ImageDevice:
    return devices["resnet18"]


@pytest.fixture(scope="module")
def samples(device: ImageDevice, models: dict[str, ServedModel[ImageCodec]]) -> list[Pixels]:
    return list(synthetic_images(models["resnet18"].codec, 5, np.random.default_rng(2)))


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_a_batch_equal_those_of_each_sample_alone(
    devices: dict[str, ImageDevice], samples: list[Pixels], name: str
) -> None:
    device = devices[name]
    together = np.stack(device.serve(Batch(name, samples)))
    alone = np.stack([device.serve(Batch(name, [sample]))[0] for sample in samples])
    largest = np.abs(alone).max()
    assert np.abs(together - alone).max() < 1e-4 * largest  # float32 summed in another order
    between = [np.abs(a - b).max() for i, a in enumerate(alone) for b in alone[:i]]
    assert min(between) > 1e-1 * largest


def test_a_small_batch_after_a_large_one_gives_the_same_logits(device: ImageDevice, samples: list[Pixels]) -> None:
    before = device.serve(Batch("resnet18", samples[:1]))[0]
    device.serve(Batch("resnet18", samples))
    assert np.array_equal(device.serve(Batch("resnet18", samples[:1]))[0], before)


def test_outputs_are_float32_and_each_owns_its_memory(device: ImageDevice, samples: list[Pixels]) -> None:
    first, second = device.serve(Batch("resnet18", samples[:2]))
    assert first.dtype == np.float32
    assert first.shape == (1000,)
    assert first.base is None
    assert second.base is None
    assert not np.shares_memory(first, second)


def test_read_only_samples_are_accepted(device: ImageDevice, samples: list[Pixels]) -> None:
    frozen = np.frombuffer(samples[0].tobytes(), np.uint8).reshape(samples[0].shape)
    expected = device.serve(Batch("resnet18", samples[:1]))[0]
    assert np.array_equal(device.serve(Batch("resnet18", [frozen]))[0], expected)


def test_a_batch_too_large_or_of_another_shape_raises(device: ImageDevice, samples: list[Pixels]) -> None:
    for inputs in ([*samples, samples[0]], [samples[0][:1]], [samples[0], samples[1][0]]):
        with pytest.raises(ValueError, match=r"shape|dimension"):
            device.serve(Batch("resnet18", inputs))


def failing(device: ImageDevice, error: Exception | None) -> ImageDevice:
    """A device like this whose network raises, or whose logits are not finite."""

    def run(_: Any, gather: Callable[[], torch.Tensor]) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.full((len(gather()), 1000), float("nan"))

    return ImageDevice(device._model, run, device._device)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLostError),
        (RuntimeError("expected scalar type"), RuntimeError),
        (None, NotFiniteError),
    ],
)
def test_errors_are_translated_by_type(
    device: ImageDevice, samples: list[Pixels], error: Exception | None, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as raised:
        failing(device, error).serve(Batch("resnet18", samples[:2]))
    assert raised.type is expected


def test_batches_merge_and_split_between_stages(samples: list[Pixels]) -> None:
    staged = make_image_device(*load_image_model("resnet18", "random", 5, stages=4), torch.device("cpu"))
    whole = np.stack(staged.serve(Batch("resnet18", samples)))

    def run(inputs: Sequence[Any], first: int, stages: int | None) -> list[Any]:
        return list(staged.serve(Batch("resnet18", inputs, first, stages)))

    early = run(run(samples[:2], 0, 1), 1, 1)  # at stage 2 after two launches
    late = run(samples[2:], 0, 2)
    four = run([late[2], *early, late[0]], 2, 1)  # in another order, and without late[1]
    outputs = [*run(four, 3, None), *run([late[1]], 2, None)]
    expected = whole[[4, 0, 1, 2, 3]]
    assert np.abs(np.stack(outputs) - expected).max() < 1e-4 * np.abs(whole).max()


def test_an_unchanged_batch_is_not_copied_between_stages(samples: list[Pixels]) -> None:
    activations = ActivationBuffers(8)
    whole, other = torch.arange(12.0).reshape(6, 2), torch.zeros(2, 2)
    rows = [ActivationRow(whole, index) for index in range(6)]
    assert activations.merge(1, rows).data_ptr() == whole.data_ptr()
    assert activations.merge(1, rows[2:4]).data_ptr() == whole[2:].data_ptr()
    merged = activations.merge(1, [*rows[4:], ActivationRow(other, 1), rows[0]])
    assert merged.tolist() == [[8, 9], [10, 11], [0, 0], [0, 1]]
    assert activations.merge(1, [rows[1], rows[0]]).data_ptr() == merged.data_ptr(), "one buffer per stage"


def test_activations_merge_without_a_buffer_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a whole buffer")

    monkeypatch.setattr(torch, "empty", full)
    rows = [ActivationRow(torch.full((1, 2), float(n)), 0) for n in range(3)]
    assert ActivationBuffers(8).merge(1, rows).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_the_network_leaves_one_processor_free(device: ImageDevice, samples: list[Pixels]) -> None:
    class Counting:
        def serve(self, batch: Batch, /) -> list[Any]:
            device.serve(batch)
            return [torch.get_num_threads()]

    async def count_threads() -> int:
        return int((await executor.run(Batch("resnet18", samples[:1]))).outputs[0])

    executor = ThreadExecutor(Counting())
    assert asyncio.run(count_threads()) == cpu_threads()
    executor.close()


def test_warm_up_serves_every_size_the_largest_first(models: dict[str, ServedModel[ImageCodec]]) -> None:
    sizes: list[int] = []

    class Recording:
        def serve(self, batch: Batch, /) -> list[Any]:
            sizes.append(len(batch.inputs))
            return list(batch.inputs)

    executor = ThreadExecutor(Recording())
    asyncio.run(warm_up(executor, models["resnet18"], [1, 2, 5]))
    executor.close()
    assert sizes == [5, 2, 1]


@pytest.fixture(scope="module")
def exact(samples: list[Pixels]) -> Any:
    return logits("resnet18", samples[:2], torch.device("cpu"), "fp32")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_outputs_of_a_network_in_half_precision_are_float32_ones_within_its_error(
    samples: list[Pixels], exact: Any, precision: Precision
) -> None:
    rough = logits("resnet18", samples[:2], torch.device("cpu"), precision)
    assert rough.dtype == np.float32
    assert 0 < relative_l2(rough, exact) < BOUNDS[precision]
    assert relative_l2(exact[:1], exact[1:]) > BOUNDS[precision]


def test_a_value_that_is_not_finite_is_infinitely_far() -> None:
    assert relative_l2(np.array([1.0, np.nan]), np.array([1.0, 2.0])) == np.inf


def test_automatic_precision_is_fp16_on_cuda_and_fp32_on_the_cpu() -> None:
    assert resolve_precision("auto", is_cuda=True) == "fp16"
    assert resolve_precision("auto", is_cuda=False) == "fp32"
    assert resolve_precision("bf16", is_cuda=True) == "bf16"


def test_the_cpu_has_a_display_name() -> None:
    found = find_device("cpu")
    assert found.place == "cpu"
    assert found.name == found.name.strip() != ""
    assert device_settings(found) == f"fp32, {available_cpus()} processors"
    assert device_settings(found, threads=3) == "fp32, 3 threads"


@pytest.mark.parametrize("spec", ["gpu", "cuda:x", "cuda:", "cuda:99", "", "cpu:0", "emulated:googlenet-tesla-p4"])
def test_an_invalid_or_missing_device_is_rejected(spec: str) -> None:
    with pytest.raises(SpecError):
        find_device(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is the GPU here")
def test_auto_is_the_cpu_without_a_gpu() -> None:
    assert resolve_device("auto") == resolve_device("cpu")
    assert find_device("auto") == find_device("cpu")
    with pytest.raises(SpecError, match="no CUDA device 0 among the 0"):
        resolve_device("cuda")


OLD = Driver("535.104.05", "12.2", ("NVIDIA H200",))


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "reason"),
    [
        (OLD, "13.0", r"NVIDIA H200 \(driver 535.104.05, CUDA up to 12.2\), since it was built for CUDA 13.0; update"),
        (OLD, None, "a build without CUDA"),
        (OLD, "12.2", "CUDA_VISIBLE_DEVICES"),
        (Driver("580.1", "13.0", ("a", "b")), "12.8", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_reason_why_torch_cannot_use_a_gpu_is_described(driver: Driver, torch_cuda: str, reason: str) -> None:
    assert re.search(reason, describe_unusable_gpu(driver, "2.11.0", torch_cuda))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_a_gpu_that_torch_cannot_use_is_logged_once_and_named_in_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_device, "read_driver", lambda: OLD)
    torch_device._log_once.cache_clear()
    for _ in range(2):
        assert resolve_device("auto") == resolve_device("cpu")
    (message,) = caplog.messages
    assert message.startswith("the CPU is used: torch")
    assert "cannot use NVIDIA H200 (driver 535.104.05" in message
    with pytest.raises(SpecError, match=r"no CUDA device 0 .* cannot use NVIDIA H200"):
        resolve_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
@pytest.mark.parametrize("error", [NvmlError(12), ImportError("pynvml")])
def test_without_a_gpu_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail() -> Driver:
        raise error

    monkeypatch.setattr(torch_device, "read_driver", fail)
    resolve_device("auto")
    assert caplog.messages == []


def constant_weights(value: float) -> tuple[ServedModel[ImageCodec], PixelNet]:
    """A model with two equal logits: the sum of a white image's channels times the value."""
    conv = nn.Conv2d(3, 2, 1, bias=False)
    nn.init.constant_(conv.weight, value)
    net = PixelNet(nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval(), (0.0,) * 3, (1.0,) * 3)
    return ServedModel("m", ImageCodec(4, 4, 4), ("a", "b"), "random", 2), net


@pytest.mark.parametrize(("scale", "precision"), [(1.0, "fp16"), (1e6, "bf16")])
def test_a_network_that_exceeds_the_range_of_fp16_runs_in_bf16(
    scale: float, precision: Precision, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_images, "resolve_precision", lambda *_: "fp16")  # as on CUDA
    model, net = constant_weights(scale / 3)
    assert place(model, net, torch.device("cpu")) == precision
    assert ("not finite; it runs in bf16" in caplog.text) == (precision == "bf16")
    with torch.inference_mode():
        logits = net(torch.full((1, 4, 4, 3), 255, dtype=torch.uint8)).float()
    assert logits.tolist() == [[pytest.approx(scale, rel=0.01)] * 2]


def test_a_precision_that_was_given_stays() -> None:
    model, net = constant_weights(1e6)
    assert place(model, net, torch.device("cpu"), "fp16") == "fp16"
