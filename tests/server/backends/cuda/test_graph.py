"""Captured graphs on a fake device: one replay a batch, buffers, slots, uploads and failures."""

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.cuda import graph
from server.backends.cuda.graph import GraphDevice
from server.backends.cuda.uploads import UploadedSample
from server.backends.executor import Batch, Completion, Standby, ThreadExecutor, uploaded
from server.backends.model_devices import ModelDevices
from server.errors import NotFiniteError, OutOfMemoryError
from server.models.images.codec import ImageCodec
from server.models.model import ServedModel
from tests.support.fake_graphs import FakeRuntime

CODEC = ImageCodec(2, 2, 2)
MODEL = ServedModel("m", CODEC, ("sum", "first", "minus"), "random", 6)


def network(pixels: Tensor) -> Tensor:
    """Logits that identify a sample; a sample of 255 alone gives infinity."""
    flat = pixels.reshape(len(pixels), -1).double()
    logits = torch.stack([flat.sum(1), flat[:, 0], -flat.sum(1)], 1)
    logits[flat[:, 0] == 255] = torch.inf
    return logits


def sample(mark: int) -> NDArray[np.uint8]:
    array = np.full(CODEC.shape, 7, np.uint8)
    array[0, 0, 0] = mark
    return array


def logits(*marks: int) -> list[list[float]]:
    return [[77.0 + mark, mark, -77.0 - mark] for mark in marks]


def listed(outputs: Sequence[Any]) -> list[list[float]]:
    assert all(output.dtype == np.float32 for output in outputs)
    return [output.tolist() for output in outputs]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def device(runtime: FakeRuntime) -> GraphDevice:
    return GraphDevice(MODEL, network, runtime)


def free(device: GraphDevice) -> int:
    gc.collect()
    return device._uploads.slots.free


def test_a_batch_is_one_replay_whatever_its_size_and_is_padded_to_its_bucket(
    device: GraphDevice, runtime: FakeRuntime
) -> None:
    for count in (3, 1, 3, 3, 6):
        assert listed(device.serve(Batch("m", [sample(n) for n in range(count)]))) == logits(*range(count))
    assert runtime.captured == 3, "one for each bucket"
    assert sum(runtime.replays) == 5


def test_a_padded_batch_gives_the_outputs_of_its_samples_alone(runtime: FakeRuntime) -> None:
    device = GraphDevice(ServedModel("m", CODEC, MODEL.labels, "random", 24), network, runtime)
    marks = range(17)
    assert listed(device.serve(Batch("m", [device.upload(sample(n)) for n in marks]))) == logits(*marks)
    assert runtime.captured == 1


def test_uploaded_samples_and_arrays_share_a_batch(device: GraphDevice, runtime: FakeRuntime) -> None:
    inputs = [device.upload(sample(1)), sample(2), device.upload(sample(3)), sample(4)]
    assert [type(each) for each in inputs] == [UploadedSample, np.ndarray] * 2
    assert listed(device.serve(Batch("m", inputs))) == logits(1, 2, 3, 4)


def test_a_measured_batch_may_have_a_sample_several_times(device: GraphDevice, runtime: FakeRuntime) -> None:
    executor = ThreadExecutor(ModelDevices({"m": device}), "d")
    one, other = uploaded(executor, "m", [sample(1), sample(2)])
    executor.close()
    for _ in range(3):
        assert listed(device.serve(Batch("m", [one, other, one, one]))) == logits(1, 2, 1, 1)
    assert runtime.uploads == [[2]]


def test_samples_are_uploaded_as_one_group_of_consecutive_slots(device: GraphDevice, runtime: FakeRuntime) -> None:
    first = [device.upload(sample(n)) for n in range(3)]
    assert runtime.uploads == []
    device._uploads.flush()
    assert runtime.uploads == [[3]]
    later = device.upload(sample(3))
    device._uploads.flush()
    del first[1]
    assert runtime.uploads == [[3], [1]]
    assert listed(device.serve(Batch("m", [*first, later]))) == logits(0, 2, 3)


