"""Requests that a gateway passes on, with a serving process that answers each with the same response."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.app.proxy import ProxiedApplication, Proxy
from server.transport.memory_budget import MemoryBudget
from server.transport.request import CHUNK, Handler
from tests.support.inference_server import App, Server, exchange, post, run, serving, settle, until


@dataclass
class ProxyApp(App):
    """Passes all inference calls on."""

    proxy: Proxy | None = None

    def find(self, path: str) -> Handler | None:
        assert self.proxy is not None
        return partial(self.proxy.serve, target=path.encode(), headers=[])


Execute = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(answer: bytes) -> Execute:
    """A serving process that answers a request with these bytes and closes the connection."""

    async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    return execute


@asynccontextmanager
async def passing_on(folder: Path, execute: Execute, direct: bool) -> AsyncIterator[Server]:
    """A gateway in front of a serving process that serves each connection by `execute`."""
    app = ProxyApp(budget=MemoryBudget(4096))  # of which one call may take half
    app.proxy = Proxy(folder / "s", app.budget, "http", "x")
    async with await asyncio.start_unix_server(execute, folder / "s"), serving(app=app, direct=direct) as server:
        yield server


both_paths = pytest.mark.parametrize("direct", [True, False], ids=["direct", "asgi"])


@both_paths
def test_a_request_that_was_executed_is_not_rejected_for_the_memory_of_its_answer(tmp_path: Path, direct: bool) -> None:
    answer, executed = bytes(300_000), []

    async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        executed.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()

    async def scenario() -> None:
        async with passing_on(tmp_path, execute, direct) as server:
            responses, _ = await exchange(await server.pair(), [post("/predict/m")], server.busy)
        assert [(one.status, one.body) for one in responses] == [(200, answer)]
        assert len(executed) == 1

    run(scenario())


@both_paths
def test_an_answer_that_the_client_leaves_unread_stays_in_the_serving_process(tmp_path: Path, direct: bool) -> None:
    size, passed_on = 2**26, []

    async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(2**16))
                await writer.drain()
                passed_on.append(2**16)

    async def scenario() -> None:
        async with passing_on(tmp_path, execute, direct) as server:
            client, count = await server.pair(), -1
            client.send(post("/predict/m"))
            while count != len(passed_on) or not passed_on:
                count = len(passed_on)
                await asyncio.sleep(0.1)
            client.close()
            await until(lambda: not server.connections)
        assert sum(passed_on) < 2**22, "more than the buffers of the two sockets and of the streams"

    run(scenario())


@both_paths
def test_an_answer_that_breaks_off_ends_the_connection(tmp_path: Path, direct: bool) -> None:
    broken_off = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + bytes(2000))

    async def scenario() -> None:
        async with passing_on(tmp_path, broken_off, direct) as server:
            responses, closed = await exchange(await server.pair(), [post("/predict/m")], server.busy)
        assert [(one.status, len(one.body)) for one in responses] == [(200, 2000)]
        assert closed, "the client would wait for the rest"

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"HTTP/1.1 200 OK\r\n", 503), (b"HTTP/1.1 200 OK\r\n\r\nabc", 500)],
    ids=["does not begin", "has no length"],
)
def test_an_answer_that_cannot_be_passed_on_is_an_error(tmp_path: Path, answer: bytes, status: int) -> None:
    async def scenario() -> None:
        async with passing_on(tmp_path, answering(answer), True) as server:
            (response,), _ = await exchange(await server.pair(), [post("/predict/m")], server.busy)
        assert (response.status, response.headers.get("retry-after")) == (status, "1" if status == 503 else None)

    run(scenario())


def test_the_serving_process_sends_a_large_answer_in_pieces() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(10 * CHUNK)})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    given = [(b"x-forwarded-proto", b"http"), (b"x-request-id", b"a")]
    scope = {"type": "http", "method": "GET", "path": "/assets/plotly.js", "headers": given, "state": {}}
    run(ProxiedApplication(app, lambda: None)(scope, receive, send))
    bodies = [message["body"] for message in sent[1:]]
    assert sum(map(len, bodies)) == 10 * CHUNK
    assert max(map(len, bodies)) <= CHUNK


@both_paths
def test_a_client_that_leaves_during_an_answer_ends_the_exchange(tmp_path: Path, direct: bool) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n" + bytes(2000))
        begun.set()
        await reader.read()
        writer.close()
        ended.set()

    async def scenario() -> None:
        async with passing_on(tmp_path, execute, direct) as server:
            client = socket.create_connection(server.address)
            client.sendall(post("/predict/m"))
            await begun.wait()
            await settle()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # with RST
            await ended.wait()

    run(scenario())
