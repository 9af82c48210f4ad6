"""The serving process and gateways that connect at odd moments."""

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchwright import Model, Tensor
from policies.rules.control_limit import greedy
from server.api.inference import Inference
from server.app import gateway, gateway_hub
from server.app.gateway import GatewayProcess
from server.app.gateway_hub import GatewayHub
from server.config import Settings
from server.errors import NotFoundError, UnavailableError
from server.gateways.fleet_client import FleetClient
from server.gateways.setup import FLEET_SOCKET, GREETING
from server.gateways.slots import Slots
from server.gateways.state_page import StatePage
from server.models.images.codec import emulated_model
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.memory_budget import MemoryBudget
from tests.support.fakes import FakeExecutor, chosen


@pytest.mark.parametrize(
    ("tensors", "served"),
    [
        ({"x": Tensor("FP32", [4])}, True),
        ({"x": Tensor("FP32", [4]), "y": Tensor("INT64", [2, 2])}, True),
        ({"x": Tensor("FP32", [2**22 - 2**11])}, True),  # a slot of 16 MiB without the room for a header
        ({"x": Tensor("FP32", [2**22])}, False),
        ({"x": Tensor("FP32", [-1])}, False),
        ({"x": Tensor("BYTES", [1])}, False),
    ],
)
def test_gateways_serve_models_whose_samples_fit_into_a_slot(tensors: dict[str, Tensor], served: bool) -> None:
    model = Model()
    model.inputs, model.outputs = tensors, {"y": Tensor("FP32", [1])}  # type: ignore[misc]  # of the class
    described: ServedModel = ServedModel("m", TensorCodec(model), (), "emulated", 8)
    assert (gateway_hub._portable(described, 0) is not None) == served


class Hub:
    """A hub, and the control messages that each connected gateway has received."""

    def __init__(self, folder: Path, bound: socket.socket) -> None:
        self.folder = folder
        metrics = Metrics()
        dispatcher = Dispatcher(FakeExecutor(), chosen(greedy(8)), metrics, asyncio.get_running_loop().time)
        (model,) = dispatcher.chosen
        inference = Inference(
            {model: emulated_model(model, 8)},
            Fleet([dispatcher]),
            metrics,
            ThreadPoolExecutor(1),
            8,
            MemoryBudget(2**20),
        )
        self.model, self.fleet = model, inference.fleet
        self.hub = GatewayHub(inference, Settings(**dict[str, Any](models=[model], gateways=2)), 2, folder, bound)
        self.hub.listen()

    async def accepted(self) -> socket.socket:
        """The socket of a gateway that waits for the greeting."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, str(self.folder / FLEET_SOCKET))
        return connection

    async def connected(self, connection: socket.socket) -> tuple[FleetClient, list[Any]]:
        """The client of a gateway, and a list of the control messages that it receives."""
        connection.setblocking(True)
        greeting, (memory, page), _, _ = await asyncio.to_thread(socket.recv_fds, connection, GREETING.size, 2)
        connection.setblocking(False)
        client = FleetClient(StatePage(page))
        messages: list[Any] = []
        client.on_control = messages.append
        await client.connect(connection, Slots(memory, GREETING.unpack(greeting)[0]))
        os.close(memory)
        os.close(page)
        return client, messages

    async def close(self, *clients: FleetClient) -> None:
        """Disconnect these clients, and stop the hub."""
        for client in clients:
            await client.close()
        await self.hub.stop()

    @property
    def names(self) -> list[str]:
        """The names of the connected gateways in the log."""
        return [gateway.name for gateway in self.hub._fleet.gateways]


def run(scenario: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    with socket.socket() as bound:
        asyncio.run(asyncio.wait_for(scenario(bound), 60.0))


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_gateway_that_connects_while_the_server_stops_is_told_so(tmp_path: Path) -> None:
    async def scenario(bound: socket.socket) -> None:
        hub = Hub(tmp_path, bound)
        first, told_first = await hub.connected(await hub.accepted())
        await until(lambda: told_first)
        stopping = asyncio.create_task(hub.hub.stop())
        await until(lambda: told_first[1:])
        second, told_second = await hub.connected(await hub.accepted())
        await until(lambda: told_second[1:])
        assert [[message[0] for message in told] for told in (told_first, told_second)] == [["setup", "stop"]] * 2
        await first.close()
        await second.close()
        await stopping

    run(scenario)


def test_a_gateway_that_cannot_be_connected_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then tries again; one that is left waiting would never serve."""

    def no_memory(*_: int) -> int:
        raise OSError(28, "No space left on device")

    async def scenario(bound: socket.socket) -> None:
        hub = Hub(tmp_path, bound)
        monkeypatch.setattr(gateway_hub, "create_memory", no_memory)
        connection = await hub.accepted()
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        connection.close()
        monkeypatch.undo()
        client, told = await hub.connected(await hub.accepted())
        await until(lambda: told)
        await hub.close(client)

    run(scenario)


