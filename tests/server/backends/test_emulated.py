"""The emulated device, alone and in an executor's thread."""

import asyncio
import time

import numpy as np
import pytest

from policies.profile import Profile
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch, Completion, ThreadExecutor
from server.energy.meters import CountingMeter, NoMeter

QUICK = Profile("quick", (1e-6, 2e-6, 3e-6), energies=(0.5, 0.75, 1.0))


def sample(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (224, 224, 3), np.uint8)


def device(meter: CountingMeter | None = None) -> EmulatedDevice:
    return EmulatedDevice({"m": QUICK}, meter or CountingMeter())


def test_outputs_depend_on_each_input_alone_and_differ_between_inputs() -> None:
    emulated = device()
    alone = [emulated.serve(Batch("m", [sample(n)]))[0] for n in range(3)]
    together = emulated.serve(Batch("m", [sample(n) for n in (2, 0, 1)]))
    for got, n in zip(together, (2, 0, 1), strict=True):
        np.testing.assert_array_equal(got, alone[n])
    assert all(not np.array_equal(alone[i], alone[j]) for i in range(3) for j in range(i))


def test_a_thousand_samples_have_different_outputs() -> None:
    emulated = device()
    answers = {emulated.serve(Batch("m", [sample(n)]))[0].tobytes() for n in range(1000)}
    assert len(answers) >= 999  # about a million different outputs: two samples of a thousand may have the same


def test_the_meter_counts_what_the_profile_charges() -> None:
    meter = CountingMeter()
    emulated = device(meter)
    emulated.serve(Batch("m", [sample(0)]))
    emulated.serve(Batch("m", [sample(0)] * 3))
    assert meter.read() == pytest.approx(1.5)
    assert NoMeter().read() is None


def test_a_batch_never_takes_less_than_its_service_time() -> None:
    emulated = EmulatedDevice({"m": Profile("slow", (0.02,))}, CountingMeter())
    start = time.monotonic()
    emulated.serve(Batch("m", [sample(0)]))
    assert time.monotonic() - start >= 0.02


def test_the_future_has_the_outputs_or_the_exception_of_the_device() -> None:
    async def scenario() -> Completion:
        executor = ThreadExecutor(device(), "quick")
        with pytest.raises(KeyError):
            await executor.run(Batch("no such model", [sample(0)]))
        done = await executor.run(Batch("m", [sample(0), sample(1)]))
        executor.close()
        return done

    done = asyncio.run(scenario())
    assert len(done.outputs) == 2
    assert done.finished >= done.started


def test_a_cancelled_batch_raises_nothing() -> None:
    async def scenario() -> None:
        executor = ThreadExecutor(device())
        executor.run(Batch("m", [sample(0)])).cancel()
        await executor.run(Batch("m", [sample(0)]))
        executor.close()

    asyncio.run(scenario())
