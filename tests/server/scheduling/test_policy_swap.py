"""Policy swaps by an operator: with the current profile, all policies or none."""

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from policies.catalog import ModelPolicy, choose
from policies.types import SpecError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.policy_swap import swap
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, UNLIMITED, run_scenario


def test_a_policy_is_solved_again_if_the_profile_was_refitted_meanwhile() -> None:
    refitted = replace(STEPS, name="refitted", service_times=tuple(2.0 * t for t in STEPS.service_times))

    async def scenario(dispatcher: Dispatcher, _: Any) -> None:
        fleet, solved_for = Fleet([dispatcher]), list[str]()
        loop, done = asyncio.get_running_loop(), threading.Event()

        def refit() -> None:
            dispatcher.policies.set("m", choose("greedy", refitted))
            done.set()

        def solve(current: ModelPolicy) -> ModelPolicy:
            if not solved_for:  # the controller refits the profile meanwhile
                loop.call_soon_threadsafe(refit)
                done.wait(10.0)
            solved_for.append(current.profile.name)
            return choose("serial", current.profile)

        await swap(fleet, Metrics(), {"m": solve})
        assert solved_for == ["steps", "refitted"]
        assert dispatcher.chosen["m"].spec == "serial"
        assert dispatcher.chosen["m"].profile is refitted

    run_scenario(scenario, {"m": choose("greedy", STEPS)})


def test_no_policy_is_swapped_if_one_cannot_be_used() -> None:
    async def scenario(dispatcher: Dispatcher, _: Any) -> None:
        def refuse(_: ModelPolicy) -> ModelPolicy:
            raise SpecError("no such policy")

        with pytest.raises(SpecError):
            await swap(Fleet([dispatcher]), Metrics(), {"m": refuse})
        assert dispatcher.chosen["m"].spec == "greedy"

    run_scenario(scenario, {"m": choose("greedy", STEPS)})


def test_a_policy_that_is_set_is_logged_with_its_warnings_and_has_no_margin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "batchwright")

    async def scenario(dispatcher: Dispatcher, _: Any) -> str:
        metrics = Metrics()
        metrics.objective_margin("m", dispatcher.device, 0.02)
        metrics.objective_level("m", dispatcher.device, 3)
        await swap(Fleet([dispatcher]), metrics, {"m": lambda current: replace(serial, promised=current.promised)})
        return metrics.render().decode()

    serial = choose("serial", STEPS)
    text = run_scenario(scenario, {"m": replace(choose("greedy", STEPS), promised=0.5)})
    assert 'batchwright_objective_margin_seconds{device="fake",model="m"} 0.0' in text
    assert 'batchwright_objective_level{device="fake",model="m"} 0.0' in text
    first, *warnings = [record.getMessage() for record in caplog.records]
    assert first == "m: policy serial on profile steps"
    assert any("m: policy 'serial' does not pursue the objective, 95% within 500 ms" in each for each in warnings)


@pytest.mark.parametrize(("slower", "lines"), [(1.0, 1), (2.0, 2)])
def test_a_policy_of_several_devices_is_logged_once_for_each_profile(
    caplog: pytest.LogCaptureFixture, slower: float, lines: int
) -> None:
    caplog.set_level(logging.INFO, "batchwright")
    other = replace(STEPS, service_times=tuple(slower * t for t in STEPS.service_times))

    async def scenario(dispatcher: Dispatcher, executor: Any) -> None:
        chosen, clock = {"m": choose("greedy", other)}, asyncio.get_running_loop().time
        second = Dispatcher(executor, chosen, Metrics(), clock, UNLIMITED)
        await swap(Fleet([dispatcher, second]), Metrics(), {"m": lambda current: choose("serial", current.profile)})

    run_scenario(scenario, {"m": choose("greedy", STEPS)})
    assert [record.getMessage() for record in caplog.records] == lines * ["m: policy serial on profile steps"]
