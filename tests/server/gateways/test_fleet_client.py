"""Gateways and a serving process in one process, over real sockets, in front of a real fleet."""

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray

from policies.profile import Profile
from policies.rules.control_limit import greedy, static
from policies.types import Policy
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch, Completion, ThreadExecutor
from server.energy.meters import CountingMeter
from server.errors import (
    INTERNAL_ERROR,
    DrainingError,
    ExpiredError,
    QueueFullError,
    ServerError,
    TooLargeError,
    TooLateError,
    UnavailableError,
    UnloadedError,
)
from server.gateways import fleet_client, fleet_server
from server.gateways.fleet_client import MAX_INLINE, Answer, FleetClient
from server.gateways.fleet_server import FleetServer, Gateway
from server.gateways.slots import Slots, create_memory
from server.gateways.state_page import StatePage, create_page
from server.models.images.codec import ImageCodec
from server.models.texts.samples import GeneratedTokens, TextSample
from server.scheduling.admission import Limits
from server.scheduling.calls import Sample
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.interface import FleetInterface
from server.telemetry.metrics import Metrics
from tests.support.fakes import FakeExecutor, chosen
from tests.support.virtual_clock import pause, virtual_loop

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


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_each_call_gets_its_own_answers_from_two_gateways_with_cancellations(run: Callable[..., None]) -> None:
    async def scenario(processes: Processes) -> None:
        clients = [await processes.start_gateway() for _ in range(2)]
        rng, codec = np.random.default_rng(1), ImageCodec()

        async def call(number: int) -> bool:
            client, count = clients[number % 2], 1 + number % 3
            numbers = [1000 * number + n for n in range(count)]
            slot = None
            if number % 4:  # received in place, and otherwise decoded elsewhere
                slot, first = received(client, numbers[0])
                inputs = [first, *(image(n) for n in numbers[1:])]
            else:
                inputs = [image(n) for n in numbers]
            try:
                future = client.submit("m", inputs, 10.0)
                if number % 5 == 0:
                    await asyncio.sleep(float(rng.uniform(0.0, 0.004)))
                    if future.cancel():
                        return False
                answers = await future
            finally:
                if slot is not None:
                    slot.release()
            for n, answer in zip(numbers, answers, strict=True):
                assert np.array_equal(answer.output, codec.emulate(image(n)))
                assert (answer.device, answer.energy_source) == ("device", QUICK.energy_source)
                assert answer.energy == pytest.approx(0.1)
                assert 1 <= answer.batch_size <= 8
            return True

        for first in range(0, 300, 6):
            done = await asyncio.gather(*(call(n) for n in range(first, first + 6)))
            assert sum(done) >= 4
        await processes.all_free()
        assert processes.fleet.open_calls == 0

    run_device(scenario, EmulatedDevice({"m": QUICK}, CountingMeter()), run)


def test_an_image_in_a_held_slot_is_not_copied_and_the_device_cannot_write_to_it() -> None:
    writable: list[bool] = []

    def look(inputs: list[Any]) -> list[Any]:
        writable.extend(each.flags.writeable for each in inputs)
        return [each.sum() for each in inputs]

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        slot, pixels = received(client, 1)
        call = client.submit("m", [pixels])
        assert client.take_slot() is None
        ((output, *_),) = await call
        assert output == image(1).sum()
        assert client.take_slot() is None, "the gateway still holds it"
        slot.release()
        assert client.take_slot() is not None
        assert writable == [False]

    executor = ForgetfulExecutor()
    executor.fault = look
    run_scenario(scenario, executor=executor)


def test_samples_behind_a_header_in_one_slot_are_not_copied() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        slot = client.take_slot()
        assert slot is not None
        rows = np.arange(6000, dtype=np.float32).reshape(2, 3000)
        slot.view[101 : 101 + rows.nbytes] = rows.tobytes()
        tensor = np.frombuffer(slot.view[101 : 101 + rows.nbytes], np.float32).reshape(2, 3000)
        answers = await client.submit("m", [{"x": row} for row in tensor])
        assert [answer.output["x"][0] for answer in answers] == [0.0, 3000.0]
        slot.release()
        await processes.all_free()

    run_scenario(scenario)


