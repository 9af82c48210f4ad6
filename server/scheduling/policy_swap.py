"""Other policies put in place while a server serves: chosen beside the event loop, all of them or none."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from policies.catalog import Chosen, by_stages
from policies.types import SpecError
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics


async def swap(fleet: Fleet, metrics: Metrics, choosing: Mapping[str, Callable[[Chosen], Chosen]]) -> None:
    """Let other policies decide from now on, on all devices.

    Args:
        fleet: whose.
        metrics: hear of it.
        choosing: by model, what makes its policy from the one that decides now, on that one's profile.

    Raises:
        SpecError: a policy cannot be had; nothing has changed then.
    """
    before = {(d, model): d.chosen[model] for d in fleet.dispatchers for model in choosing}
    found: dict[tuple[Dispatcher, str], Chosen] = {}
    while left := [p for p in before if p not in found or found[p].profile is not p[0].chosen[p[1]].profile]:
        for dispatcher, model in left:  # not solved yet; or refitted, or shrunk, meanwhile
            now = replace(before[dispatcher, model], profile=dispatcher.chosen[model].profile)
            found[dispatcher, model] = chosen = await asyncio.to_thread(choosing[model], now)
            if by_stages(chosen.spec) and now.profile.stages == 1 and now.profile.lengths is None:
                raise SpecError(f"policy {chosen.spec!r} decides between stages; start the server with --stages K")
    for (dispatcher, model), chosen in found.items():
        dispatcher.use(model, chosen)
        metrics.policy(model, dispatcher.device, chosen.name, chosen.spec)
