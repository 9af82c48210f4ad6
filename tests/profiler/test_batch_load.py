"""Tests of the load for energy measurements, through an executor's thread."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from threading import Semaphore
from typing import Any

import numpy as np
import pytest

from policies.types import SpecError
from profiler.batch_load import ExecutorLoad
from server.backends.executor import Batch, Completion, Executor, ThreadExecutor

SERVICE = 2.0  # s


class CountingDevice:
    """Completes each batch at once and releases a permit for it."""

    def __init__(self) -> None:
        self.served = Semaphore(0)
        self.sizes: set[int] = set()
        self.broken = False

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.served.release()
        if self.broken:
            raise RuntimeError("out of memory")
        self.sizes.add(len(batch.inputs))
        return batch.inputs


class InstantExecutor:
    """Completes every batch at once with a service time of 2 s."""

    name = "instant"

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        done.set_result(Completion(batch.inputs, 5.0, 5.0 + SERVICE))
        return done


def feed(executor: Executor, sleep: Callable[[float], object] = lambda seconds: None) -> ExecutorLoad:
    return ExecutorLoad(executor, "net", ["a", "b"], np.random.default_rng(3), lambda: 7.0, sleep)


def await_batches(device: CountingDevice, count: int) -> None:
    for _ in range(count):
        assert device.served.acquire(timeout=5)


def feeders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "feeder"]


def test_batches_run_back_to_back_and_end_with_the_context() -> None:
    device = CountingDevice()
    executor = ThreadExecutor(device)
    with feed(executor)(3) as load:
        await_batches(device, 50)
        assert load().batches >= 40  # the last ones may not be counted yet
    assert device.sizes == {3}
    assert feeders() == []
    with feed(executor)(2):
        await_batches(device, 1)
    executor.close()


def test_ctrl_c_ends_the_load_and_leaves_the_executor_usable() -> None:
    device = CountingDevice()
    executor = ThreadExecutor(device)

    def interrupted() -> None:
        with feed(executor)(1):
            await_batches(device, 5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert feeders() == []
    executor.close()


def test_a_device_error_is_raised_when_the_progress_is_read() -> None:
    device = CountingDevice()
    device.broken = True
    executor = ThreadExecutor(device)
    with feed(executor)(1) as load:
        await_batches(device, 1)
    with pytest.raises(SpecError, match="net: a batch of 1 failed: RuntimeError: out of memory"):
        load()
    executor.close()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_gaps_are_random_and_give_the_load_on_average(share: float) -> None:
    gaps: list[float] = []
    enough = Semaphore(0)

    def sleep(seconds: float) -> None:
        gaps.append(seconds)
        enough.release()

    with feed(InstantExecutor(), sleep)(1, share):
        for _ in range(1000):
            assert enough.acquire(timeout=5)
    expected = SERVICE * (1.0 / share - 1.0)
    # uniform within half of the mean: standard deviation 0.29 of the mean, 0.009 for the mean of 1000; 4 of those
    assert np.mean(gaps) == pytest.approx(expected, rel=0.04)
    assert 0.5 * expected <= min(gaps) < 0.6 * expected
    assert 1.4 * expected < max(gaps) <= 1.5 * expected
