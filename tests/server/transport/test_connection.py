"""The connection limits with a small app, over real sockets."""

import asyncio
import json
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from server.transport.accepting import protocol_factory
from server.transport.connection import Listener
from server.transport.connection_limits import ConnectionLimits
from server.transport.tls import Tls
from tests.support.asgi import AsgiApp
from tests.support.certificates import certificate

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Coroutine[Any, Any, Client]]

SHORT = ConnectionLimits(headers=0.15, body=0.15, reading=0.15, keep_alive=0.15)
GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path and the number of body bytes and headers received."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await answer(send, f"{scope['path']} {size} {len(scope['headers'])}".encode())


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening(limits: ConnectionLimits, app: ASGIApp = echo, tls: Tls | None = None) -> AsyncIterator[Connect]:
    loop, loop_errors = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: loop_errors.append(context))
    state = ServerState()
    create = partial(protocol_factory(Listener(limits, tls), AsgiApp(app)), server_state=state, _loop=loop)
    server = await loop.create_server(create, "127.0.0.1", 0)
    try:
        yield lambda: asyncio.open_connection(*server.sockets[0].getsockname())
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
    assert loop_errors == [], "no input may reach the loop's exception handler"


def exchange(
    *pieces: bytes, limits: ConnectionLimits | None = None, app: ASGIApp = echo, close: bool = False
) -> list[tuple[int, bytes]]:
    """Send bytes and return the responses until the server closes the connection."""

    async def run_client() -> list[tuple[int, bytes]]:
        async with listening(limits or ConnectionLimits(), app) as connect:
            reader, writer = await connect()
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if close:
                writer.write_eof()
            replies = await read_replies(reader)
            writer.close()
            return replies

    replies: list[tuple[int, bytes]] = run(run_client())
    return replies


async def read_replies(reader: asyncio.StreamReader, n: int = 10**6) -> list[tuple[int, bytes]]:
    replies: list[tuple[int, bytes]] = []
    while len(replies) < n:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        status = int(lines[0].split()[1])
        if status >= 400:
            assert headers["content-type"] == "application/json"
            assert headers["connection"] == "close"
            assert list(json.loads(body)) == ["error"]
        replies.append((status, body))
    return replies


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 4))


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http://x HTTP/1.1\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_malformed_requests_are_answered_400_with_a_json_error(sent: bytes) -> None:
    [(status, _)] = exchange(sent)
    assert status == 400


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/%zz%", "/%zz%"),
        (b"/%ff", "/\ufffd"),
        (b"http://a/b?c", "/b"),
        (b"//a/..", "//a/.."),
        (b"//[", "//["),
        (b"*", "*"),
        (b"/%2e%2e", "/.."),
    ],
)
def test_unusual_request_targets_are_parsed_as_paths(target: bytes, path: str) -> None:
    replies = exchange(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
    assert [status for status, _ in replies] == [200]
    assert replies[0][1].decode().lower() == f"{path} 0 2"


UPGRADE = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
WITH_UPGRADES = {
    b"GET /a HTTP/1.1\r\n" + UPGRADE + b"\r\n": b"/a 0 2",
    b"POST /b HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 2\r\n\r\nab": b"/b 2 3",
    b"POST /c HTTP/1.1\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n": b"/c 3 3",
    b"GET /d HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n": b"/d 0 2",
}


@pytest.mark.parametrize("piece", [1, 7, 10_000], ids=lambda piece: f"pieces of {piece} bytes")
def test_an_upgrade_is_ignored_and_the_connection_goes_on(piece: int) -> None:
    sent = b"".join((*WITH_UPGRADES, b"GET /1 HTTP/1.1\r\nConnection: close\r\n\r\n"))
    pieces = [sent[start : start + piece] for start in range(0, len(sent), piece)]
    assert exchange(*pieces) == [(200, answer) for answer in (*WITH_UPGRADES.values(), b"/1 0 1")]


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"A: b\r\n" * 200 + b"\r\n"],
        [HEAD + b"A: " + b"b" * 65536 + b"\r\n\r\n"],
        [HEAD] + [b"A: b\r\n"] * 20000,
        [HEAD + b"A: "] + [b"b" * 10000] * 100,
        [b"GET /"] + [b"b" * 10000] * 100,
        [HEAD] + [b"a" * 10000] * 100,
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "] + [b"b" * 10000] * 100,
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"] + [b"1;" + b"e" * 10000 + b"\r\nb\r\n"] * 100,
    ],
    ids=["many", "long", "endless many", "endless value", "endless address", "endless name", "trailer", "chunk sizes"],
)
def test_headers_over_the_limit_are_rejected_before_they_are_complete(pieces: list[bytes]) -> None:
    [(status, _)] = exchange(*pieces)
    assert status == 431


