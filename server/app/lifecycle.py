"""From a bound socket to exit code 0: uvicorn on uvloop, and what SIGTERM means here."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policies.types import SpecError
from server.backends.glibc_heap import heap
from server.scheduling.fleet import Fleet
from server.transport.connection import Listening, accept

_log = logging.getLogger("batchwright")
LOST = 3  # exit code: the device is lost, start the server again
_LAST_ANSWERS = 10  # s for answers to go out after the last one is given; who still sends a call then is cut off
_LAST_WORDS = 3  # the same, when nothing can be served any more or somebody has lost patience
_LINGER = 1.0  # s in which kept connections are told of the end by an answer, instead of by being cut


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which re-raises, and without its clock, which ticks when idle."""

    def __init__(self, config: uvicorn.Config, scheme: str) -> None:
        super().__init__(config)
        self._scheme = scheme
        self.stop = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        _log.info("ready on %s://%s:%d", self._scheme, f"[{host}]" if ":" in host else host, port)
        await self.stop.wait()


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


def exit_on_sigterm() -> None:
    """Until `serve` takes over, SIGTERM ends the process: the kernel would keep it from process 1 of a container."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def serve(
    app: ASGIApp,
    fleet: Fleet,
    bound: socket.socket,
    drain_delay: float,
    listening: Listening,
) -> int:
    """Serve until SIGTERM or SIGINT; then refuse what is new, answer what was accepted, and return.

    After SIGTERM new calls are refused only when `drain_delay`, s, is over, while readiness is 503 at once: balancers
    send calls until they have noticed. From the signal on every answer closes its connection. A second signal waits
    for nothing any more.

    Returns:
        The exit code: 0, or LOST when nothing could be served any more.
    """
    _allow_many_connections()
    gc.collect()
    gc.freeze()  # what is loaded now stays: no collection need walk through it again
    server = _Server(_config(_parting(app, fleet), listening), "http" if listening.tls is None else "https")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, fleet, bound, drain_delay, listening.reload))


def _parting(app: ASGIApp, fleet: Fleet) -> ASGIApp:
    """Every answer closes its connection once the server is leaving: a client's next call then goes elsewhere."""

    async def parting(scope: Scope, receive: Receive, send: Send) -> None:
        def sent(message: Message) -> Awaitable[None]:
            if fleet.leaving and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            return send(message)

        await app(scope, receive, sent)

    return parting


def _allow_many_connections() -> None:
    """The usual soft limit of 1024 open files is for programs that use select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems forbid what they call unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _reload(files: Mapping[str, Callable[[], None]]) -> None:
    """Read each of the files again; one that cannot be used changes nothing."""
    for name, reload in files.items():
        try:
            reload()
        except SpecError as error:
            _log.error("SIGHUP: the %s stays as it was: %s", name, error)
        else:
            _log.info("SIGHUP: the %s was read again", name)


async def _serve(
    server: _Server,
    fleet: Fleet,
    bound: socket.socket,
    drain_delay: float,
    files: Mapping[str, Callable[[], None]],
) -> int:
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal(name: str) -> None:
        if drains:
            _log.warning("%s again: stopping without waiting for answers", name)
            fleet.abandon()
            server.stop.set()
            loop.call_later(_LAST_WORDS, setattr, server, "force_exit", True)
            return
        fleet.leaving = True
        delay = drain_delay if name == "SIGTERM" else 0.0  # whoever presses Ctrl-C is no balancer
        drains.append(asyncio.create_task(_drain(server, fleet, name, delay)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    if files:  # else a terminal that is closed ends the server, as it does any program
        loop.add_signal_handler(signal.SIGHUP, _reload, files)
    ending = asyncio.create_task(_end_when_broken(server, fleet))
    trimming = asyncio.create_task(heap.trim_periodically(lambda: server.server_state.total_requests))
    await server.serve(sockets=[bound])
    for task in (*drains, ending, trimming):
        task.cancel()
    return LOST if fleet.broken.is_set() else 0


async def _end_when_broken(server: _Server, fleet: Fleet) -> None:
    await fleet.broken.wait()
    fleet.leaving = True
    server.stop.set()
    await asyncio.sleep(_LAST_WORDS)
    server.force_exit = True


async def _drain(server: _Server, fleet: Fleet, name: str, delay: float) -> None:
    if delay:
        _log.info("%s: not ready any more, still admitting calls for %g s", name, delay)
        await asyncio.sleep(delay)
    _log.info("%s: refusing new calls, answering %d accepted", name, fleet.open_calls)
    await fleet.drain()
    end = monotonic() + _LINGER
    while server.server_state.connections and monotonic() < end:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.05)
    server.stop.set()  # uvicorn then lets open answers go out, closes connections and returns


def _config(app: ASGIApp, listening: Listening) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=accept(listening),  # type: ignore[arg-type]  # a factory
        ws="none",
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS,
    )
    config.load()
    return config
