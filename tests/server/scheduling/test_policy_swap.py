"""Policy swaps by an operator: with the current profile, all policies or none."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from policies.catalog import Chosen, choose
from policies.types import SpecError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.policy_swap import swap
from server.telemetry.metrics import Metrics
from tests.support.fakes import STEPS, run_scenario


def test_a_policy_is_solved_again_if_the_profile_was_refitted_meanwhile() -> None:
    refitted = replace(STEPS, name="refitted", service_times=tuple(2.0 * t for t in STEPS.service_times))

    async def scenario(dispatcher: Dispatcher, _: Any) -> None:
        fleet, solved_for = Fleet([dispatcher]), list[str]()
        loop, done = asyncio.get_running_loop(), threading.Event()

        def refit() -> None:
            dispatcher.set_policy("m", choose("greedy", refitted))
            done.set()

        def solve(current: Chosen) -> Chosen:
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
        def refuse(_: Chosen) -> Chosen:
            raise SpecError("no such policy")

        with pytest.raises(SpecError):
            await swap(Fleet([dispatcher]), Metrics(), {"m": refuse})
        assert dispatcher.chosen["m"].spec == "greedy"

    run_scenario(scenario, {"m": choose("greedy", STEPS)})
