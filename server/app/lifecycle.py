"""Process lifecycle: serve with uvicorn on uvloop, drain on SIGTERM, reload files on SIGHUP, and exit codes."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import uvloop

from server.app.http_server import HttpServer, reload_files
from server.backends.glibc_heap import trim_periodically
from server.scheduling.fleet import Fleet
from server.transport.connection import Listener
from server.transport.http_call import HttpApp
from server.workers.worker import shared_memory

if TYPE_CHECKING:
    from server.api.grpc.server import GrpcServer

_log = logging.getLogger("batchwright")
EXIT_DEVICE_LOST = 3  # exit code: no device works any more; a supervisor should restart the server
_FORCED_SHUTDOWN_TIMEOUT = 3  # s, the same after a second signal, or when no device works


def serve(
    app: HttpApp,
    fleet: Fleet,
    bound: socket.socket,
    drain_delay: float,
    listener: Listener,
    reloads: Mapping[str, Callable[[], None]],
    grpc: "GrpcServer | None" = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain: reject new calls, answer the accepted ones, and return.

    After SIGTERM readiness is 503 at once. Calls are admitted for another `drain_delay`, s, in which load balancers
    remove the server. From the signal on every response closes its connection. A second signal stops without a drain.
    SIGHUP calls `reloads`, the functions that read the server's files again, by the name of the file.
    `grpc` serves beside HTTP.

    Returns:
        The exit code: 0, or EXIT_DEVICE_LOST when no device works any more.
    """
    gc.collect()
    gc.freeze()  # later collections skip the objects of the loaded models
    server = HttpServer(app, listener)
    server.grpc = grpc
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, fleet, bound, drain_delay, reloads))


async def _serve(
    server: HttpServer,
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
        drains.append(asyncio.create_task(_drain(server, fleet, bound, name, delay)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    if reloads:  # otherwise SIGHUP, sent when a terminal closes, ends the process as usual
        loop.add_signal_handler(signal.SIGHUP, reload_files, reloads)
    stopping = asyncio.create_task(_stop_when_broken(server, fleet))
    state = server.server_state
    trimming = asyncio.create_task(trim_periodically(lambda: state.total_requests, shared_memory().release_free))
    await server.serve(sockets=[bound])
    for task in (*drains, stopping, trimming):
        task.cancel()
    return EXIT_DEVICE_LOST if fleet.broken.is_set() else 0


async def _stop_when_broken(server: HttpServer, fleet: Fleet) -> None:
    await fleet.broken.wait()
    fleet.shutting_down = True
    server.stop.set()
    await asyncio.sleep(_FORCED_SHUTDOWN_TIMEOUT)
    server.force_exit = True


async def _drain(server: HttpServer, fleet: Fleet, bound: socket.socket, name: str, delay: float) -> None:
    if delay:
        _log.info("%s: readiness is 503, calls are admitted for another %g s", name, delay)
        await asyncio.sleep(delay)
    _log.info("%s: new calls are rejected, %d accepted calls are answered", name, fleet.open_calls)
    await fleet.drain()
    await server.end_keep_alive()
    await server.end_accepting(bound)
    await server.end_keep_alive()
    server.stop.set()  # uvicorn then finishes open responses, closes connections and returns


def exit_on_sigterm() -> None:
    """Exit on SIGTERM until another handler is set; process 1 of a container would ignore the signal by default."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
