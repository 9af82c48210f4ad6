"""Admission control: by queue capacity, and by the time until the answer."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rules.control_limit import greedy, serial, static
from server.errors import ExpiredError, QueueFullError, TooLateError
from server.scheduling.admission import Lateness, Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import STEPS, FakeExecutor, chosen, run_scenario, submit


def test_capacity_counts_waiting_requests_and_a_call_is_admitted_whole_or_not_at_all() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)  # in service: it does not count
        waiting = submit(dispatcher, "m", [1.0, 2.0, 3.0])
        with pytest.raises(QueueFullError, match="3 of 4 places") as refusal:
            submit(dispatcher, "m", [4.0, 5.0])
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after >= 1
        assert dispatcher.queue.length("m") == 3
        await asyncio.gather(running, waiting, submit(dispatcher, "m", [6.0]))

    run_scenario(scenario, chosen(greedy(8)), limits=Limits(4))


def test_a_call_whose_answer_would_be_late_is_rejected_at_once() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        with pytest.raises(TooLateError, match="about 11 ms, but 11 ms are left of the timeout"):
            submit(dispatcher, "m", [0.0], 0.0112)  # 5 per cent of it are kept for the network
        running = submit(dispatcher, "m", [0.0], 0.012)
        await asyncio.sleep(0.001)  # 10 ms of service are left
        waiting = submit(dispatcher, "m", [float(n) for n in range(10)])  # 18 ms for eight, 12 for two
        with pytest.raises(TooLateError, match="about 41 ms") as refused:
            submit(dispatcher, "m", [1.0], 0.043)
        assert refused.value.retry_after == 1
        assert dispatcher.queue.length("m") == 10
        in_time = submit(dispatcher, "m", [1.0], 0.044)
        await asyncio.gather(running, waiting, in_time)
        assert asyncio.get_running_loop().time() == pytest.approx(0.042)

    run_scenario(scenario, chosen(greedy(8)))


def test_the_retry_time_of_a_full_queue_is_its_backlog() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)
        waiting = submit(dispatcher, "m", [float(n) for n in range(1000)])
        with pytest.raises(QueueFullError, match="retry in 3 s"):  # 125 batches of 18 ms
            submit(dispatcher, "m", [1.0])
        await asyncio.gather(running, waiting)

    run_scenario(scenario, chosen(greedy(8)), limits=Limits(1000))


def test_a_request_that_can_no_longer_be_on_time_is_dropped_before_the_launch() -> None:
    slow = FakeExecutor(replace(STEPS, service_times=(0.1,) * 8))  # 11 to 18 ms by the profile

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)
        late = submit(dispatcher, "m", [1.0], 0.105)  # 6 ms are left when the device is free: too few for any batch
        stays = submit(dispatcher, "m", [2.0])
        with pytest.raises(ExpiredError, match="after 99 ms the timeout would pass before an answer"):
            await late
        await asyncio.gather(running, stays)
        assert [entry[2] for entry in executor.log] == [[0.0], [2.0]]

    run_scenario(scenario, chosen(greedy(8)), slow)


def test_a_request_that_the_policys_own_batch_serves_in_time_is_not_dropped() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        running = submit(dispatcher, "m", [0.0])
        await asyncio.sleep(0.001)
        urgent = submit(dispatcher, "m", [1.0], 0.023)  # 13 ms are left when the device is free: 11 are needed alone
        others = [submit(dispatcher, "m", [float(n)]) for n in range(8)]
        assert (await urgent)[0].batch_size == 1
        await asyncio.gather(running, *others)

    run_scenario(scenario, chosen(serial()))


def test_late_answers_under_a_backlog_raise_the_margin_which_decays_without_observations() -> None:
    slow = FakeExecutor(replace(STEPS, service_times=(0.1,) * 8))  # 11 to 18 ms by the profile

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        async def backlog() -> list["asyncio.Future[list[Sample]]"]:
            calls = [submit(dispatcher, "m", [float(n)], 2.0) for n in range(80)]
            await asyncio.sleep(0.001)
            return calls

        await asyncio.gather(*await backlog())  # the last after 1 s, 180 ms by the profile
        calls = await backlog()
        with pytest.raises(TooLateError, match="about 1"):
            submit(dispatcher, "m", [0.0], 0.9)
        await asyncio.gather(*calls)
        submit(dispatcher, "m", [0.0], 0.05).cancel()  # without a backlog the margin does not apply
        await asyncio.sleep(60)
        calls = await backlog()
        await asyncio.gather(*calls, submit(dispatcher, "m", [0.0], 1.9))

    run_scenario(scenario, chosen(greedy(8)), slow)


def test_a_policy_that_waits_on_purpose_does_not_raise_the_margin() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        for _ in range(5):
            with pytest.raises(ExpiredError):
                await submit(dispatcher, "m", [0.0], 0.5)
        assert executor.log == []

    run_scenario(scenario, chosen(static(8)))


@given(st.lists(st.floats(-1, 1), min_size=30, max_size=60))
def test_the_margin_covers_most_observations(excesses: list[float]) -> None:
    lateness = Lateness()
    for n, excess in enumerate(excesses):
        lateness.observe(excess, 0.01 * n)
    margin = lateness.margin(0.6)
    assert 0.0 <= margin <= 3.0 * max(map(abs, excesses))
    steady = Lateness()
    for n in range(60):
        steady.observe(0.1, 0.01 * n)
    assert steady.margin(0.6) == pytest.approx(0.1, rel=0.1)
