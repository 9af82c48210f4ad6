"""Networks of images in a worker: the same logits as in this process, stages, and a death between two stages."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from server.backends.executor import Batch, Standby, ThreadExecutor, uploaded
from server.backends.model_devices import ModelDevices
from server.backends.torch_images import make_image_device
from server.backends.worker_device import StageOutput, WorkerDevice
from server.errors import WorkerDiedError
from server.models.images.torchvision_source import load_image_model
from server.models.sources import source_of
from server.workers.worker import shared_memory

NAME, STAGES = "resnet18", 4

pytestmark = pytest.mark.slow  # to start the worker


@pytest.fixture(scope="module")
def device() -> Iterator[WorkerDevice]:
    _, worker = source_of(NAME).load(NAME, "random", 5, STAGES)
    device = WorkerDevice(NAME, worker, "cpu")
    device.load()
    yield device
    device.end()


@pytest.fixture
def executor(device: WorkerDevice) -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor(ModelDevices({NAME: device}), "cpu")
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def samples() -> list[np.ndarray]:
    served, _ = load_image_model(NAME, "random", 5)
    return served.codec.synthetic_samples(5, np.random.default_rng(2))


@pytest.fixture(scope="module")
def expected(samples: list[np.ndarray]) -> np.ndarray:
    served, net = load_image_model(NAME, "random", 5, STAGES)
    threads = torch.get_num_threads()
    here = make_image_device(served, net, torch.device("cpu"))
    torch.set_num_threads(threads)
    return np.stack(here.serve(Batch(NAME, samples)))


def is_close(outputs: Sequence[Any], expected: np.ndarray) -> bool:
    return bool(np.abs(np.stack(outputs) - expected).max() < 1e-4 * np.abs(expected).max())


def test_samples_are_in_shared_memory_and_logits_are_those_of_this_process(
    executor: ThreadExecutor, samples: list[np.ndarray], expected: np.ndarray
) -> None:
    before = shared_memory().used
    inputs = uploaded(executor, NAME, samples)
    assert all(map(shared_memory().contains, inputs))
    assert is_close(asyncio.run(outputs_of(executor, Batch(NAME, inputs))), expected)
    del inputs
    assert shared_memory().used == before


async def outputs_of(executor: ThreadExecutor, batch: Batch) -> Sequence[Any]:
    return (await executor.run(batch)).outputs


def test_batches_merge_and_split_between_stages(
    executor: ThreadExecutor, samples: list[np.ndarray], expected: np.ndarray
) -> None:
    async def scenario() -> Sequence[Any]:
        async def run(inputs: Sequence[Any], first: int, stages: int | None) -> list[Any]:
            return [*await outputs_of(executor, Batch(NAME, inputs, first, stages))]

        early = await run(await run(samples[:2], 0, 1), 1, 1)  # at stage 2 after two launches
        late = await run(samples[2:], 0, 2)
        four = await run([late[2], *early, late[0]], 2, 1)  # in another order, and without late[1]
        assert isinstance(four[0], StageOutput)
        return [*await run(four, 3, None), *await run([late[1]], 2, None)]

    assert is_close(asyncio.run(scenario()), expected[[4, 0, 1, 2, 3]])


def test_the_next_stage_can_be_the_standby_of_the_one_before(
    executor: ThreadExecutor, samples: list[np.ndarray], expected: np.ndarray
) -> None:
    async def scenario() -> tuple[float | None, Sequence[Any]]:
        standby = Standby()
        running = executor.run(Batch(NAME, samples, 0, 2, standby))
        following = asyncio.get_running_loop().create_future()
        standby.offer(Batch(NAME, [], 2, None), following)
        return (await running).next_started, (await following).outputs

    started, outputs = asyncio.run(scenario())
    assert started is not None
    assert is_close(outputs, expected)


def test_after_a_death_between_two_stages_the_batch_begins_again(
    executor: ThreadExecutor, device: WorkerDevice, samples: list[np.ndarray], expected: np.ndarray
) -> None:
    async def scenario() -> Sequence[Any]:
        suspended = [*await outputs_of(executor, Batch(NAME, samples[:3], 0, 2))]
        os.kill(device.facts()["pid"], signal.SIGKILL)
        later = Batch(NAME, suspended, 2, 1)
        with pytest.raises(WorkerDiedError):
            await executor.run(later)
        await executor.restart(NAME, WorkerDiedError("it died"))
        others = [*await outputs_of(executor, Batch(NAME, samples[3:], 0, 3))]
        last = [*await outputs_of(executor, later), *others]  # the stages 0 to 2 of three, and then all
        return await outputs_of(executor, Batch(NAME, last, 3, None))

    assert is_close(asyncio.run(scenario()), expected)
