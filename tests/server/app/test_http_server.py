"""The HTTP server when it stops."""

import asyncio
import errno
import socket
import time

import orjson
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from server.app.http_server import HttpServer, bind
from server.transport.connection import Listener
from server.transport.middleware import RequestMiddleware
from server.transport.request import JSON_CONTENT, RequestContext


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        context: RequestContext = scope["state"]["context"]
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
        server = HttpServer(requests, Listener())
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
