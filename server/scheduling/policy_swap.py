"""Policy swaps while serving: new policies are solved off the event loop, then all of them are set, or none."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from policies.catalog import ModelPolicy, by_stages
from policies.planning.reachability import objective_warnings
from policies.types import SpecError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright")
_pool = ThreadPoolExecutor(1, "policies")  # that of asyncio.to_thread would delay the exit until they are solved


async def swap(fleet: Fleet, metrics: Metrics, choosers: Mapping[str, Callable[[ModelPolicy], ModelPolicy]]) -> None:
    """Set new policies on all devices.

    Args:
        fleet: the devices.
        metrics: record the new policies.
        choosers: by model, a function that returns the new policy, given the current one with the current profile. It
            runs in a thread, and runs again if the profile has changed meanwhile.

    Raises:
        SpecError: one of the policies cannot be used; no policy has been changed.
    """
    loop = asyncio.get_running_loop()
    before = {(d, model): d.chosen[model] for model in choosers for d in fleet.devices_of(model)}
    solved: dict[tuple[Dispatcher, str], ModelPolicy] = {}
    while unsolved := [
        (dispatcher, model)
        for dispatcher, model in before
        if (dispatcher, model) not in solved
        or solved[dispatcher, model].profile is not dispatcher.chosen[model].profile  # replaced meanwhile
    ]:
        for dispatcher, model in unsolved:
            current = replace(before[dispatcher, model], profile=dispatcher.chosen[model].profile)
            solved[dispatcher, model] = chosen = await loop.run_in_executor(_pool, choosers[model], current)
            if by_stages(chosen.spec) and current.profile.stages == 1:
                raise SpecError(f"policy {chosen.spec!r} decides between stages; start the server with --stages K")
    for (dispatcher, model), chosen in solved.items():
        dispatcher.policies.set(model, chosen)
        metrics.policy(model, dispatcher.device, chosen.name, chosen.spec)
        metrics.objective(model, chosen.objective, chosen.share)
        metrics.objective_margin(model, dispatcher.device, chosen.margin)
        metrics.objective_level(model, dispatcher.device, 0)
    logged = {(model, chosen.profile): chosen for (_, model), chosen in solved.items()}
    for (model, _), chosen in logged.items():
        await loop.run_in_executor(_pool, log_policy, model, chosen)


def log_policy(model: str, chosen: ModelPolicy) -> None:
    """Log a policy that is set, and what is valid but probably not intended; may take long."""
    profile = chosen.profile
    flags = "".join(f", {key}={value}" for key, value in chosen.defaults.items() if key in chosen.parameters)
    _log.info("%s: policy %s%s on profile %s", model, chosen.spec, flags, profile.name)
    if chosen.name == "file" and chosen.table is not None and chosen.table.profile != profile.name:
        _log.warning(
            "%s: the policy file was solved for profile %s and is used with %s; solve it for this profile",
            model,
            chosen.table.profile,
            profile.name,
        )
    for warning in objective_warnings(chosen):
        _log.warning("%s: %s", model, warning)