def test_arrays_of_one_call_share_a_slot_and_other_values_are_sent_as_they_are() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        arrays = [np.full(4001, n, np.uint8) for n in range(30)]
        call = client.submit("m", arrays)
        assert processes.slots[0].free == 0
        assert all((answer.output == n).all() for n, answer in enumerate(await call))
        text, tokens = TextSample([1, 2, 3]), GeneratedTokens([4])
        answers = await client.submit("m", [text, tokens, np.zeros(3), 1.5])
        assert answers[0].output == text
        assert answers[1].output == tokens
        assert answers[2].output.tolist() == [0.0] * 3
        await processes.all_free()

    run_scenario(scenario)


def test_large_inputs_without_a_slot_are_part_of_the_message_up_to_a_limit() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        large = np.arange(SLOT, dtype=np.float32)
        (answer,) = await client.submit("m", [large])
        assert np.array_equal(answer.output, large)
        with pytest.raises(TooLargeError, match=f"maximum of {MAX_INLINE}"):
            client.submit("m", [np.zeros(MAX_INLINE + 1, np.uint8)])
        with pytest.raises(TooLargeError, match=f"maximum of {MAX_INLINE}"):
            client.submit("m", [image(0), b"x" * MAX_INLINE])
        with pytest.raises(TooLargeError, match="may take 2 slots"):
            client.submit("m", [image(n) for n in range(3)])
        await processes.all_free()

    run_scenario(scenario)


def test_calls_are_rejected_when_the_slots_are_used_up() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=3)
        call = client.submit("m", [image(0), image(1)])
        with pytest.raises(QueueFullError, match="all 3 slots") as caught:
            client.submit("m", [image(2), image(3)])
        assert caught.value.retry_after == 1
        assert processes.slots[0].free == 1
        await call
        await processes.all_free()

    run_scenario(scenario)


def test_a_cancelled_call_leaves_the_queue_and_its_slots_are_free_again() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        call = client.submit("m", [image(0)])
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 1
        call.cancel()
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 0
        await processes.all_free()

    run_scenario(scenario, static(8))


def test_a_call_that_is_cancelled_before_it_is_sent_frees_its_slots() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        client.submit("m", [image(0)]).cancel()
        await processes.all_free()
        assert processes.fleet.open_calls == 0

    run_scenario(scenario)


@pytest.mark.parametrize("end", ["cancel", "gateway dies"])
def test_a_slot_is_not_free_while_a_batch_in_service_reads_it(end: str) -> None:
    device = Stuck()

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        slot, pixels = received(client, 3)
        call = client.submit("m", [pixels])
        slot.release()
        assert await asyncio.to_thread(device.started.wait, 10.0)
        memory = processes.slots[0]
        if end == "cancel":
            call.cancel()
        else:
            await client.close()
            with pytest.raises(UnavailableError):
                await call
            del memory, client, pixels, slot
            processes.clients.clear()
            processes.slots.clear()
            gc.collect()
        await asyncio.sleep(0.05)
        assert processes.fleet.open_calls == 0
        if end == "cancel":
            assert processes.slots[0].free == 0
        device.go.set()
        await processes.all_free()
        await processes.wait_until(lambda: bool(device.sums))
        assert device.sums == [int(image(3).sum())]

    run_device(scenario, device)


def test_no_slot_of_a_call_is_free_while_one_of_its_samples_is_read() -> None:
    device = Stuck()

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        call = client.submit("m", [image(0), image(1)])
        assert await asyncio.to_thread(device.started.wait, 10.0)
        call.cancel()
        await asyncio.sleep(0.05)
        assert processes.slots[0].free == 0
        device.go.set()
        await processes.all_free()
        assert device.sums == [int(image(0).sum())], "the other sample was not served"

    run_device(scenario, device, largest=1)


