"""The HTTP server when it stops."""

import asyncio
import socket

import orjson
from starlette.types import Receive, Scope, Send

from server.app.http_server import HttpServer, bind
from server.transport.connection import Listener
from server.transport.middleware import RequestMiddleware
from server.transport.request import JSON_CONTENT, AsgiContext


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        context: AsgiContext = scope["state"]["context"]
        await context.respond(200, orjson.dumps({"path": scope["path"]}), [JSON_CONTENT])


def test_a_connection_that_waits_when_the_server_stops_is_served_and_the_next_one_refused() -> None:
    async def scenario() -> tuple[bytes, int]:
        bound = bind("127.0.0.1", 0)
        requests = RequestMiddleware(app)
        server = HttpServer(requests, Listener(direct=requests))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        address = bound.getsockname()
        with socket.create_connection(address) as client, socket.socket() as late:
            await server.end_accepting(bound, refuse=True)  # the loop has not run since, so nothing was accepted
            refused = late.connect_ex(address)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
            response = await loop.sock_recv(client, 1000)
        server.stop.set()
        await serving
        return response, refused

    response, refused = asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert response.startswith(b"HTTP/1.1 200")
    assert response.endswith(b'{"path":"/x"}')
    assert refused == 111, "connection refused"