def test_a_batch_waits_for_the_copies_of_its_samples_and_not_for_those_of_later_ones(
    device: GraphDevice, runtime: FakeRuntime
) -> None:
    mine = device.upload(sample(1))
    device._uploads.flush()
    other = device.upload(sample(2))
    device._uploads.flush()
    assert len(runtime.copies) == 2
    assert listed(device.serve(Batch("m", [mine]))) == logits(1)
    assert len(runtime.copies) == 1, "the later copy may still run"
    assert listed(device.serve(Batch("m", [other, mine]))) == logits(2, 1)


def test_without_a_free_slot_a_sample_is_uploaded_with_its_batch(runtime: FakeRuntime) -> None:
    device = GraphDevice(MODEL, network, runtime)
    held = [device.upload(sample(0)) for _ in range(free(device))]
    assert isinstance(device.upload(sample(9)), np.ndarray)
    assert listed(device.serve(Batch("m", [device.upload(sample(9)), held[0]]))) == logits(9, 0)
    held.pop()
    assert isinstance(device.upload(sample(9)), UploadedSample)


def test_the_slot_of_a_cancelled_request_is_free_unless_it_is_in_flight(device: GraphDevice) -> None:
    everything = free(device)
    waiting, served = device.upload(sample(1)), device.upload(sample(2))
    running = device.launch(Batch("m", [served]))
    del waiting
    assert free(device) == everything - 1
    del served  # its request is cancelled while the batch is in service
    assert free(device) == everything - 1
    assert [device.upload(sample(9)) for _ in range(everything - 1)], "none of these may overwrite it"
    running.wait()
    assert listed(running.outputs()) == logits(2)
    del running
    assert free(device) == everything


def test_a_sample_that_is_cancelled_before_its_upload_is_not_copied(device: GraphDevice, runtime: FakeRuntime) -> None:
    samples = [device.upload(sample(n)) for n in range(3)]
    del samples[1]
    device._uploads.flush()
    assert runtime.uploads == [[1, 1]]


def test_a_batch_is_launched_while_the_outputs_of_the_one_before_are_not_collected(device: GraphDevice) -> None:
    first = device.launch(Batch("m", [sample(1)]))
    first.wait()
    second = device.launch(Batch("m", [sample(2)]))
    with pytest.raises(RuntimeError, match="before the outputs"):
        device.launch(Batch("m", [sample(3)]))
    second.wait()
    assert listed(first.outputs()) == logits(1)
    assert listed(second.outputs()) == logits(2)
    assert listed(device.serve(Batch("m", [sample(3)]))) == logits(3)


def test_a_bucket_captured_beside_outputs_that_are_not_collected_leaves_them(device: GraphDevice) -> None:
    first = device.launch(Batch("m", [device.upload(sample(1))]))
    first.wait()
    others = [device.upload(sample(9)) for _ in range(free(device))]  # one of them in the slot of the first
    device._uploads.flush()
    others[-1].use.copy.synchronize()
    second = device.launch(Batch("m", others[-4:]))
    assert listed(first.outputs()) == logits(1)
    second.wait()
    assert listed(second.outputs()) == logits(9, 9, 9, 9)


def test_outputs_that_are_not_finite_fail_the_batch_and_its_parts_can_be_retried(device: GraphDevice) -> None:
    everything = free(device)
    inputs = [device.upload(sample(n)) for n in (1, 255, 3)]
    with pytest.raises(NotFiniteError):
        device.serve(Batch("m", inputs))
    assert listed(device.serve(Batch("m", inputs[:1]))) == logits(1)
    with pytest.raises(NotFiniteError):
        device.serve(Batch("m", inputs[1:2]))
    assert listed(device.serve(Batch("m", inputs[2:]))) == logits(3)
    inputs.clear()
    assert free(device) == everything