def test_an_image_that_another_call_uses_is_copied() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=4)
        slot, pixels = received(client, 0)
        calls = [client.submit("m", [pixels]) for _ in range(2)]
        assert processes.slots[0].free == 2
        slot.release()
        await asyncio.gather(*calls)
        calls.append(client.submit("m", [pixels]))
        assert processes.slots[0].free == 3, "its slot is free, so that it is copied to be safe"
        for call in calls:
            assert np.array_equal((await call)[0].output, image(0))
        await processes.all_free()

    run_scenario(scenario)


def test_a_failed_call_frees_its_slots(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def serve(self, batch: Batch, /) -> Sequence[Any]:
            raise ValueError(f"broken for {len(batch.inputs)}")

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        calls = [client.submit("m", [image(n)]) for n in range(2)]
        for call in calls:
            with pytest.raises(ServerError, match="failed on this input alone, with ValueError"):
                await call
        await processes.all_free()

    caplog.set_level(logging.CRITICAL, "batchwright")  # kept records have the tracebacks, and so the inputs
    run_device(scenario, Broken())


def test_a_bug_in_the_fleet_fails_the_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        with pytest.raises(ServerError, match=INTERNAL_ERROR):
            await client.submit("unknown", [image(0)])
        await client.submit("m", [image(0)])
        await processes.all_free()

    caplog.set_level(logging.CRITICAL, "batchwright")
    run_scenario(scenario)


def test_timeouts_are_instants_of_the_common_clock() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        await asyncio.sleep(2.0)
        call = client.submit("m", [image(0)], 0.5)
        with pytest.raises(ExpiredError, match="timeout pass") as caught:
            await call
        assert caught.value.status == 504
        assert processes.clock() == pytest.approx(2.5, abs=0.02)
        await processes.all_free()

    run_scenario(scenario, static(8))


def test_rejections_of_the_serving_process_are_the_same_as_in_one_process() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        with pytest.raises(QueueFullError) as direct:
            processes.fleet.submit("m", [0.0] * 5)
        with pytest.raises(QueueFullError) as sent:
            await client.submit("m", [image(n) for n in range(5)])
        assert (str(sent.value), sent.value.retry_after) == (str(direct.value), direct.value.retry_after)
        await processes.all_free()

    run_scenario(scenario, capacity=4)


def test_calls_are_rejected_early_by_the_published_state() -> None:
    async def scenario(processes: Processes) -> None:
        client, fleet = await processes.start_gateway(), processes.fleet
        client.check_loaded("m")
        client.check_room("m", 4)
        assert client.ready
        assert client.alive
        assert client.is_ready("m")
        with pytest.raises(QueueFullError, match="no room for 5 more: 0 of 4 places"):
            client.check_room("m", 5)
        with pytest.raises(TooLateError, match="the answer would take about 11 ms, but 10 ms are left"):
            client.check_room("m", 1, 0.01)
        fleet.unloaded.add("m")
        processes.server.publish()
        with pytest.raises(UnloadedError, match="m is unloaded"):
            client.check_loaded("m")
        assert not client.is_ready("m")
        fleet.unloaded.clear()
        calls = [client.submit("m", [float(n)]) for n in range(4)]
        await asyncio.sleep(0.006)
        assert client.waiting == 4
        assert client.backlog() == pytest.approx(fleet.backlog())
        with pytest.raises(QueueFullError, match="no room for 1 more: 4 of 4 places") as caught:
            client.check_room("m", 1)
        assert caught.value.retry_after == 1
        for call in calls:
            call.cancel()
        await asyncio.sleep(0.006)
        client.check_room("m", 1)
        fleet.dispatchers[0].retire()
        fleet.shutting_down = True
        processes.server.publish()
        with pytest.raises(DrainingError, match="the server is stopping"):
            client.check_room("m", 1)
        assert client.shutting_down
        assert not client.ready

    run_scenario(scenario, static(8), capacity=4)


def test_changes_without_calls_are_published_too() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        processes.fleet.unloaded.add("m")
        await asyncio.sleep(1.0)
        with pytest.raises(UnloadedError):
            client.check_loaded("m")

    run_scenario(scenario)


def test_before_the_first_state_and_without_a_serving_process_calls_are_unavailable() -> None:
    async def scenario() -> None:
        client = FleetClient(StatePage(create_page(1)))
        for check in (lambda: client.check_room("m", 1), lambda: client.submit("m", [1.0]), client.backlog):
            with pytest.raises(UnavailableError, match="the serving process does not answer") as caught:
                check()
            assert caught.value.retry_after == 1
        assert client.take_slot() is None
        assert not client.ready
        assert not client.alive
        assert not client.shutting_down

    asyncio.run(scenario())


def test_when_the_serving_process_dies_calls_fail_and_the_next_one_takes_over() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        slot, pixels = received(client, 0)
        calls = [client.submit("m", [pixels]), client.submit("m", [image(1)])]
        await asyncio.sleep(0.001)
        for gateway in [*processes.server.gateways]:
            gateway._channel.abort()
        for call in calls:
            with pytest.raises(UnavailableError, match="the serving process does not answer") as caught:
                await call
            assert caught.value.retry_after == 1
        with pytest.raises(UnavailableError):
            client.check_room("m", 1)
        slot.release()  # of the memory before
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = create_memory(SLOT, 2)
        await processes.server.connect(other, memory, "gateway")
        await client.connect(one, Slots(memory, SLOT))
        client.check_room("m", 1)
        await client.submit("m", [image(2)])

    run_scenario(scenario, static(1))


def test_a_serving_process_that_publishes_nothing_is_unavailable() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        assert (client.alive, client.ready) == (True, True)
        pause(6.0)
        assert (client.alive, client.ready) == (False, False)
        with pytest.raises(UnavailableError):
            client.check_room("m", 1)
        await asyncio.sleep(0.3)
        client.check_room("m", 1)
        assert (client.alive, client.ready) == (True, True)

    run_scenario(scenario)


def test_a_gateway_that_is_gone_before_it_is_connected_is_lost() -> None:
    async def scenario(processes: Processes) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        one.close()
        await processes.server.connect(other, create_memory(SLOT, 1), "gateway")
        await asyncio.sleep(0.01)
        assert [gateway.name for gateway in processes.lost] == ["gateway"]
        assert not processes.server.gateways

    run_scenario(scenario)


GATEWAY = """
import asyncio, socket, sys
import numpy as np
from server.gateways.fleet_client import FleetClient
from server.gateways.slots import Slots
from server.gateways.state_page import StatePage

async def main(sock, memory, page):
    client = FleetClient(StatePage(page))
    await client.connect(socket.socket(fileno=sock), Slots(memory, 150_528))
    calls = [client.submit("m", [np.full((224, 224, 3), n, np.uint8)]) for n in range(8)]
    await asyncio.sleep(0.01)
    print("submitted", flush=True)
    await asyncio.gather(*calls)

asyncio.run(main(*map(int, sys.argv[1:])))
"""


def test_a_gateway_process_that_is_killed_costs_only_its_own_calls() -> None:
    device = Stuck()

    async def scenario(processes: Processes) -> None:
        other = await processes.start_gateway()
        one, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        memory = create_memory(SLOT, 8)
        passed = [one.fileno(), memory, processes.page]
        command = [sys.executable, "-c", GATEWAY, *map(str, passed)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, pass_fds=passed, stdout=subprocess.PIPE)
        one.close()
        await processes.server.connect(sock, memory, "killed")
        os.close(memory)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"submitted\n"
        kept = [other.submit("m", [image(n)]) for n in range(4)]
        assert await asyncio.to_thread(device.started.wait, 10.0)
        process.kill()
        await process.wait()
        await processes.wait_until(lambda: bool(processes.lost))
        assert [gateway.name for gateway in processes.lost] == ["killed"]
        await asyncio.sleep(0.01)
        assert processes.fleet.open_calls == 4
        device.go.set()
        await asyncio.gather(*kept)
        of_dead = [each for each in device.sums if each % (224 * 224 * 3) == 0]
        assert 1 <= len(of_dead) <= 8, "the batch in service ran on, and read what was sent"
        assert sum(int(image(n).sum()) in device.sums for n in range(4)) == 4
        await processes.all_free()

    run_device(scenario, device)


def test_when_a_gateway_dies_its_calls_are_cancelled_and_those_of_the_others_are_served() -> None:
    async def scenario(processes: Processes) -> None:
        dying, other = await processes.start_gateway(), await processes.start_gateway()
        calls = [dying.submit("m", [image(n)]) for n in range(3)]
        kept = [other.submit("m", [image(n)]) for n in range(2)]
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 5
        assert dying._channel is not None
        dying._channel.abort()
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 2
        assert [gateway.name for gateway in processes.lost] == ["gateway 0"]
        kept += [other.submit("m", [image(n)]) for n in range(6)]
        await asyncio.gather(*kept)
        assert len(await asyncio.gather(*calls, return_exceptions=True)) == 3
        processes.slots = processes.slots[1:]
        await processes.all_free()

    run_scenario(scenario, static(8))


def test_a_gateway_that_does_not_read_is_disconnected_and_does_not_delay_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_server, "_MAX_BACKLOG", 50_000)

    async def scenario(processes: Processes) -> None:
        hung, other = await processes.start_gateway(buffer=4096), await processes.start_gateway()
        assert hung._channel is not None
        assert hung._channel._transport is not None
        hung._channel._transport.pause_reading()
        stuck = []
        while not processes.lost:
            stuck.append(hung.submit("m", [np.zeros(10_000)]))
            await other.submit("m", [image(0)])
            assert len(stuck) < 10
        assert [gateway.name for gateway in processes.lost] == ["gateway 0"]
        await other.submit("m", [image(0)])
        hung._channel._transport.resume_reading()
        results = await asyncio.gather(*stuck, return_exceptions=True)
        assert isinstance(results[-1], UnavailableError)

    run_scenario(scenario)


