"""Fakes that implement the server's protocols on a virtual clock."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from policies.catalog import Chosen
from policies.profile import Profile
from policies.queue.monitor import Monitor, NoMonitor
from policies.types import Policy
from server.executor import Batch, Completion

STEPS = Profile("steps", tuple(0.010 + 0.001 * b for b in range(1, 9)), energies=tuple(0.1 * b for b in range(1, 9)))


class FakeExecutor:
    """Takes each batch its profile's time on the loop's clock; answers every input with itself.

    Attributes:
        log: (start, finish, inputs) of each batch.
        fault: raises, or changes the outputs, if the test sets it.
    """

    name = "fake"

    def __init__(self, profile: Profile = STEPS) -> None:
        self._profile = profile
        self.log: list[tuple[float, float, list[Any]]] = []
        self.fault: Callable[[list[Any]], list[Any]] = lambda outputs: outputs

    def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
        return asyncio.ensure_future(self._run(batch))

    async def _run(self, batch: Batch) -> Completion:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(self._profile.service_time(len(batch.inputs)))
        self.log.append((start, loop.time(), list(batch.inputs)))
        outputs = self.fault([np.float32(x) if isinstance(x, float) else x for x in batch.inputs])
        return Completion(outputs, start, loop.time())


def chosen(
    policy: Policy, profile: Profile = STEPS, monitor: Monitor | None = None, **fields: Any
) -> Mapping[str, Chosen]:
    """One model, "m", under this policy."""
    return {"m": Chosen("spec", "name", {}, profile, policy, monitor or NoMonitor(), **fields)}
