"""A gateway: a process that speaks HTTP, decodes inputs and renders outputs, in front of the serving process."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvloop
from starlette.types import Receive, Scope, Send

from policies.types import SpecError
from server.api.inference import Inference
from server.api.open_inference.infer import Infer
from server.api.predict import Predict
from server.app.http_server import HttpServer, raise_file_limit
from server.app.proxy import Proxy
from server.app.supervisor import stop_with_supervisor
from server.gateways.fleet_client import FleetClient
from server.gateways.metrics_recorder import MetricsRecorder
from server.gateways.setup import FLEET_SOCKET, GREETING, HTTP_SOCKET, GatewaySetup
from server.gateways.shared_buckets import SharedBuckets
from server.gateways.slot_buffers import SlotBuffers
from server.gateways.slots import Slots
from server.gateways.state_page import StatePage
from server.models.model import ServedModel
from server.telemetry.logs import configured_logging
from server.transport.auth import load_keys
from server.transport.connection import Listener
from server.transport.connection_limits import TimeLimits
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware
from server.transport.request import JSON_CONTENT, AsgiContext, Handler
from server.transport.tls import load_tls

if TYPE_CHECKING:
    from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.gateways")
_RETRY = 0.05  # s between attempts to connect to the serving process
_Models = Mapping[str, ServedModel | None]


class GatewayApplication:
    """The ASGI application of a gateway: inference calls and health here, everything else in the serving process."""

    def __init__(self, inference: Inference[FleetClient], proxy: Proxy) -> None:
        """Serve the models that `inference` has, and pass all other requests on by `proxy`."""
        self._inference = inference
        self._infer, self._predict = Infer(inference), Predict(inference)
        self._proxy = proxy
        self._names: set[str] = set()

    def set_models(self, models: _Models) -> None:
        """Serve the calls of these models from now on, or pass on those of a model that is None."""
        self._names |= models.keys()
        for name, model in models.items():
            if model is None:
                self._inference.models.pop(name, None)
            else:
                self._inference.models[name] = model

    def find_inference(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path if they are inference calls that are served here."""
        name = self._infer.model_of(path) or self._predict.model_of(path)
        if name is None and path == "/predict" and len(self._names) == 1:
            (name,) = self._names
        if name not in self._inference.models:
            return None
        return self._infer.find(path) or self._predict.find(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        context: AsgiContext = scope["state"]["context"]
        path, fleet = scope["path"], self._inference.fleet
        handler = self.find_inference(path) if scope["method"] == "POST" else None
        if handler is not None:
            await handler(context)
        elif scope["method"] == "GET" and path == "/v2/health/live":
            await _respond(context, "live", not fleet.connected or fleet.alive)  # the supervisor starts it again
        elif scope["method"] == "GET" and path == "/v2/health/ready":
            await _respond(context, "ready", fleet.ready)
        else:
            await self._proxy.serve(context, scope)


async def _respond(context: AsgiContext, key: str, value: bool) -> None:
    body = f'{{"{key}":{"true" if value else "false"}}}'.encode()
    await context.respond(200 if value else 503, body, [JSON_CONTENT])


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


class _GatewayServer(HttpServer):
    """An HTTP server that tells the serving process that it listens."""

    def __init__(self, app: RequestMiddleware, listener: Listener, fleet: FleetClient) -> None:
        super().__init__(app, listener)
        self._fleet = fleet

    def on_listening(self) -> None:
        self._fleet.send_control(("listening", self.url))


class GatewayProcess:
    """The gateway of this process."""

    def __init__(self, folder: Path, bound: socket.socket) -> None:
        """Find the serving process in `folder`, and accept the clients of `bound`."""
        self._folder = folder
        self._bound = bound
        self._fleet: FleetClient | None = None
        self._lost = asyncio.Event()
        self._told: asyncio.Queue[tuple[GatewaySetup, _Models]] = asyncio.Queue()
        self._app: GatewayApplication | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, or until the serving process asks to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        serving = asyncio.ensure_future(self._serve())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if self._app is None:  # it has not begun to serve
            serving.cancel()
        else:
            await serving

    async def _serve(self) -> None:
        connection, slots, page, table = await self._connect()
        fleet = FleetClient(page)
        fleet.on_control, fleet.on_lost = self._on_control, self._lost.set
        await fleet.connect(connection, slots)
        setup, models = await self._told.get()
        with configured_logging(*setup.log):  # type: ignore[arg-type]  # checked by the settings
            await self._serve_as(fleet, setup, models, table)

    async def _serve_as(self, fleet: FleetClient, setup: GatewaySetup, models: _Models, table: int) -> None:
        recorder = MetricsRecorder(fleet.send_control)
        budget = MemoryBudget(setup.memory, lambda: max(1, ceil(fleet.backlog())))
        metrics, pool = cast("Metrics", recorder), ThreadPoolExecutor()
        inference = Inference({}, fleet, metrics, pool, setup.queue_capacity, budget)
        proxy = Proxy(self._folder / HTTP_SOCKET, budget)
        app = GatewayApplication(inference, proxy)
        app.set_models(models)
        buckets = SharedBuckets(table)
        keys = None if setup.api_key_file is None else load_keys(setup.api_key_file, buckets.bucket)
        requests = RequestMiddleware(
            app,
            keys,
            None,
            setup.host,
            recorder.access_denied,
            shutting_down=lambda: fleet.shutting_down,
            find_inference=app.find_inference,
        )
        tls = load_tls(*setup.tls)
        listener = Listener(TimeLimits(*setup.time_limits), tls, requests, buffers=SlotBuffers(fleet))
        server = _GatewayServer(requests, listener, fleet)
        reloads = [file.reload for file in (keys, tls) if file is not None]
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, reloads)
        self._app = app
        tasks = [asyncio.ensure_future(work) for work in (self._stop(server), self._reconnect(fleet))]
        await server.serve(sockets=[self._bound])
        for task in tasks:
            task.cancel()
        recorder.flush()
        await proxy.close()
        await fleet.close()

    async def _stop(self, server: HttpServer) -> None:
        await self._stopping.wait()
        await server.end_keep_alive()
        server.stop.set()

    async def _reconnect(self, fleet: FleetClient) -> None:
        """Connect to another serving process when the one before has died."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            connection, slots, page, table = await self._connect()
            os.close(table)  # keys keep the table of rate limits that they have
            await fleet.connect(connection, slots, page)
            _, models = await self._told.get()
            assert self._app is not None
            self._app.set_models(models)

    async def _connect(self) -> tuple[socket.socket, Slots, StatePage, int]:
        """Connect to the serving process, once it listens.

        Returns:
            The connection, the slots, the page with the fleet's state, and the descriptor of the table of rate limits.
        """
        while True:
            connection = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                connection.connect(str(self._folder / FLEET_SOCKET))
                greeting, files, _, _ = await asyncio.to_thread(socket.recv_fds, connection, GREETING.size, 3)
                if len(files) == 3:
                    return _opened(connection, greeting, files)
            connection.close()
            await asyncio.sleep(_RETRY)

    def _on_control(self, message: Any) -> None:
        match message:
            case ("setup", setup, models):
                self._told.put_nowait((setup, models))
            case ("models", models) if self._app is not None:
                self._app.set_models(models)
            case ("stop",):
                self._stopping.set()
            case _:
                pass


def _opened(
    connection: socket.socket, greeting: bytes, files: Sequence[int]
) -> tuple[socket.socket, Slots, StatePage, int]:
    memory, page, table = files
    connection.setblocking(False)
    size, _ = GREETING.unpack(greeting)
    slots, state = Slots(memory, size), StatePage(page)
    os.close(memory)
    os.close(page)
    return connection, slots, state, table


def _reload(reloads: Sequence[Callable[[], None]]) -> None:
    for reload in reloads:
        try:
            reload()
        except SpecError as error:
            _log.error("SIGHUP: a file was not reloaded, its last content stays in use: %s", error)


def main() -> None:
    """Run a gateway; the supervisor gives the folder, and the descriptors of the listening socket and of its pipe."""
    folder, bound, alive = sys.argv[1:]
    stop_with_supervisor(int(alive))
    raise_file_limit()
    gateway = GatewayProcess(Path(folder), socket.socket(fileno=int(bound)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(gateway.run())
    os._exit(0)  # a thread in a hung decoder would block a normal exit


if __name__ == "__main__":
    main()
