"""Other policies put in place while a server serves: chosen beside the event loop, all of them or none."""

import asyncio
from collections.abc import Callable, Mapping

from policies.catalog import Chosen, by_stages
from policies.types import SpecError
from server.dispatcher import Dispatcher
from server.metrics import Metrics


async def swap(
    dispatcher: Dispatcher, metrics: Metrics, choosing: Mapping[str, Callable[[Chosen], Chosen]]
) -> Mapping[str, Chosen]:
    """Let other policies decide from now on.

    Args:
        dispatcher: whose.
        metrics: hear of it.
        choosing: by model, what makes its policy, on the profile of the one that decides now.

    Returns:
        What decides now.

    Raises:
        SpecError: a policy cannot be had; nothing has changed then.
    """
    while True:
        before = {model: dispatcher.chosen[model] for model in choosing}
        chosen = {model: await asyncio.to_thread(choose, before[model]) for model, choose in choosing.items()}
        if all(dispatcher.chosen[model].profile is now.profile for model, now in before.items()):
            break  # else one was refitted, or shrunk, meanwhile
    for choice in chosen.values():
        if by_stages(choice.spec) and choice.profile.stages == 1 and choice.profile.lengths is None:
            raise SpecError(f"policy {choice.spec!r} decides between stages; start the server with --stages K")
    for model, choice in chosen.items():
        dispatcher.use(model, choice)
        metrics.policy(model, choice.name, choice.spec)
    return chosen
