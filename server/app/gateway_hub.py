"""The serving process behind gateway processes: it connects them, and tells them what they need to know."""

import asyncio
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.api.inference import Inference
from server.app.http_server import last_connections
from server.config import Settings
from server.errors import UnavailableError, render_error
from server.gateways.fleet_server import FleetServer, Gateway
from server.gateways.metrics_recorder import replay
from server.gateways.setup import FLEET_SOCKET, GREETING, GatewaySetup
from server.gateways.slots import create_memory
from server.gateways.state_page import StatePage, create_page
from server.models.model import ServedModel
from server.models.signature import Signature
from server.scheduling.calls import Sample

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.gateways")
_HEADER_ROOM = 2**13  # bytes of a slot for what precedes the tensors of a body
_LEAST_SLOT, _LARGEST_SLOT = 2**16, 2**24  # bytes
_SLOTS_MEMORY = 2**27  # bytes of all slots of one gateway, at most
_MOST_SLOTS = 512
_STOP_TIMEOUT = 15.0  # s for gateways to send open responses
_REJECTION_TIMEOUT = 1.0  # s for a client to read that the server is stopping
_REJECTION_BODY = render_error("the server is stopping; send the request to another one")
_REJECTION = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REJECTION_BODY), _REJECTION_BODY)
)


