"""Bins and the rate estimate across policy swaps in the dispatcher."""

import asyncio

import pytest

from policies.catalog import choose
from policies.profile import Profile, load_profile
from server.scheduling.dispatcher import Dispatcher
from tests.support.fakes import FakeExecutor, run_scenario, submit

PROFILE = load_profile("googlenet-tesla-p4-x10")
LINES = Profile("lines", (0.05,) * 4, lengths=(1, 100), length_service_times=((0.001, 0.1),) * 4)


def test_bins_learn_from_each_arrival_once() -> None:
    chosen = choose("multi-bin:2,max_wait_ms=inf", LINES)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        assert chosen.bins is not None
        for n in range(20):
            submit(dispatcher, "m", [n], lengths=[n])
        dispatcher.policies.set("m", chosen)
        assert list(chosen.bins.edges) == []
        for n in range(20, 32):
            submit(dispatcher, "m", [n], lengths=[n])
        assert len(chosen.bins.edges) == 1

    run_scenario(scenario, {"m": chosen})


def test_a_policy_with_a_longer_time_constant_continues_from_the_rate_estimate() -> None:
    bins = choose("multi-bin:8,inner=smdp", PROFILE)

    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        for n in range(400):
            submit(dispatcher, "m", [n])
            await asyncio.sleep(0.05)
        assert dispatcher.queue.arrival_rate("m") > 10.0
        dispatcher.policies.set("m", bins)
        assert dispatcher.queue.arrival_rate("m") == pytest.approx(20.0, rel=0.15)
        await asyncio.sleep(1.0)
        assert dispatcher.queue.arrival_rate("m") > 5.0, "with the time constant of greedy, 0.2 s, it would be near 0"

    run_scenario(scenario, {"m": choose("greedy", PROFILE)})
