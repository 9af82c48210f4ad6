"""A device that is unavailable for some time: where its calls go, and what new ones get, on a virtual clock."""

import asyncio
import logging
from typing import Any

import pytest

from policies.rules.control_limit import greedy, static
from server.errors import BadInputError, BatchTimeoutError, DeviceLostError, DeviceUnavailableError, UnavailableError
from server.scheduling.admission import Limits
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, UNLIMITED, FakeExecutor, chosen, submit
from tests.support.virtual_clock import virtual_loop


class RecoverableFake(FakeExecutor):
    """A FakeExecutor whose device a test can take away and give back.

    Attributes:
        down: whether it is taken away.
        checks: instants of the checks of the idle device.
    """

    def __init__(self, name: str = "a") -> None:
        super().__init__()
        self.name = name
        self.down = False
        self.checks: list[float] = []
        self.fault = self._fail_while_down

    def _fail_while_down(self, outputs: list[Any]) -> list[Any]:
        if self.down:
            raise DeviceUnavailableError("gone for now")
        return outputs

    async def check(self) -> None:
        self.checks.append(asyncio.get_running_loop().time())
        if self.down:
            raise DeviceUnavailableError("gone for now")

    async def wait_until_available(self) -> None:
        while self.down:  # noqa: ASYNC110  (as the real one, it probes)
            await asyncio.sleep(0.25)

    async def restart(self, model: str, error: DeviceLostError, /) -> None:
        raise DeviceUnavailableError(str(error)) from error


def run_scenario(scenario: Any, *executors: FakeExecutor, policy: Any = None, limits: Limits = UNLIMITED) -> Metrics:
    loop, metrics = virtual_loop(), Metrics()

    async def main() -> None:
        by_model = chosen(policy or greedy(8), STEPS)
        fleet = Fleet([Dispatcher(executor, by_model, metrics, loop.time, limits) for executor in executors])
        task = asyncio.ensure_future(fleet.run())
        try:
            await scenario(fleet, *executors)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return metrics


async def fails(future: Any) -> None:
    with pytest.raises(UnavailableError, match="a does not answer for now; send the request again") as caught:
        await future
    assert (caught.value.status, caught.value.retry_after) == (503, 1)


def test_without_another_device_calls_fail_at_once_and_are_served_again_when_it_is_back() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        executor.down = True
        calls = [submit(fleet, "m", [float(n)]) for n in range(20)]
        for call in calls:
            await fails(call)
        assert asyncio.get_running_loop().time() < 0.1
        with pytest.raises(UnavailableError):
            fleet.check_room("m", 1)
        with pytest.raises(UnavailableError):
            submit(fleet, "m", [1.0])
        assert (fleet.ready, fleet.is_ready("m"), fleet.alive, fleet.broken.is_set()) == (False, False, True, False)
        assert (fleet.open_calls, fleet.waiting, fleet.capacity("m"), fleet.backlog()) == (0, 0, 0, 0)
        await asyncio.sleep(60.0)
        assert fleet.alive
        executor.down = False
        await asyncio.sleep(0.3)
        assert (fleet.ready, fleet.is_ready("m")) == (True, True)
        answers = [(await call)[0] for call in [submit(fleet, "m", [float(n)]) for n in range(20)]]
        assert [float(answer.output) for answer in answers] == [float(n) for n in range(20)]

    metrics = run_scenario(scenario, RecoverableFake())
    assert 'device_faults_total{error="DeviceUnavailableError",model="m"} 1.0' in metrics.render().decode()


