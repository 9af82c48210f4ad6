"""The serving process and its gateways: published state, rejections, slow readers, and processes that die."""

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from policies.rules.control_limit import static
from server.errors import (
    INTERNAL_ERROR,
    DrainingError,
    QueueFullError,
    ServerError,
    TooLateError,
    UnavailableError,
    UnloadedError,
)
from server.gateways import fleet_client, fleet_server
from server.gateways.slots import Slots, create_memory
from tests.support.gateways import (
    ROOT,
    SLOT,
    ForgetfulExecutor,
    Processes,
    Stuck,
    image,
    received,
    run_device,
    run_scenario,
)
from tests.support.virtual_clock import pause


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


def test_a_bug_in_the_fleet_fails_the_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        with pytest.raises(ServerError, match=INTERNAL_ERROR):
            await client.submit("unknown", [image(0)])
        gc.collect()  # a call and its samples refer to each other
        await client.submit("m", [image(0)])
        await processes.all_free()

    caplog.set_level(logging.CRITICAL, "batchwright")
    run_scenario(scenario)


def test_an_output_that_cannot_be_sent_fails_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        executor.fault = lambda outputs: [lambda: 0 for _ in outputs]
        with pytest.raises(ServerError, match=INTERNAL_ERROR):
            await client.submit("m", [image(0)])
        executor.fault = lambda outputs: outputs
        await client.submit("m", [image(0)])
        await processes.all_free()

    caplog.set_level(logging.CRITICAL, "batchwright")
    executor = ForgetfulExecutor()
    run_scenario(scenario, executor=executor)


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


def test_a_state_that_cannot_be_published_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(_: object) -> None:
        raise ValueError("the state takes too many bytes")

    def logged() -> int:
        return len([record for record in caplog.records if "cannot be published" in record.getMessage()])

    async def scenario(processes: Processes) -> None:
        for expected in (1, 2):
            with monkeypatch.context() as broken:
                broken.setattr(processes.server._page, "write", too_large)
                for _ in range(5):
                    processes.server.publish()
            assert logged() == expected
            processes.server.publish()

    run_scenario(scenario)


def test_a_model_that_the_serving_process_lacks_is_unavailable() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        assert not client.is_replaced("m", 0)
        assert client.is_replaced("gone", 0)
        assert not client.is_ready("gone")
        with pytest.raises(UnavailableError):
            client.check_loaded("gone")
        with pytest.raises(UnavailableError):
            client.check_room("gone", 1)

    run_scenario(scenario)
