"""A gateway: a process that speaks HTTP, decodes inputs and renders outputs, in front of the serving process."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvloop
from starlette.types import Receive, Scope, Send

from policies.types import SpecError
from server.api.inference import Inference
from server.api.open_inference.infer import Infer
from server.api.predict import Predict
from server.app.http_server import HttpServer, raise_file_limit, reload_files
from server.app.proxy import Proxy
from server.app.supervisor import stop_with_supervisor
from server.app.traces import exported_traces
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
from server.transport.request import JSON_CONTENT, AsgiContext, Handler, RequestContext
from server.transport.tls import load_tls

if TYPE_CHECKING:
    from server.telemetry.metrics import Metrics
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.gateways")
_RETRY = 0.05  # s between attempts to connect to the serving process
_LAST_RESPONSES = 3.0  # s for a stopping gateway to send responses after the serving process has ended
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
        """Serve the calls of these models from now on, or pass on those of a model that is None or not among them."""
        self._names = set(models)
        self._inference.models.clear()
        self._inference.models.update({name: model for name, model in models.items() if model is not None})

    def find_inference(self, path: str) -> Handler | None:
        """Return the handler of POST requests with this path if they are inference calls that are served here.

        A connection keeps the handler for the requests that it repeats, so that this passes them on when the model has
        changed.
        """
        name = self._infer.model_of(path) or self._predict.model_of(path)
        if name is None and path == "/predict" and len(self._names) == 1:
            (name,) = self._names
        serve = self._infer.find(path) or self._predict.find(path)
        if name is None or serve is None or not self._serves(name):
            return None

        def handler(context: RequestContext) -> Awaitable[None]:
            if self._serves(name):
                return serve(context)
            return self._proxy.serve(context, path.encode(), [*context.headers.items()])

        return handler

    def _serves(self, name: str) -> bool:
        """Whether calls of a model are served here; not if it was loaded again, until its new revision is known."""
        model = self._inference.models.get(name)
        return model is not None and not self._inference.fleet.is_replaced(name, model.revision)

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
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            await self._proxy.serve(context, scope["raw_path"] + query, scope["headers"])


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

    def __init__(self, app: RequestMiddleware, listener: Listener, tell: Callable[[str], None]) -> None:
        """`tell` is called with the address."""
        super().__init__(app, listener)
        self._tell = tell

    def on_listening(self) -> None:
        self._tell(self.url)


class GatewayProcess:
    """The gateway of this process."""

    def __init__(self, folder: Path, number: int, bound: socket.socket, table: int) -> None:
        """Create it, without a connection.

        Args:
            folder: where the sockets of the serving process are.
            number: of this gateway, for the log.
            bound: socket whose clients are accepted.
            table: file descriptor of the rate limits of all gateways.
        """
        self._folder = folder
        self._number = number
        self._bound = bound
        self._table = table
        self._fleet: FleetClient | None = None
        self._lost = asyncio.Event()  # set when the connection to the serving process ends
        self._setup: asyncio.Future[GatewaySetup] = asyncio.get_running_loop().create_future()  # of this connection
        self._models: dict[str, ServedModel | None] = {}
        self._app: GatewayApplication | None = None  # None until it serves
        self._address = ""
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serve until the serving process asks to stop, or until SIGINT; return the exit code."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stopping.set)
        serving = asyncio.ensure_future(self._serve())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if self._app is None and not serving.done():
            return 0
        return await serving

    async def _serve(self) -> int:
        fleet, setup = await self._connect()
        with configured_logging(*setup.log):  # type: ignore[arg-type]  # checked by the settings
            try:
                with exported_traces(setup.otlp_endpoint) as tracing:
                    await self._serve_as(fleet, setup, tracing)
            except SpecError as error:
                _log.critical("gateway %d cannot start: %s", self._number, error)
                return 2
            except Exception:  # noqa: BLE001  (the supervisor starts it again)
                _log.critical("gateway %d failed with an exception", self._number, exc_info=True)
                return 1
            return 0

    async def _serve_as(self, fleet: FleetClient, setup: GatewaySetup, tracing: "Tracing | None") -> None:
        fleet.tracing = tracing
        recorder = MetricsRecorder(fleet.send_control)
        budget = MemoryBudget(setup.memory, lambda: max(1, ceil(fleet.backlog())))
        metrics, pool = cast("Metrics", recorder), ThreadPoolExecutor()
        inference = Inference(
            {}, fleet, metrics, pool, setup.queue_capacity, budget, max_json_bytes=setup.max_json_bytes
        )
        tls = load_tls(*setup.tls)
        host = ":".join(map(str, self._bound.getsockname()[:2]))
        proxy = Proxy(self._folder / HTTP_SOCKET, budget, "http" if tls is None else "https", host)
        app = GatewayApplication(inference, proxy)
        app.set_models(self._models)
        buckets = SharedBuckets(self._table)
        keys = None if setup.api_key_file is None else load_keys(setup.api_key_file, buckets.bucket)
        requests = RequestMiddleware(
            app,
            keys,
            tracing,
            setup.host,
            recorder.access_denied,
            shutting_down=lambda: self._stopping.is_set() or fleet.shutting_down,
            find_inference=app.find_inference,
        )
        listener = Listener(TimeLimits(*setup.time_limits), tls, requests, buffers=SlotBuffers(fleet))
        server = _GatewayServer(requests, listener, self._tell_address)
        if setup.grpc_port:
            from server.api.grpc.server import GrpcServer

            address = self._bound.getsockname()[0], setup.grpc_port
            server.grpc = GrpcServer(requests, app, inference, listener, address, shares_port=True)
        files = {"API key file": keys, "TLS certificate": tls}
        reloads = {name: file.reload for name, file in files.items() if file is not None}
        if reloads:
            reload = partial(reload_files, reloads, f"gateway {self._number}: ")
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        self._app = app
        serving = asyncio.ensure_future(server.serve(sockets=[self._bound]))
        works = (self._reconnect(), self._stop(server, fleet), self._log_slots(fleet))
        tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.wait((serving, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # raises its exception
            task.cancel()
        await serving
        recorder.flush()
        await fleet.close()

    async def _stop(self, server: HttpServer, fleet: FleetClient) -> None:
        """Stop as asked, without waiting for responses that nothing can answer any more."""
        await self._stopping.wait()
        await server.end_keep_alive()
        await server.end_accepting(self._bound, refuse=False)
        fleet.send_control(("closed",))
        await server.end_keep_alive()
        server.stop.set()
        while fleet.connected:  # noqa: ASYNC110  (at most some seconds)
            await asyncio.sleep(0.1)
        await asyncio.sleep(_LAST_RESPONSES)
        server.force_exit = True
        await asyncio.Event().wait()

    async def _log_slots(self, fleet: FleetClient) -> None:
        """Log the number of free slots at debug level once a second if it has changed."""
        logged = -1
        while _log.isEnabledFor(logging.DEBUG):
            if fleet.free_slots != logged:
                logged = fleet.free_slots
                _log.debug("gateway %d: slots", self._number, extra={"free": logged})
            await asyncio.sleep(1.0)
        await asyncio.Event().wait()

    async def _reconnect(self) -> None:
        """Connect to another serving process when the one before has died."""
        while True:
            await self._lost.wait()
            if self._stopping.is_set():
                await asyncio.Event().wait()
            await self._connect()
            self._tell_address(self._address)

    async def _connect(self) -> tuple[FleetClient, GatewaySetup]:
        """Connect to the serving process, once it listens."""
        loop = asyncio.get_running_loop()
        while True:
            connection, slots, page = await self._find_serving_process()
            self._lost.clear()
            self._setup = loop.create_future()
            fleet = self._fleet
            if fleet is None:
                fleet = self._fleet = FleetClient(page)
                fleet.on_control, fleet.on_lost = self._on_control, self._lost.set
            await fleet.connect(connection, slots, page)
            fleet.send_control(("number", self._number))
            lost = asyncio.ensure_future(self._lost.wait())
            await asyncio.wait((self._setup, lost), return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if self._setup.done():
                return fleet, self._setup.result()

    async def _find_serving_process(self) -> tuple[socket.socket, Slots, StatePage]:
        """Wait for the serving process; return the connection, the slots, and the page with the fleet's state."""
        loop = asyncio.get_running_loop()
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            with suppress(OSError):
                connection.connect(str(self._folder / FLEET_SOCKET))
                readable = loop.create_future()
                loop.add_reader(connection, readable.set_result, None)
                try:
                    await readable
                finally:
                    loop.remove_reader(connection)
                greeting, files, _, _ = socket.recv_fds(connection, GREETING.size, 2)
                try:
                    if len(files) == 2:
                        return connection, Slots(files[0], GREETING.unpack(greeting)[0]), StatePage(files[1])
                finally:
                    for file in files:
                        os.close(file)
            connection.close()
            await asyncio.sleep(_RETRY)

    def _on_control(self, message: Any) -> None:
        match message:
            case ("setup", setup, models):
                self._set_models(models)
                self._setup.set_result(setup)
            case ("models", models):
                self._set_models(self._models | models)
            case ("stop",):
                self._stopping.set()
            case _:
                pass

    def _set_models(self, models: dict[str, ServedModel | None]) -> None:
        self._models = models
        if self._app is not None:
            self._app.set_models(models)

    def _tell_address(self, address: str) -> None:
        self._address = address
        if self._fleet is not None:
            self._fleet.send_control(("listening", address))


async def _run(folder: str, number: str, bound: str, table: str) -> int:
    gateway = GatewayProcess(Path(folder), int(number), socket.socket(fileno=int(bound)), int(table))
    return await gateway.run()


def main() -> None:
    """Run a gateway; the supervisor gives the folder, its number, and descriptors: socket, rate limits, and pipe."""
    *arguments, alive = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # may be sent to all processes; the serving process drains first
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are files to read again
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))  # until it runs
    stop_with_supervisor(int(alive), Path(arguments[0]))
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(*arguments))
        os._exit(code)  # a thread in a hung decoder would block a normal exit


if __name__ == "__main__":
    main()