def test_what_the_log_says_of_a_refused_batch_and_of_calls_that_cannot_move(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        def refuse(outputs: list[Any]) -> list[Any]:
            raise BadInputError("m answered 400: too long")

        executor.fault = refuse
        with pytest.raises(BadInputError):
            await submit(fleet, "m", [1.0])
        executor.fault, executor.down = executor._fail_while_down, True
        await fails(submit(fleet, "m", [1.0]))

    with caplog.at_level(logging.INFO):
        metrics = run_scenario(scenario, RecoverableFake())
    assert not any(record.exc_info for record in caplog.records)
    messages = {record.message: record.levelname for record in caplog.records}
    refused = "m: the model failed on request 0 alone: BadInputError: m answered 400: too long"
    assert messages[refused] == "INFO", "no operator has to act"
    assert "BadInputError" not in metrics.render().decode(), "what a client sends is no fault of the device"
    assert "0 of 1 calls move to other devices" in messages


def test_with_another_device_no_call_is_lost() -> None:
    async def scenario(fleet: Fleet, a: RecoverableFake, b: RecoverableFake) -> None:
        calls = [submit(fleet, "m", [float(n)]) for n in range(40)]
        a.down = True
        answers = [(await call)[0] for call in calls]
        assert [float(answer.output) for answer in answers] == [float(n) for n in range(40)]
        assert {answer.device for answer in answers} == {"b"}
        assert (fleet.ready, fleet.alive) == (True, True)
        assert [d.up for d in fleet.dispatchers] == [False, True]
        a.down = False
        await asyncio.sleep(0.3)
        later = [submit(fleet, "m", [float(n)]) for n in range(40)]
        assert {(await call)[0].device for call in later} == {"a", "b"}

    run_scenario(scenario, RecoverableFake("a"), RecoverableFake("b"))


def test_calls_fail_when_both_devices_are_gone_and_none_is_lost_for_good() -> None:
    async def scenario(fleet: Fleet, a: RecoverableFake, b: RecoverableFake) -> None:
        a.down = b.down = True
        calls = [submit(fleet, "m", [float(n)]) for n in range(10)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, UnavailableError) for each in done)
        with pytest.raises(UnavailableError, match="no device of m works"):
            submit(fleet, "m", [1.0])
        assert (fleet.ready, fleet.alive, fleet.broken.is_set()) == (False, True, False)
        assert fleet.first_of("m").device == "a"
        a.down = False
        await asyncio.sleep(0.3)
        assert (await submit(fleet, "m", [1.0]))[0].device == "a"

    run_scenario(scenario, RecoverableFake("a"), RecoverableFake("b"))


def test_an_idle_device_is_checked_about_each_second_and_a_busy_one_is_not() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        for n in range(50):
            await submit(fleet, "m", [float(n)])
            await asyncio.sleep(0.1)
        busy = len(executor.checks)
        await asyncio.sleep(10.0)
        assert busy <= 1
        assert 9 <= len(executor.checks) - busy <= 11
        executor.down = True
        await asyncio.sleep(1.2)
        assert not fleet.ready
        with pytest.raises(UnavailableError):
            fleet.check_room("m", 1)

    run_scenario(scenario, RecoverableFake())


def test_a_batch_that_exceeds_its_timeout_makes_the_device_unavailable_and_not_lost() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        def hang(_: list[Any]) -> list[Any]:
            executor.down = True
            raise BatchTimeoutError("too long")

        executor.fault = hang
        await fails(submit(fleet, "m", [1.0]))
        executor.fault, executor.down = (lambda outputs: outputs), False
        await asyncio.sleep(0.3)
        assert (await submit(fleet, "m", [1.0]))[0].device == "a"
        assert not fleet.broken.is_set()

    metrics = run_scenario(scenario, RecoverableFake())
    assert 'device_faults_total{error="BatchTimeoutError",model="m"} 1.0' in metrics.render().decode()


def test_a_device_that_goes_while_a_batch_is_bisected_fails_all_of_it() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        def fault(outputs: list[Any]) -> list[Any]:
            if len(outputs) > 2:
                raise ValueError("poisoned")
            executor.down = True
            raise DeviceUnavailableError("gone for now")

        executor.fault = fault
        first = submit(fleet, "m", [0.0] * 8)
        await fails(first)

    run_scenario(scenario, RecoverableFake())


def test_requests_that_wait_under_a_policy_are_failed_by_the_check_of_the_idle_device() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        executor.down = True
        await fails(submit(fleet, "m", [1.0]))
        assert executor.log == [], "no batch was tried"

    run_scenario(scenario, RecoverableFake(), policy=static(8))


def test_an_unavailable_device_can_be_retired_only_if_another_one_serves() -> None:
    async def scenario(fleet: Fleet, a: RecoverableFake, b: RecoverableFake) -> None:
        a.down = True
        await asyncio.sleep(1.2)
        with pytest.raises(BadInputError, match="b is the last device that serves m"):
            fleet.set_serving(1, False)
        fleet.set_serving(0, False)
        a.down = False
        await asyncio.sleep(0.3)
        assert (await submit(fleet, "m", [1.0]))[0].device == "b"
        assert [fleet.serves(d) for d in fleet.dispatchers] == [False, True]
        fleet.set_serving(0, True)
        assert (await submit(fleet, "m", [1.0]))[0].device == "a"

    run_scenario(scenario, RecoverableFake("a"), RecoverableFake("b"))


def test_a_drain_ends_while_the_device_is_unavailable() -> None:
    async def scenario(fleet: Fleet, executor: RecoverableFake) -> None:
        executor.down = True
        call = submit(fleet, "m", [1.0])
        await fails(call)
        await asyncio.wait_for(fleet.drain(), 5)

    run_scenario(scenario, RecoverableFake())
