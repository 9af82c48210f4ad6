"""Process lifecycle: serve with uvicorn on uvloop, drain on SIGTERM, reload files on SIGHUP, and exit codes."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic

import uvicorn
import uvloop
from starlette.types import ASGIApp

from policies.types import SpecError
from server.backends.glibc_heap import heap
from server.scheduling.fleet import Fleet
from server.transport.accepting import protocol_factory
from server.transport.connection import Listener

_log = logging.getLogger("batchwright")
EXIT_DEVICE_LOST = 3  # exit code: no device works any more; a supervisor should restart the server
_SHUTDOWN_TIMEOUT = 10  # s for open responses to be sent after a drain; connections left are closed
_FORCED_SHUTDOWN_TIMEOUT = 3  # s, the same after a second signal, or when no device works
_KEEP_ALIVE_GRACE = 1.0  # s in which idle keep-alive clients may still send a call and read Connection: close


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which re-raises signals, and without its tick every 0.1 s."""

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
    """Bind the address without listening, so that a port in use is reported before a model is loaded.

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
        raise SpecError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from error
    return bound


def exit_on_sigterm() -> None:
    """Exit on SIGTERM until `serve` handles it; process 1 of a container would ignore the signal by default."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def serve(
    app: ASGIApp,
    fleet: Fleet,
    bound: socket.socket,
    drain_delay: float,
    listener: Listener,
    reloads: Mapping[str, Callable[[], None]],
) -> int:
    """Serve until SIGTERM or SIGINT, then drain: reject new calls, answer the accepted ones, and return.

    After SIGTERM readiness is 503 at once. Calls are admitted for another `drain_delay`, s, in which load balancers
    remove the server. From the signal on every response closes its connection. A second signal stops without a drain.
    SIGHUP calls `reloads`, the functions that read the server's files again, by the name of the file.

    Returns:
        The exit code: 0, or EXIT_DEVICE_LOST when no device works any more.
    """
    _raise_file_limit()
    gc.collect()
    gc.freeze()  # later collections skip the objects of the loaded models
    server = _Server(_config(app, listener), "http" if listener.tls is None else "https")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, fleet, bound, drain_delay, reloads))


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1024 for programs that use select(2), to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems report an unlimited hard limit, but refuse to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _reload(reloads: Mapping[str, Callable[[], None]]) -> None:
    """Reload each file; one with errors is logged and its last content stays in use."""
    for name, reload in reloads.items():
        try:
            reload()
        except SpecError as error:
            _log.error("SIGHUP: the %s was not reloaded, its last content stays in use: %s", name, error)
        else:
            _log.info("SIGHUP: the %s was reloaded", name)


async def _serve(
    server: _Server,
    fleet: Fleet,
    bound: socket.socket,
    drain_delay: float,
    reloads: Mapping[str, Callable[[], None]],
) -> int:
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal(name: str) -> None:
        if drains:
            _log.warning("%s again: stopping without waiting for answers", name)
            fleet.abandon()
            server.stop.set()
            loop.call_later(_FORCED_SHUTDOWN_TIMEOUT, setattr, server, "force_exit", True)
            return
        fleet.shutting_down = True
        delay = drain_delay if name == "SIGTERM" else 0.0  # a server that is stopped by Ctrl-C has no load balancer
        drains.append(asyncio.create_task(_drain(server, fleet, name, delay)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    if reloads:  # otherwise SIGHUP, sent when a terminal closes, ends the process as usual
        loop.add_signal_handler(signal.SIGHUP, _reload, reloads)
    stopping = asyncio.create_task(_stop_when_broken(server, fleet))
    trimming = asyncio.create_task(heap.trim_periodically(lambda: server.server_state.total_requests))
    await server.serve(sockets=[bound])
    for task in (*drains, stopping, trimming):
        task.cancel()
    return EXIT_DEVICE_LOST if fleet.broken.is_set() else 0


async def _stop_when_broken(server: _Server, fleet: Fleet) -> None:
    await fleet.broken.wait()
    fleet.shutting_down = True
    server.stop.set()
    await asyncio.sleep(_FORCED_SHUTDOWN_TIMEOUT)
    server.force_exit = True


async def _drain(server: _Server, fleet: Fleet, name: str, delay: float) -> None:
    if delay:
        _log.info("%s: readiness is 503, calls are admitted for another %g s", name, delay)
        await asyncio.sleep(delay)
    _log.info("%s: new calls are rejected, %d accepted calls are answered", name, fleet.open_calls)
    await fleet.drain()
    end = monotonic() + _KEEP_ALIVE_GRACE
    while server.server_state.connections and monotonic() < end:  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.05)
    server.stop.set()  # uvicorn then finishes open responses, closes connections and returns


def _config(app: ASGIApp, listener: Listener) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=protocol_factory(listener),  # type: ignore[arg-type]  # a factory
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
    return config
