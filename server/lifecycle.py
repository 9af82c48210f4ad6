"""From a bound socket to exit code 0: uvicorn on uvloop, and what SIGTERM means here."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from policies.types import SpecError
from server.dispatcher import Dispatcher

_log = logging.getLogger("batchwright")
_HELD = 2**20  # bytes of a body that wait for its end


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which re-raises, and without its clock, which ticks when idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        _log.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        await self.stop.wait()


class _WholeBodies(HttpToolsProtocol):
    """uvicorn's protocol, but the app is woken once for a body, not once for every 64 KiB that the kernel hands over.

    A picture then comes without pausing the connection in the middle, and with two copies fewer. What is over
    `_HELD` goes to the app piece by piece, as ever, so that its own limit holds.
    """

    _pieces: list[bytes]
    _held: int

    def on_headers_complete(self) -> None:
        self._pieces, self._held = [], 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held += len(body)
        if self._held > _HELD:
            pieces, self._pieces, self._held = self._pieces, [], 0
            super().on_body(b"".join(pieces))

    def on_message_complete(self) -> None:
        if self._pieces:
            self.cycle.body = b"".join((self.cycle.body, *self._pieces))  # type: ignore[assignment]  # bytes will do
        super().on_message_complete()


def bind(host: str, port: int) -> socket.socket:
    """Take the address now, so that a taken port is reported before a model is loaded; listening comes later.

    Raises:
        SpecError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SpecError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from error
    return bound


def serve(app: ASGIApp, dispatcher: Dispatcher, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; then refuse what is new, answer what was accepted, and return.

    A second signal does not wait for the answers.
    """
    gc.collect()
    gc.freeze()  # what is loaded now stays: no collection need walk through it again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(app, dispatcher, bound))


async def _serve(app: ASGIApp, dispatcher: Dispatcher, bound: socket.socket) -> None:
    server = _Server(_config(app))
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal(name: str) -> None:
        if drains:
            _log.warning("%s again: stopping without waiting for answers", name)
            server.force_exit = True
            server.stop.set()
            return
        _log.info("%s: refusing new calls, answering %d accepted", name, dispatcher.open_calls)
        drains.append(asyncio.create_task(_drain(server, dispatcher)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    await server.serve(sockets=[bound])
    for drain in drains:
        drain.cancel()


async def _drain(server: _Server, dispatcher: Dispatcher) -> None:
    await dispatcher.drain()
    server.stop.set()  # uvicorn then lets open answers go out, closes connections and returns


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_WholeBodies,
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=90,  # longer than any client's pool keeps a connection, or it would post into a closed one
        timeout_graceful_shutdown=30,
    )
