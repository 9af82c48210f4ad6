"""The HTTP server when it stops."""

import asyncio
import errno
import socket
import sys
import time

import orjson
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from benchmarks.support.harness import free_port
from server.app import http_server
from server.app.http_server import HttpServer, bind, last_connections
from server.transport.connection import Listener
from server.transport.middleware import RequestMiddleware
from server.transport.request import JSON_CONTENT, AsgiContext


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        context: AsgiContext = scope["state"]["context"]
        await context.respond(200, orjson.dumps({"path": scope["path"]}), [JSON_CONTENT])


async def started(server: HttpServer, bound: socket.socket) -> "asyncio.Task[None]":
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return serving


def call(client: socket.socket) -> bytes:
    """Send a request a little later than the connection was made, and return the response."""
    time.sleep(0.02)
    client.sendall(b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return client.recv(1000)


@pytest.mark.parametrize("turns", range(4))
def test_connections_of_the_last_moment_are_served_and_the_next_one_refused(turns: int) -> None:
    """After some turns of the loop it has accepted the connection, and then told the server of it."""

    async def scenario() -> tuple[bytes, int]:
        bound = bind("127.0.0.1", 0)
        address = bound.getsockname()
        requests = RequestMiddleware(app)
        server = HttpServer(requests, Listener(direct=requests))
        serving = await started(server, bound)
        with socket.create_connection(address) as client, socket.socket() as late:
            for _ in range(turns):
                await asyncio.sleep(0)
            called = asyncio.create_task(asyncio.to_thread(call, client))
            await server.end_accepting(bound)
            refused = late.connect_ex(address)
            await server.end_keep_alive()
            server.stop.set()
            await serving
            return await called, refused

    response, refused = uvloop.run(asyncio.wait_for(scenario(), 30.0))
    assert response.startswith(b"HTTP/1.1 200")
    assert response.endswith(b'{"path":"/x"}')
    assert refused == errno.ECONNREFUSED


@pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets are those of Linux")
def test_no_client_connects_between_the_last_accepted_connection_and_the_refusal_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would reset the connection at once."""
    accept_waiting = http_server._accept_waiting

    def with_another_client(bound: socket.socket) -> list[socket.socket]:
        waiting = accept_waiting(bound)
        with pytest.raises(TimeoutError):
            socket.create_connection(bound.getsockname(), 0.2)
        return waiting

    monkeypatch.setattr(http_server, "_accept_waiting", with_another_client)
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()) as client:
            (accepted,) = asyncio.run(last_connections(bound))
            client.sendall(b"still works")
            assert accepted.recv(100) == b"still works"
            accepted.close()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_socket_can_be_listened_on_again_after_its_last_connections(cancelled: bool) -> None:
    """As by another process that has it."""

    async def scenario(bound: socket.socket) -> None:
        ending = asyncio.create_task(last_connections(bound))
        if cancelled:
            await asyncio.sleep(0)
            ending.cancel()
        await asyncio.wait([ending])

    port = free_port()  # the system would choose another one when it listens again
    with bind("127.0.0.1", port) as bound:
        bound.listen()
        asyncio.run(scenario(bound))
        bound.listen()
        socket.create_connection(("127.0.0.1", port), 10.0).close()
