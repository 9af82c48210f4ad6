"""The CPU device: batches, rows, refusals, and which device a spec means."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from policies.types import SpecError
from server.backends.activations import Activations, Row
from server.backends.executor import Batch, ThreadExecutor
from server.backends.torch_images import TorchDevice, cpu_threads, resolve_device, settings, torch_device, warm_up
from server.errors import DeviceLostError, NotFiniteError, OutOfMemoryError
from server.models.images import ImageCodec, Pixels, smooth_pictures
from server.models.model import ServedModel
from server.models.torchvision_source import load

NAMES = ("resnet18", "googlenet")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, ServedModel[ImageCodec]]]:
    threads = torch.get_num_threads()
    yield {}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def device(models: dict[str, ServedModel[ImageCodec]]) -> TorchDevice:
    loaded = [load(name, "random", max_batch_size=5) for name in NAMES]
    models.update({model.name: model for model, _ in loaded})
    return torch_device(loaded, torch.device("cpu"))


@pytest.fixture(scope="module")
def samples(device: TorchDevice, models: dict[str, ServedModel[ImageCodec]]) -> list[Pixels]:
    return list(smooth_pictures(models["resnet18"].codec, 5, np.random.default_rng(2)))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_answers_as_its_samples_alone_do(device: TorchDevice, samples: list[Pixels], name: str) -> None:
    together = np.stack(device.serve(Batch(name, samples)))
    alone = np.stack([device.serve(Batch(name, [sample]))[0] for sample in samples])
    largest = np.abs(alone).max()
    assert np.abs(together - alone).max() < 1e-4 * largest  # float32 summed in another order
    between = [np.abs(a - b).max() for i, a in enumerate(alone) for b in alone[:i]]
    assert min(between) > 1e-1 * largest


def test_a_small_batch_after_a_large_one_sees_none_of_it(device: TorchDevice, samples: list[Pixels]) -> None:
    before = device.serve(Batch("resnet18", samples[:1]))[0]
    device.serve(Batch("resnet18", samples))
    assert np.array_equal(device.serve(Batch("resnet18", samples[:1]))[0], before)


def test_rows_are_float32_and_each_owns_its_memory(device: TorchDevice, samples: list[Pixels]) -> None:
    first, second = device.serve(Batch("resnet18", samples[:2]))
    assert first.dtype == np.float32
    assert first.shape == (1000,)
    assert first.base is None
    assert second.base is None
    assert not np.shares_memory(first, second)


def test_read_only_samples_are_taken(device: TorchDevice, samples: list[Pixels]) -> None:
    frozen = np.frombuffer(samples[0].tobytes(), np.uint8).reshape(samples[0].shape)
    expected = device.serve(Batch("resnet18", samples[:1]))[0]
    assert np.array_equal(device.serve(Batch("resnet18", [frozen]))[0], expected)


def test_a_batch_too_large_or_of_another_shape_is_refused(device: TorchDevice, samples: list[Pixels]) -> None:
    for inputs in ([*samples, samples[0]], [samples[0][:1]], [samples[0], samples[1][0]]):
        with pytest.raises(ValueError, match=r"shape|dimension"):
            device.serve(Batch("resnet18", inputs))


def failing(device: TorchDevice, error: Exception | None) -> TorchDevice:
    """The same device, whose network raises, or whose logits are not finite."""

    def run(_: Any, gather: Callable[[], torch.Tensor]) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.full((len(gather()), 1000), float("nan"))

    return TorchDevice(device._places, run, device._device)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceLostError),
        (RuntimeError("expected scalar type"), RuntimeError),
        (None, NotFiniteError),
    ],
)
def test_faults_are_told_apart_by_type(
    device: TorchDevice, samples: list[Pixels], error: Exception | None, named: type[Exception]
) -> None:
    with pytest.raises(named) as raised:
        failing(device, error).serve(Batch("resnet18", samples[:2]))
    assert raised.type is named


def test_sub_batches_merge_and_part_between_stages(samples: list[Pixels]) -> None:
    staged = torch_device([load("resnet18", "random", 5, stages=4)], torch.device("cpu"))
    whole = np.stack(staged.serve(Batch("resnet18", samples)))

    def run(inputs: Sequence[Any], first: int, stages: int | None) -> list[Any]:
        return list(staged.serve(Batch("resnet18", inputs, first, stages)))

    early = run(run(samples[:2], 0, 1), 1, 1)  # at stage 2, two launches later
    late = run(samples[2:], 0, 2)
    four = run([late[2], *early, late[0]], 2, 1)  # out of order, and one is left behind
    outputs = [*run(four, 3, None), *run([late[1]], 2, None)]
    expected = whole[[4, 0, 1, 2, 3]]
    assert np.abs(np.stack(outputs) - expected).max() < 1e-4 * np.abs(whole).max()


def test_a_batch_that_goes_on_as_it_is_copies_nothing(samples: list[Pixels]) -> None:
    activations = Activations(8)
    whole, other = torch.arange(12.0).reshape(6, 2), torch.zeros(2, 2)
    rows = [Row(whole, index) for index in range(6)]
    assert activations.joined(1, rows).data_ptr() == whole.data_ptr()
    assert activations.joined(1, rows[2:4]).data_ptr() == whole[2:].data_ptr()
    merged = activations.joined(1, [*rows[4:], Row(other, 1), rows[0]])
    assert merged.tolist() == [[8, 9], [10, 11], [0, 0], [0, 1]]
    assert activations.joined(1, [rows[1], rows[0]]).data_ptr() == merged.data_ptr(), "one buffer a stage"


def test_where_a_buffer_does_not_fit_the_rows_alone_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a whole buffer")

    monkeypatch.setattr(torch, "empty", full)
    rows = [Row(torch.full((1, 2), float(n)), 0) for n in range(3)]
    assert Activations(8).joined(1, rows).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_the_executors_thread_leaves_one_core_free(device: TorchDevice, samples: list[Pixels]) -> None:
    class Counting:
        def serve(self, batch: Batch, /) -> list[int]:
            device.serve(batch)
            return [torch.get_num_threads()]

    async def ask() -> int:
        return int((await executor.run(Batch("resnet18", samples[:1]))).outputs[0])

    executor = ThreadExecutor(Counting())
    assert asyncio.run(ask()) == cpu_threads()
    executor.close()


def test_warming_serves_every_size_the_largest_first(models: dict[str, ServedModel[ImageCodec]]) -> None:
    sizes: list[int] = []

    class Listening:
        def serve(self, batch: Batch, /) -> list[int]:
            sizes.append(len(batch.inputs))
            return list(sizes)

    executor = ThreadExecutor(Listening())
    asyncio.run(warm_up(executor, models["resnet18"], [1, 2, 5]))
    executor.close()
    assert sizes == [5, 2, 1]


def test_a_half_precision_network_answers_in_float32(samples: list[Pixels]) -> None:
    loaded = load("squeezenet1_1", "random", 1)
    exact = torch_device([loaded], torch.device("cpu")).serve(Batch("squeezenet1_1", samples[:1]))[0]
    rough = torch_device([loaded], torch.device("cpu"), "bf16").serve(Batch("squeezenet1_1", samples[:1]))[0]
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - exact).max() < 0.1 * np.abs(exact).max()  # bfloat16 keeps 8 bits


def test_the_cpu_has_a_name_for_people() -> None:
    place, name = resolve_device("cpu")
    assert place == torch.device("cpu")
    assert name == name.strip() != ""
    assert settings(place) == f"fp32, {cpu_threads()} threads"


@pytest.mark.parametrize("spec", ["gpu", "cuda:x", "cuda:", "cuda:99", "", "cpu:0", "emulated:googlenet-tesla-p4"])
def test_a_device_that_is_not_there_is_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        resolve_device(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto means the GPU here")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert resolve_device("auto") == resolve_device("cpu")
    with pytest.raises(SpecError, match="no CUDA device 0 among the 0"):
        resolve_device("cuda")