def test_headers_within_the_limit_are_accepted_after_a_long_body_in_the_same_read() -> None:
    head = b"GET /1 HTTP/1.1\r\nA: %b\r\nConnection: close\r\n" % (b"b" * 60000) + b"c: d\r\n" * 198 + b"\r\n"
    assert exchange(POST % 200_000 + bytes(200_000) + head) == [(200, b"/ 200000 2"), (200, b"/1 0 200")]


def test_a_head_that_begins_as_the_last_one_is_its_own() -> None:
    """A connection keeps its last head, so that one that repeats it is not parsed."""
    chunked = b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    other = b"GET /1 HTTP/1.1\r\nHost: xyz\r\n\r\n"
    closing = b"GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    sent = [
        GET % 1,
        GET % 1,
        other,
        GET % 1,
        chunked + b"1\r\na\r\n0\r\n\r\n",
        chunked + b"0\r\n\r\n",
        POST % 2 + b"ab",
    ]
    expected = [b"/1 0 1"] * 4 + [b"/c 1 1", b"/c 0 1", b"/ 2 2"]
    assert exchange(b"".join((*sent, POST % 2 + b"cd", closing))) == [
        (200, body) for body in (*expected, b"/ 2 2", b"/1 0 2")
    ]


def test_trailers_are_not_headers() -> None:
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert exchange(chunked + b"3\r\nabc\r\n0\r\nAuthorization: x\r\n\r\n") == [(200, b"/ 3 2")]


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (b"\r\n", []),
        (b"G", [408]),
        (HEAD, [408]),
        (POST % 5 + b"abc", [408]),
        (GET % 1, [200]),
        (GET % 1 + b"GET", [200, 408]),
    ],
    ids=["nothing", "line end", "a byte", "headers", "body", "keep-alive", "second request"],
)
def test_slow_requests_are_answered_408_and_the_connection_is_closed(sent: bytes, statuses: list[int]) -> None:
    assert [status for status, _ in exchange(sent, limits=SHORT)] == statuses


def test_headers_sent_byte_by_byte_do_not_extend_the_time_limit() -> None:
    async def headers() -> Any:
        async with listening(SHORT) as connect:
            reader, writer = await connect()
            replies = asyncio.ensure_future(read_replies(reader))
            writer.write(HEAD)
            while not replies.done():
                writer.write(b"A: b\r\n")
                await asyncio.wait([replies], timeout=0.01)
            writer.close()
            return replies.result()

    assert [status for status, _ in run(headers())] == [408]


def test_a_client_that_does_not_read_is_disconnected() -> None:
    gone = []

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await wait_gone(receive)) is None:
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        gone.append(True)

    async def wait_gone(receive: Receive) -> Any:
        done, _ = await asyncio.wait([asyncio.ensure_future(receive())], timeout=0.001)
        return next((d.result() for d in done if d.result()["type"] == "http.disconnect"), None)

    async def run_client() -> None:
        async with listening(SHORT, much) as connect:
            _, writer = await connect()
            writer.write(GET % 1)
            async with asyncio.timeout(20):
                while not gone:
                    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
            writer.close()

    run(run_client())