class GatewayHub:
    """Accepts the connections of gateways."""

    def __init__(
        self,
        inference: Inference,
        settings: Settings,
        gateways: int,
        folder: Path,
        bound: socket.socket,
        tracing: "Tracing | None" = None,
        page_lock: Callable[[mmap.mmap], Callable[[], None]] | None = None,
        grpc_port: int = 0,
    ) -> None:
        """Serve the calls of this number of gateways.

        Args:
            inference: the models.
            settings: of the server.
            gateways: how many there are.
            folder: where they find the sockets.
            bound: the socket that they listen on.
            tracing: links the spans of calls and batches.
            page_lock: page-locks slots for the device; None where no device copies from them.
            grpc_port: port of gRPC in the gateways; 0 without gRPC.
        """
        self._bound = bound
        self._inference = inference
        self._settings = settings
        self._grpc_port = grpc_port
        self._expected = gateways
        self._path = folder / FLEET_SOCKET
        self._socket = socket.socket(socket.AF_UNIX)
        self._page = create_page(len(inference.models))
        models = inference.models
        self._first_revision = time.monotonic_ns()  # as gateways know it: a killed serving process had other revisions
        self._fleet = FleetServer(
            inference.fleet,
            StatePage(self._page),
            settings.queue_capacity,
            lambda name: self._first_revision + models[name].revision,
        )
        self._fleet.tracing, self._fleet.page_lock = tracing, page_lock
        self._fleet.on_control, self._fleet.on_lost = self._on_control, self._on_lost
        self._fleet.on_publish, self._fleet.submit = self._tell_models, self._submit
        self._signatures: dict[tuple[str, int], Signature] = {}  # by model and revision
        self._listening: set[Gateway] = set()
        self._told: dict[Gateway, dict[str, ServedModel]] = {}
        self._announced = False
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Accept gateways from now on."""
        self._socket.bind(str(self._path))
        self._socket.listen()
        self._socket.setblocking(False)
        self.publish()
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def publish(self) -> None:
        """Publish the state now, and then regularly."""
        self._fleet.publish()

    async def stop(self) -> None:
        """Have the gateways send their open responses and end."""
        self._stopping = True
        self.publish()
        for gateway in self._fleet.gateways:
            gateway.send_control(("stop",))
        end = asyncio.get_running_loop().time() + _STOP_TIMEOUT
        while self._fleet.gateways and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110  (they tell by callback)
            await asyncio.sleep(0.02)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        await self._fleet.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            self._start(self._connect(connection))

    async def _connect(self, connection: socket.socket) -> None:
        size = self._slot_size()
        count = max(16, min(_MOST_SLOTS, _SLOTS_MEMORY // size))
        try:
            memory = create_memory(size, count)
            try:
                connection.setblocking(True)  # the first message of a connection fits its buffer
                socket.send_fds(connection, [GREETING.pack(size, count)], [memory, self._page])
                connection.setblocking(False)
                gateway = await self._fleet.connect(connection, memory, "a gateway")  # it sends its number
            finally:
                os.close(memory)
        except OSError as error:
            _log.warning("a gateway cannot be connected: %s", error)
            connection.close()
            return
        if gateway not in self._fleet.gateways:  # lost already
            return
        gateway.send_control(("setup", self._setup(), self._portable(self._inference.models)))
        self._told[gateway] = dict(self._inference.models)
        if self._stopping:
            gateway.send_control(("stop",))

    def _setup(self) -> GatewaySetup:
        settings = self._settings
        return GatewaySetup(
            gateways=self._expected,
            log=(settings.log_level, settings.log_format),
            queue_capacity=settings.queue_capacity,
            max_json_bytes=settings.max_json_bytes,
            memory=settings.queue_bytes // (self._expected + 1),  # one share is that of the serving process
            host=settings.host,
            api_key_file=settings.api_key_file,
            tls=(settings.tls_cert, settings.tls_key),
            time_limits=settings.time_limits,
            otlp_endpoint=settings.otlp_endpoint,
            grpc_port=self._grpc_port,
        )

    def _slot_size(self) -> int:
        """Room for the largest sample of a model with fixed shapes, and what precedes it in a body."""
        signatures = [model.signature for model in self._inference.models.values()]
        samples = [sum(spec.sample_bytes for spec in signature.inputs) for signature in signatures]
        return min(_LARGEST_SLOT, max(_LEAST_SLOT, *samples) + _HEADER_ROOM)

    def _submit(
        self,
        model: str,
        inputs: Sequence[Any],
        timeout: float,
        sizes: Sequence[float],
        shapes: Sequence[str],
        revision: int,
    ) -> "asyncio.Future[list[Sample]]":
        """Submit a call to the revision in service, which may have replaced the one that a gateway knows."""
        inference, served = self._inference, self._inference.model(model)
        inference.fleet.check_loaded(model)  # the gateway may not have known yet that it was unloaded
        revision -= self._first_revision
        if revision != served.revision and self._signatures.get((model, revision)) != served.signature:
            raise UnavailableError(f"{model} was loaded again with other inputs; send the call again", 1)
        submitted = inference.fleet.submit(model, inputs, timeout, sizes, shapes, served.revision)
        inference.calls[model, served.revision] += 1
        submitted.add_done_callback(lambda _: inference.end_call(model, served.revision))
        return submitted

    def _tell_models(self) -> None:
        """Send the gateways the models that have been loaded again."""
        models = self._inference.models
        self._signatures |= {(name, model.revision): model.signature for name, model in models.items()}
        for gateway, told in self._told.items():
            changed = {name: model for name, model in models.items() if told.get(name) is not model}
            if changed:
                gateway.send_control(("models", self._portable(changed)))
                told.update(changed)

    def _portable(self, models: Mapping[str, ServedModel]) -> dict[str, ServedModel | None]:
        """The models as gateways have them; None for one whose calls gateways pass on unread."""
        return {name: _portable(model, self._first_revision + model.revision) for name, model in models.items()}

    def _on_control(self, gateway: Gateway, message: Any) -> None:
        match message:
            case ("number", number):
                gateway.name = f"gateway {number}"
            case ("metrics", calls):
                replay(self._inference.metrics, calls)
            case ("listening", address):
                self._listening.add(gateway)
                if len(self._listening) >= self._expected and not self._announced:
                    self._announced = True
                    if self._grpc_port:
                        _log.info("gRPC on %s:%d", address.rpartition(":")[0].rpartition("/")[2], self._grpc_port)
                    _log.info("ready on %s, by %d gateways", address, self._expected)
            case ("closed",):
                self._listening.discard(gateway)
                if not self._listening:
                    self._start(self._end_listening())
            case _:
                pass

    async def _end_listening(self) -> None:
        """Refuse new connections after the last gateway has stopped to accept them; they would wait for nothing."""
        for connection in await last_connections(self._bound):
            self._start(self._reject(connection))

    async def _reject(self, connection: socket.socket) -> None:
        """Answer 503 on a connection, whatever it sends; one that expects TLS is only closed."""
        reader, writer = await asyncio.open_connection(sock=connection)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REJECTION_TIMEOUT):
                if self._settings.tls_cert is None:
                    writer.write(_REJECTION)
                    writer.write_eof()
                    while await reader.read(2**16):  # to close a connection with unread data resets it
                        pass
        writer.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_lost(self, gateway: Gateway) -> None:
        self._listening.discard(gateway)
        self._told.pop(gateway, None)


def _portable(model: ServedModel, revision: int) -> ServedModel | None:
    """A model as gateways have it, with this revision; None if gateways pass on its calls unread."""
    served = model.size_predictor is None and _fits(model.signature)
    codec = model.codec.for_gateways() if served else None
    return None if codec is None else replace(model, codec=codec, revision=revision)


def _fits(signature: Signature) -> bool:
    """Whether each sample has a known size and fits into a slot; others could take more than a message holds."""
    inputs = signature.inputs
    known = signature.has_fixed_shapes and all(spec.datatype != "BYTES" for spec in inputs)
    return known and sum(spec.sample_bytes for spec in inputs) <= _LARGEST_SLOT - _HEADER_ROOM
