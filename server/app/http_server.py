"""The HTTP server of a process: uvicorn with our connections, and its address."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import uvicorn

from policies.types import SpecError
from server.transport.accepting import protocol_factory
from server.transport.connection import Listener
from server.transport.http_call import HttpApp

if TYPE_CHECKING:
    from server.api.grpc.server import GrpcServer
    from server.config import Settings

_log = logging.getLogger("batchwright")
_SHUTDOWN_TIMEOUT = 10  # s for open responses to be sent after a drain; connections left are closed
_POLL = 0.05  # s between two looks at the open connections
_KEEP_ALIVE_GRACE = 1.0  # s in which idle keep-alive clients may still send a call and read Connection: close


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which re-raises signals, and without its tick every 0.1 s.

    Attributes:
        stop: set to finish open responses, close connections and return from `serve`.
        grpc: serves the same application by gRPC; None for HTTP alone.
    """

    def __init__(self, app: HttpApp, listener: Listener) -> None:
        """Serve `app` on connections of this listener."""
        config = uvicorn.Config(
            app.app,  # of which it runs the lifespan
            http=protocol_factory(listener, app),  # type: ignore[arg-type]  # a factory
            ws="none",
            proxy_headers=False,
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
        )
        config.load()
        super().__init__(config)
        self._scheme = "http" if listener.tls is None else "https"
        self.stop = asyncio.Event()
        self.grpc: GrpcServer | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals as they are."""
        yield

    async def main_loop(self) -> None:
        """Serve until `stop` is set."""
        if self.grpc is not None:
            await self.grpc.start()
        self.on_listening()
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish open responses and close connections."""
        if self.grpc is not None:
            await self.grpc.stop(0.0 if self.force_exit else _SHUTDOWN_TIMEOUT)
        await super().shutdown(sockets)

    def on_listening(self) -> None:
        """Log the address, now that connections are accepted."""
        if self.grpc is not None:
            _log.info("gRPC on %s", self.grpc.address)
        _log.info("ready on %s", self.url)

    @property
    def url(self) -> str:
        """The address that the server listens on."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def end_accepting(self, bound: socket.socket) -> None:
        """Serve the connections that wait in the queue of a socket, which the system would reset, and accept no others.

        Args:
            bound: the socket that the server listens on.
        """
        waiting = last_connections(bound)
        for server in self.servers:
            server.close()
        protocol: Any = self.config.http_protocol_class  # created as uvicorn does it
        create = partial(protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        for connection in waiting:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(create, connection)

    async def end_keep_alive(self) -> None:
        """Give clients of open connections a short time to read Connection: close."""
        end = monotonic() + _KEEP_ALIVE_GRACE
        await asyncio.sleep(_POLL)  # the loop may have accepted connections that it has not reported yet
        while self.server_state.connections and monotonic() < end:  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(_POLL)


def last_connections(bound: socket.socket) -> list[socket.socket]:
    """Return the connections that no process has accepted, which the system would reset, and stop listening."""
    waiting = []
    bound.setblocking(False)
    with suppress(OSError):
        while True:
            waiting.append(bound.accept()[0])
    with suppress(OSError):
        bound.shutdown(socket.SHUT_RD)
    return waiting


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind the address without listening, so that a port in use is reported before a model is loaded.

    `flag` sets the port.

    Raises:
        SpecError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SpecError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or {flag}") from error
    return bound


def bind_grpc(settings: "Settings") -> socket.socket | None:
    """Bind the address of gRPC; None without --grpc-port.

    The socket never listens. It reserves the port for gRPC, which has sockets of its own.

    Raises:
        SpecError: the address cannot be bound.
    """
    return None if settings.grpc_port is None else bind(settings.host, settings.grpc_port, "--grpc-port")


def raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1024 for programs that use select(2), to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems report an unlimited hard limit, but refuse to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reload_files(reloads: Mapping[str, Callable[[], None]]) -> None:
    """Reload each file, by its name; one with errors is logged and its last content stays in use."""
    for name, reload in reloads.items():
        try:
            reload()
        except SpecError as error:
            _log.error("SIGHUP: the %s was not reloaded, its last content stays in use: %s", name, error)
        else:
            _log.info("SIGHUP: the %s was reloaded", name)