def test_a_call_for_the_serving_process_before_is_rejected(tmp_path: Path) -> None:
    """Its inputs may have another signature, and both processes count the revisions of a model from 0."""

    async def scenario(bound: socket.socket) -> None:
        hubs, revisions = [], []
        for name in ("before", "now"):
            folder = tmp_path / name
            folder.mkdir()
            hub = Hub(folder, bound)
            client, told = await hub.connected(await hub.accepted())
            await until(lambda told=told: told)
            revisions.append(told[0][2][hub.model].revision)
            hubs.append((hub, client))
        hub, client = hubs[1]
        assert client.is_replaced(hub.model, revisions[0])
        assert not client.is_replaced(hub.model, revisions[1])
        with pytest.raises(UnavailableError, match="send the call again"):
            await client.submit(hub.model, [1.0], revision=revisions[0])
        with pytest.raises(NotFoundError, match="no model 'gone'"):
            await client.submit("gone", [1.0], revision=revisions[1])
        call = client.submit(hub.model, [1.0], revision=revisions[1])
        await until(lambda: hub.fleet.waiting)
        call.cancel()
        for hub, client in hubs:
            await hub.close(client)

    run(scenario)


def test_a_control_message_that_fails_costs_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bound: socket.socket) -> None:
        hub = Hub(tmp_path, bound)
        client, told = await hub.connected(await hub.accepted())
        await until(lambda: told)
        client.send_control(("metrics", None))
        client.send_control(("number", 3))
        await until(lambda: hub.names == ["gateway 3"])

        def fail(message: Any) -> None:
            told.append(message)
            raise ValueError("cannot be handled")

        client.on_control = fail
        (connected,) = hub.hub._fleet.gateways
        connected.send_control("first")
        connected.send_control("second")
        await until(lambda: told[-1] == "second")
        assert client.connected
        await hub.close(client)

    run(scenario)
    failed = [record for record in caplog.records if "message between a gateway" in record.getMessage()]
    assert len(failed) == 3


def test_a_gateway_keeps_its_number_and_forgets_models_that_the_next_serving_process_lacks(tmp_path: Path) -> None:
    async def scenario(bound: socket.socket) -> None:
        hub, process = Hub(tmp_path, bound), GatewayProcess(tmp_path, 7, bound, -1)
        process._models = {"gone": None, hub.model: None}
        client, _ = await process._connect()
        assert [*process._models] == [hub.model]
        await until(lambda: hub.names == ["gateway 7"])
        await hub.close(client)

    run(scenario)


def slot_files() -> int:
    """The number of open files that are memory of slots."""
    gc.collect()
    files = [file.readlink().name for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return len([name for name in files if "batchwright-slots" in name])


def test_a_gateway_that_cannot_map_its_slots_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(range(3))

    def slots(memory: int, size: int) -> Slots:
        if next(failures, None) is not None:
            raise OSError(12, "Cannot allocate memory")
        return Slots(memory, size)

    async def scenario(bound: socket.socket) -> None:
        hub, before = Hub(tmp_path, bound), slot_files()
        monkeypatch.setattr(gateway, "Slots", slots)
        client, _ = await GatewayProcess(tmp_path, 1, bound, -1)._connect()
        await until(lambda: slot_files() == before + 2)  # of the memory that each side has mapped
        await hub.close(client)

    run(scenario)


def test_connections_that_no_gateway_has_accepted_are_rejected_before_others_are_refused(tmp_path: Path) -> None:
    async def scenario(bound: socket.socket) -> None:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        address = bound.getsockname()
        hub = Hub(tmp_path, bound)
        client, told = await hub.connected(await hub.accepted())
        await until(lambda: told)
        client.send_control(("listening", "http://x"))
        reader, writer = await asyncio.open_connection(*address)  # waits in the queue of the socket
        client.send_control(("closed",))
        writer.write(b"POST /predict HTTP/1.1\r\ncontent-length: 100000\r\n\r\n" + bytes(100_000))
        response = await reader.read()
        head, _, body = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"content-length: %d" % len(body) in head
        assert b"the server is stopping" in body
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.close()
        await hub.close(client)

    run(scenario)