def test_calls_are_unavailable_while_the_serving_process_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_client, "_MAX_BACKLOG", 50_000)

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(buffer=4096)
        (gateway,) = processes.server.gateways
        assert gateway._channel._transport is not None
        gateway._channel._transport.pause_reading()
        calls = [client.submit("m", [bytes(100_000)])]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            client.submit("m", [1.0])
        gateway._channel._transport.resume_reading()
        await asyncio.gather(*calls)
        await client.submit("m", [1.0])

    run_scenario(scenario)


def test_all_answers_are_sent_before_the_serving_process_closes() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(buffer=4096)
        calls = [client.submit("m", [np.full(10_000, float(n))]) for n in range(8)]
        await asyncio.sleep(0.001)
        await processes.fleet.drain()
        await processes.server.close()
        for n, call in enumerate(calls):
            ((output, *_),) = await call
            assert output[0] == n

    run_scenario(scenario)


def test_control_messages_pass_in_both_directions() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        at_server: list[tuple[str, object]] = []
        at_client: list[object] = []
        processes.server.on_control = lambda gateway, message: at_server.append((gateway.name, message))
        client.on_control = at_client.append
        client.send_control({"ended": ("m", 1)})
        for gateway in processes.server.gateways:
            gateway.send_control(["reload"])
        await asyncio.sleep(0.001)
        assert at_server == [("gateway 0", {"ended": ("m", 1)})]
        assert at_client == [["reload"]]

    run_scenario(scenario)


def test_fleet_and_client_have_one_interface() -> None:
    def takes(_: type[FleetInterface]) -> None: ...

    takes(Fleet)
    takes(FleetClient)
    sample = Sample(None, None, np.zeros(1), batch_size=2, waiting=1.0, service=2.0)  # type: ignore[arg-type]
    assert {*Answer._fields} < {*Sample.__slots__}
    assert sample.energy_source == ""
    assert inf == float("inf")


def test_a_gateway_imports_neither_torch_nor_the_solver() -> None:
    modules = ("fleet_client", "slots", "state_page", "shared_buckets", "channel")
    imports = ", ".join(f"server.gateways.{name}" for name in modules)
    program = f"import sys, {imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "matplotlib", "scipy", "pandas", "plotly", "server.scheduling.fleet", "server.backends.executor"}
    assert not heavy & set(done.stdout.split())