def test_where_a_capture_fails_batches_run_without_a_graph_and_no_other_capture_is_tried(
    device: GraphDevice, runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    device.serve(Batch("m", [sample(1)]))
    runtime.fails = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING):
        assert listed(device.serve(Batch("m", [sample(1), sample(2)]))) == logits(1, 2)
    assert caplog.text.count("m: batches of 2 are not captured as a graph") == 1
    runtime.fails = None
    assert listed(device.serve(Batch("m", [device.upload(sample(n)) for n in range(3)]))) == logits(0, 1, 2)
    assert runtime.captured == 1
    assert sum(runtime.replays) == 1
    assert listed(device.serve(Batch("m", [sample(1)]))) == logits(1), "graphs that were captured before are used"
    assert sum(runtime.replays) == 2


def test_the_search_ends_when_the_first_batches_of_all_buckets_have_taken_too_long(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def searches(pixels: Tensor) -> Tensor:
        time.sleep(0.02 if torch.backends.cudnn.benchmark else 0.0)
        return network(pixels)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(graph, "FIRST_BATCHES", 0.15)
    device = GraphDevice(MODEL, searches, runtime)
    searched = []
    for count in (6, 4, 3, 2, 1):
        device.serve(Batch("m", [sample(1)] * count))
        searched.append(torch.backends.cudnn.benchmark)
    assert searched[0]
    assert not searched[-1]
    assert caplog.text.count("does not search for the fastest convolutions any more") == 1


def test_a_capture_without_memory_fails_the_batch_so_that_smaller_ones_are_tried(
    device: GraphDevice, runtime: FakeRuntime
) -> None:
    runtime.fails = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfMemoryError):
        device.serve(Batch("m", [sample(1)] * 6))
    runtime.fails = None
    assert listed(device.serve(Batch("m", [sample(1)] * 2))) == logits(1, 1)


def test_an_array_of_another_shape_fails_its_batch_alone(device: GraphDevice) -> None:
    everything = free(device)
    wrong = device.upload(np.zeros((2, 3, 3), np.uint8))
    assert isinstance(wrong, np.ndarray)
    with pytest.raises(ValueError, match="shape"):
        device.serve(Batch("m", [device.upload(sample(1)), wrong]))
    assert free(device) == everything
    assert listed(device.serve(Batch("m", [sample(2)]))) == logits(2)


def test_the_executor_starts_the_standby_launch_before_it_tells_the_loop_of_the_batch_before(
    device: GraphDevice, runtime: FakeRuntime
) -> None:
    events: list[str] = []

    class Logged:
        def __init__(self, running: Any, name: str) -> None:
            self._running, self._name = running, name

        def wait(self) -> None:
            self._running.wait()

        def outputs(self) -> Sequence[Any]:
            events.append(f"collect {self._name}")
            return list(self._running.outputs())

    class Devices(ModelDevices):
        def launch(self, batch: Batch, /) -> Any:
            name = str(len(batch.inputs))
            events.append(f"launch {name}")
            return Logged(super().launch(batch), name)

    async def scenario() -> list[Completion]:
        standby, following = Standby(), asyncio.get_running_loop().create_future()
        uploaded = [executor.upload("m", sample(n)) for n in range(2)]
        standby.offer(Batch("m", uploaded, standby=standby), following)
        done = executor.run(Batch("m", [executor.upload("m", sample(9))], standby=standby))
        return [await done, await following]

    executor = ThreadExecutor(Devices({"m": device}), "d")
    try:
        first, second = asyncio.run(scenario())
    finally:
        executor.close()
    assert events == ["launch 1", "launch 2", "collect 1", "collect 2"]
    assert listed(first.outputs) == logits(9)
    assert listed(second.outputs) == logits(0, 1)
    assert first.started <= first.finished <= second.started <= second.finished
    assert (first.next_started, second.next_started) == (second.started, None)


def test_a_standby_launch_does_not_follow_a_batch_that_failed(device: GraphDevice) -> None:
    async def scenario() -> None:
        standby, following = Standby(), asyncio.get_running_loop().create_future()
        standby.offer(Batch("m", [sample(1)], standby=standby), following)
        with pytest.raises(NotFiniteError):
            await executor.run(Batch("m", [sample(255)], standby=standby))
        assert standby.withdraw()
        assert not following.done()

    executor = ThreadExecutor(ModelDevices({"m": device}), "d")
    try:
        asyncio.run(scenario())
    finally:
        executor.close()
