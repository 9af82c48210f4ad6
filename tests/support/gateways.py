"""A serving process and gateways in one process, over real sockets, in front of a real fleet."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from policies.rules.control_limit import greedy
from policies.types import Policy
from server.backends.executor import Batch, Completion, ThreadExecutor
from server.gateways.fleet_client import FleetClient
from server.gateways.fleet_server import FleetServer, Gateway
from server.gateways.slots import Slots, create_memory
from server.gateways.state_page import StatePage, create_page
from server.scheduling.admission import Limits
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from tests.support.fakes import FakeExecutor, chosen
from tests.support.virtual_clock import virtual_loop

ROOT = Path(__file__).parents[3]
SLOT = 150_528
QUICK = Profile("quick", tuple(1e-3 + 1e-4 * b for b in range(1, 9)), energies=tuple(0.1 * b for b in range(1, 9)))


class ForgetfulExecutor(FakeExecutor):
    """Keeps no inputs, which would be in use otherwise."""

    async def _serve(self, batch: Batch) -> Completion:
        completion = await super()._serve(batch)
        self.log.clear()
        return completion


class Processes:
    """A serving process and its gateways, on one event loop."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float], capacity: int) -> None:
        self.fleet = fleet
        self.clock = clock
        self.page = create_page(1)
        self.server = FleetServer(fleet, StatePage(self.page), capacity, clock=clock)
        self.server.publish()
        self.clients: list[FleetClient] = []
        self.slots: list[Slots] = []
        self.lost: list[Gateway] = []
        self.server.on_lost = self.lost.append

    async def start_gateway(self, count: int = 16, buffer: int | None = None) -> FleetClient:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if buffer is not None:
            for sock in (one, other):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        memory = create_memory(SLOT, count)
        client, slots = FleetClient(StatePage(self.page), self.clock), Slots(memory, SLOT)
        await self.server.connect(other, memory, f"gateway {len(self.clients)}")
        await client.connect(one, slots)
        os.close(memory)
        self.clients.append(client)
        self.slots.append(slots)
        return client

    async def all_free(self) -> None:
        """Wait until all slots are free."""
        await self.wait_until(lambda: all(slots.free == slots.count for slots in self.slots))

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not reached within 10 s; free slots: {[slots.free for slots in self.slots]}")


Scenario = Callable[[Processes], Coroutine[Any, Any, None]]


def run_scenario(
    scenario: Scenario, policy: Policy | None = None, capacity: int = 1000, executor: FakeExecutor | None = None
) -> None:
    """Run a scenario with a fake device on a virtual clock."""
    loop = virtual_loop()
    made = executor or ForgetfulExecutor()

    async def main() -> None:
        limits = Limits(capacity)
        dispatcher = Dispatcher(made, chosen(policy or greedy(8)), Metrics(), loop.time, limits)
        await _run(scenario, Processes(Fleet([dispatcher], capacity), loop.time, capacity))

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def _run(scenario: Scenario, processes: Processes) -> None:
    task = asyncio.ensure_future(processes.fleet.run())
    try:
        await scenario(processes)
    finally:
        for client in processes.clients:
            await client.close()
        await processes.server.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def image(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (224, 224, 3), np.uint8)


def received(client: FleetClient, number: int) -> tuple[Any, NDArray[np.uint8]]:
    """An image that was received in a slot, and the slot."""
    slot = client.take_slot()
    assert slot is not None
    slot.view[:] = image(number).tobytes()
    return slot, np.frombuffer(slot.view, np.uint8).reshape(224, 224, 3)


class Stuck:
    """A device of which a batch ends when a test lets it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started = threading.Event()
        self.sums: list[int] = []

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        self.started.set()
        assert self.go.wait(10.0)
        self.sums += [int(each.sum()) for each in batch.inputs]
        return [np.float32(0.0) for _ in batch.inputs]


def run_device(scenario: Scenario, device: Any, run: Callable[..., None] = asyncio.run, largest: int = 8) -> None:
    """Run a scenario with a device in its thread, in real time."""

    async def main() -> None:
        executor = ThreadExecutor(device, "device")
        loop = asyncio.get_running_loop()
        dispatcher = Dispatcher(executor, chosen(greedy(largest), QUICK), Metrics(), loop.time)
        try:
            await _run(scenario, Processes(Fleet([dispatcher]), loop.time, 1024))
        finally:
            executor.close()

    run(main())
