"""Another server as a device: what its faults are, how a call is abandoned, and how it is found to be back."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from server.backends.executor import Batch, with_timeout
from server.backends.model_devices import ModelDevices
from server.backends.upstream_device import UpstreamDevice, UpstreamExecutor
from server.errors import BadInputError, BatchTimeoutError, DeviceUnavailableError, ModelError
from server.models.sources import UpstreamSource
from tests.support.fake_upstream import FakeUpstream, Inference, error, metadata, upstream

Scenario = Callable[[UpstreamExecutor, FakeUpstream], Coroutine[Any, Any, None]]


def run_scenario(scenario: Scenario) -> None:
    """Run a scenario with the executor of a running server."""
    with upstream() as fake:
        served, _ = UpstreamSource(fake.spec).load("m", "pretrained", 8, 1)
        executor = UpstreamExecutor(ModelDevices({"m": UpstreamDevice(served)}), fake.device)
        try:
            asyncio.run(scenario(executor, fake))
        finally:
            executor.close()


def batch(*values: float) -> Batch:
    return Batch("m", [{"x": np.full(2, value, np.float32)} for value in values])


def test_each_sample_has_its_own_outputs() -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        completion = await executor.run(batch(1, 2, 3))
        assert [output["out_x"].tolist() for output in completion.outputs] == [[1, 1], [2, 2], [3, 3]]
        assert fake.batches == [3]

    run_scenario(scenario)


def test_outputs_that_do_not_fit_the_signature_are_faults_that_name_the_output() -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        fake.reply = lambda call: (200, {}, b'{"outputs": []}')
        with pytest.raises(ModelError, match="returned no output out_x"):
            await executor.run(batch(1))
        fake.reply = Inference.echo
        with pytest.raises(ModelError, match="returned NaN in output out_x"):
            await executor.run(batch(1, np.nan))
        with pytest.raises(BadInputError, match="the model fails on input x, which has NaN or infinity"):
            await executor.run(batch(np.nan))
        fake.reply = lambda call: error(400, "no NaN, please")
        with pytest.raises(BadInputError, match="no NaN, please"):
            await executor.run(batch(np.nan))

    run_scenario(scenario)


@pytest.mark.parametrize("status", [400, 422, 500])
def test_an_error_of_a_model_that_is_not_ready_is_no_fault_of_the_batch(status: int) -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        fake.reply = lambda call: error(status, "unknown model")
        with pytest.raises(ModelError if status == 500 else BadInputError, match="unknown model"):
            await executor.run(batch(1))
        fake.ready = 400
        with pytest.raises(DeviceUnavailableError, match="answers 400: the model is not ready"):
            await executor.run(batch(1))

    run_scenario(scenario)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_with_too_many_requests_is_unavailable(status: int) -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        fake.reply = lambda call: error(status, "later")
        with pytest.raises(DeviceUnavailableError, match="later"):
            await executor.run(batch(1))

    run_scenario(scenario)


def test_a_call_that_hangs_is_abandoned_and_the_same_thread_goes_on() -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        release = threading.Event()

        def hang(call: Inference) -> Any:
            release.wait(30)
            return call.echo()

        fake.reply = hang
        with pytest.raises(BatchTimeoutError) as caught:
            await with_timeout(executor, batch(1), 0.1)
        thread = executor._thread
        with pytest.raises(DeviceUnavailableError, match=r"did not finish within 0\.1 s"):
            await executor.restart("m", caught.value)
        fake.reply = Inference.echo
        await executor.wait_until_available()
        assert len((await executor.run(batch(2))).outputs) == 1
        assert executor._thread is thread
        assert fake.batches == [1, 1], "an abandoned call is not sent again"
        release.set()

    run_scenario(scenario)


def test_a_server_that_is_gone_is_waited_for_until_it_is_ready_and_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        await executor.check()
        fake.stop()
        with pytest.raises(DeviceUnavailableError):
            await executor.run(batch(1))
        with pytest.raises(DeviceUnavailableError):
            await executor.check()
        waiting = asyncio.create_task(executor.wait_until_available())
        await asyncio.sleep(0.6)
        assert not waiting.done()
        same = fake.metadata
        fake.metadata = metadata(x=("FP32", [-1, 3]))
        fake.start()
        await asyncio.sleep(1.0)
        assert not waiting.done(), "the model has another signature"
        fake.metadata = same
        await asyncio.wait_for(waiting, 10)
        assert len((await executor.run(batch(1))).outputs) == 1

    run_scenario(scenario)
    reasons = [record.message for record in caplog.records if record.name == "batchwright.upstream"]
    assert len(reasons) == 2, "each reason is logged once"
    assert "refused" in reasons[0]
    assert "has changed, before and now: input x is FP32 [-1, 2] and FP32 [-1, 3]" in reasons[1]


def test_a_server_that_answers_no_http_is_not_available() -> None:
    async def scenario(executor: UpstreamExecutor, fake: FakeUpstream) -> None:
        fake.metadata = b"<html>"
        await executor.check()
        fake.ready = 999999
        with pytest.raises(DeviceUnavailableError):
            await executor.check()

    run_scenario(scenario)