CLOSING = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer /v2/health/ at once, and other paths never."""
    if scope["path"].startswith("/v2/health/"):
        await answer(send, b"{}")
    else:
        await asyncio.Event().wait()


def test_over_the_limit_connections_in_use_stay_and_only_health_checks_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.transport.connection_limits._MAX_CONNECTIONS", 2)

    async def request(connect: Connect, path: bytes) -> bytes:
        reader, writer = await connect()
        writer.write(CLOSING % path)
        reply = await reader.read()
        writer.close()
        return reply

    async def run_client() -> None:
        async with listening(ConnectionLimits(), waiting) as connect:
            used = [await connect() for _ in range(2)]
            for _, writer in used:
                writer.write(GET % 1)
            for _ in range(3):
                assert (await request(connect, b"/v2/health/live")).startswith(b"HTTP/1.1 200")
            response = await request(connect, b"/v2/models")
            assert response.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in response
            assert json.loads(response.partition(b"\r\n\r\n")[2]) == {
                "error": "the limit of 2 connections is reached; send the request again later"
            }
            silent = [await connect() for _ in range(100)]  # do not use up the connections for health checks
            assert (await request(connect, b"/v2/health/live")).startswith(b"HTTP/1.1 200")
            for reader, writer in used:
                assert not reader.at_eof()
                writer.close()
            for _, writer in silent:
                writer.close()

    run(run_client())


def test_over_the_limit_an_unused_connection_is_closed_first_then_the_longest_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.transport.connection_limits._MAX_CONNECTIONS", 3)

    async def run_client() -> None:
        async with listening(ConnectionLimits()) as connect:
            kept = [await connect() for _ in range(2)]
            for reader, writer in kept:
                writer.write(GET % 1)
                assert await read_replies(reader, 1) == [(200, b"/1 0 1")]
            silent = await connect()
            fourth = await connect()
            assert await silent[0].read() == b"", "it is unused, so it is closed before older connections"
            fourth[1].write(GET % 4)
            assert await read_replies(fourth[0], 1) == [(200, b"/4 0 1")]
            fifth = await connect()
            fifth[1].write(GET % 5)
            assert await read_replies(fifth[0], 1) == [(200, b"/5 0 1")]
            assert await kept[0][0].read() == b"", "it is idle longest"
            kept[1][1].write(GET % 6)
            assert await read_replies(kept[1][0], 1) == [(200, b"/6 0 1")]
            for _, writer in (*kept, silent, fourth, fifth):
                writer.close()

    run(run_client())


def test_unfinished_tls_handshakes_count_as_connections_and_time_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("server.transport.connection_limits._MAX_CONNECTIONS", 2)
    cert, key = certificate(tmp_path, "own")
    context = ssl.create_default_context(cafile=str(cert))

    async def run_client() -> None:
        async with listening(SHORT, tls=Tls(cert, key)) as connect:
            silent = [await connect() for _ in range(5)]
            for reader, _ in silent[:3]:
                assert await reader.read() == b"", "it was closed to make room"
            reader, writer = await asyncio.open_connection(*silent[4][1].get_extra_info("peername"), ssl=context)
            writer.write(CLOSING % b"/safe")
            assert await read_replies(reader) == [(200, b"/safe 0 2")]
            for reader, _ in silent[3:]:
                assert await reader.read() == b"", "it took too long"
            for _, one in (*silent, (reader, writer)):
                one.close()

    run(run_client())


def test_a_client_that_closes_its_sending_side_has_left() -> None:
    left = list[bool]()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        left.append((await receive())["type"] == "http.disconnect")

    assert exchange(POST % 3 + b"abc", app=slow, close=True) == []
    assert left == [True]


def test_of_several_tasks_that_wait_for_a_body_one_may_be_cancelled() -> None:
    waiting_now, bodies = asyncio.Event(), list[bytes]()

    async def several(scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(receive()) for _ in range(2)]
        await asyncio.sleep(0)  # both wait
        tasks[0].cancel()
        waiting_now.set()
        bodies.append((await tasks[1])["body"])
        await answer(send, b"{}")

    async def run_client() -> None:
        async with listening(SHORT, several) as connect:
            reader, writer = await connect()
            writer.write(POST % 3)
            await waiting_now.wait()
            writer.write(b"abc")
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()

    run(run_client())
    assert bodies == [b"abc"]


def test_a_client_that_reads_slowly_is_disconnected_after_the_limit_for_the_whole_response() -> None:
    ended = list[bool]()

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10**4):
            if ended:
                break
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})

    async def run_client() -> None:
        loop = asyncio.get_running_loop()
        async with listening(ConnectionLimits(reading=1e3, answer=0.3), much) as connect:
            reader, writer = await connect()
            writer.write(GET % 1)
            began = loop.time()
            while not ended and loop.time() < began + 3:
                try:
                    await reader.readexactly(2**17)
                    await asyncio.sleep(0.02)
                except (ConnectionError, asyncio.IncompleteReadError):
                    ended.append(True)
            assert loop.time() < began + 3
            ended.append(True)
            writer.close()

    run(run_client())


def test_a_pipelined_body_is_not_read_before_its_request_runs() -> None:
    async def noticing(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/1":
            listener = asyncio.ensure_future(receive())  # detects a disconnect
            await asyncio.sleep(0.3)
            listener.cancel()
        await answer(send, b"")

    async def run_client() -> Any:
        async with listening(ConnectionLimits(), noticing) as connect:
            reader, writer = await connect()
            writer.transport.set_write_buffer_limits(2**25)
            tracemalloc.start()
            writer.write(GET % 1 + POST % 10**7)
            body = bytes(10**7)
            before = tracemalloc.get_traced_memory()[0]
            writer.write(body)
            first = await read_replies(reader, 1)
            peak = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            replies = first + await read_replies(reader, 1)
            writer.close()
            return replies, peak

    replies, peak = run(run_client())
    assert replies == [(200, b""), (200, b"")]
    assert peak < 10**7 + 2**20, "the client's own copy and one read of the socket"


async def send_endless_body(writer: asyncio.StreamWriter) -> None:
    writer.write(POST % 10**9)
    while True:
        writer.write(bytes(10**5))
        await writer.drain()


def test_pipelined_requests_are_answered_in_order() -> None:
    last = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    replies = exchange(b"".join(GET % i for i in range(15)) + POST % 3 + b"abc" + last)
    assert replies == [*((200, b"/%d 0 1" % i) for i in range(15)), (200, b"/ 3 2"), (200, b"/last 0 2")]


def test_requests_before_a_malformed_one_get_their_own_responses() -> None:
    replies = exchange(GET % 1 + GET % 2 + b"nonsense\r\n\r\n")
    assert [status for status, _ in replies] == [200, 200, 400]
    assert exchange(GET % 1 + b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")[0] == (200, b"/1 0 1")


def test_pipelined_requests_take_the_memory_of_one_read() -> None:
    begun, held = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await receive()
        await held.wait()
        await answer(send, b"")

    async def run_client() -> Any:
        async with listening(ConnectionLimits(), slow) as connect:
            reader, writer = await connect()
            tracemalloc.start()
            writer.write(GET % 1 * 200_000)
            flushed = asyncio.ensure_future(writer.drain())
            await begun.wait()
            await asyncio.sleep(0.1)
            held.set()
            replies = await read_replies(reader, 1000)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            writer.close()
            flushed.cancel()
            return [status for status, _ in replies], peak

    statuses, peak = run(run_client())
    assert statuses == [200] * 1000
    assert peak < 20e6, "5.6 MB were sent; most are in the client's own buffer"


def test_an_early_response_reaches_a_client_that_still_sends_its_body() -> None:
    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"{}", 200)

    last = b"GET /2 HTTP/1.1\r\nConnection: close\r\n\r\n"
    replies = exchange(POST % 10**7, *[bytes(10**6)] * 10, last, app=answer_early)
    assert len(replies) == 2, "the connection stays open"


def test_expect_100_continue_is_continued_or_answered_and_closed() -> None:
    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"", 200)

    request = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    assert exchange(request, app=answer_early) == [(200, b"")]

    async def waits() -> None:
        async with listening(ConnectionLimits()) as connect:
            reader, writer = await connect()
            writer.write(request)
            assert await read_replies(reader, 1) == [(100, b"")]
            writer.write(b"abc" + request + b"def")  # does not wait the second time
            assert await read_replies(reader, 2) == [(200, b"/ 3 2"), (200, b"/ 3 2")]
            writer.close()

    run(waits())


def test_an_endless_body_is_discarded_only_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.transport.connection._MAX_DISCARDED", 10**6)

    async def answer_early(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"", 200)

    async def run_client() -> None:
        async with listening(ConnectionLimits(), answer_early) as connect:
            _, writer = await connect()
            with pytest.raises(ConnectionError):
                await send_endless_body(writer)
            writer.close()

    run(run_client())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  (any condition)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("rest", [b"", b"\r\n", GET % 2, b"x" * 5000])
def test_a_disconnect_is_noticed_whatever_follows_the_request(rest: bytes) -> None:
    begun, left = list[bool](), list[bool]()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(True)
        await receive()
        left.append((await receive())["type"] == "http.disconnect")

    async def run_client() -> None:
        async with listening(ConnectionLimits(), slow) as connect:
            _, writer = await connect()
            writer.write(GET % 1 + rest)
            await until(lambda: begun)
            writer.close()
            await until(lambda: left)

    run(run_client())


def test_connections_over_the_limit_are_closed_although_all_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.transport.connection_limits._MAX_CONNECTIONS", 2)
    monkeypatch.setattr("server.transport.connection_limits._HEALTH_CONNECTIONS", 3)

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    async def run_client() -> None:
        async with listening(ConnectionLimits(), never) as connect:
            clients = []
            for _ in range(10):
                clients.append(await connect())
                clients[-1][1].write(CLOSING % b"/v2/health/live")
                await asyncio.sleep(0.01)
            closed = [reader.at_eof() or reader.exception() is not None for reader, _ in clients]
            assert closed == [False] * 5 + [True] * 5
            for _, writer in clients:
                writer.close()

    run(run_client())


def test_an_http_1_0_connection_is_closed_after_the_answer() -> None:
    assert exchange(b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n") == [(200, b"/old 0 1")]


def test_the_time_in_which_a_handler_does_not_read_is_not_that_of_its_client() -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.4)
        await echo(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 300000\r\n\r\n"
    assert exchange(head + bytes(300_000), limits=ConnectionLimits(body=0.2), app=late) == [(200, b"/ 300000 2")]
    assert [status for status, _ in exchange(head + bytes(299_999), limits=ConnectionLimits(body=0.2), app=late)] == [
        408
    ]


@pytest.mark.parametrize("bodies", [[b"ab"], [b"abcd"], [b"abc", b"d"], [b"a", b"b", b""]])
def test_a_response_of_another_length_than_it_says_closes_the_connection(
    bodies: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    async def run_client() -> bytes:
        async with listening(ConnectionLimits(), wrong) as connect:
            reader, writer = await connect()
            writer.write(GET % 1)
            received = b""
            with suppress(ConnectionError):
                while piece := await reader.read(1000):
                    received += piece
            writer.close()
            return received

    assert b"abcd" not in run(run_client())
    if bodies != [b"abc", b"d"]:
        assert "Content-Length" in caplog.text or "end of the response" in caplog.text


def test_after_an_early_answer_a_connection_is_closed_at_shutdown() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"")

    async def run_client() -> None:
        loop = asyncio.get_running_loop()
        state = ServerState()
        create = partial(protocol_factory(Listener(), AsgiApp(early)), server_state=state, _loop=loop)
        server = await loop.create_server(create, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(POST % 10 + b"abc")
        assert await read_replies(reader, 1) == [(200, b"")]
        for connection in list(state.connections):
            connection.shutdown()
        assert await reader.read() == b""
        await until(lambda: not state.connections)
        writer.close()
        server.close()

    run(run_client())


def test_a_client_that_disconnects_with_an_unread_answer_is_not_kept() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, bytes(10**6 if scope["path"] == "/1" else 0))

    async def run_client() -> None:
        loop = asyncio.get_running_loop()
        state = ServerState()
        create = partial(protocol_factory(Listener(SHORT), AsgiApp(large)), server_state=state, _loop=loop)
        server = await loop.create_server(create, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(GET % 1)
            await until(lambda: state.connections)
            client.shutdown(socket.SHUT_WR)
            await until(lambda: not state.connections)
        server.close()

    run(run_client())
