"""Calls of a connection: disconnects, time limits, failures, memory, TLS and contexts."""

import asyncio
import gc
import socket
import ssl
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider

from server.errors import ServerError
from server.telemetry.tracing import Tracing
from server.transport.connection_limits import ConnectionLimits
from server.transport.http_call import HttpCall
from server.transport.request import RequestContext
from server.transport.tls import Tls
from tests.support.certificates import certificate
from tests.support.inference_server import (
    ANY,
    App,
    Response,
    Server,
    exchange,
    parse,
    post,
    run,
    serving,
    settle,
    until,
)

pytestmark = pytest.mark.usefixtures("quiet")

SIZE = 150_528
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


async def connect(server: Server, context: ssl.SSLContext | None = None) -> tuple[Reader, Writer]:
    return await asyncio.open_connection(*server.address, ssl=context)


async def response(reader: Reader) -> Response:
    head = await reader.readuntil(b"\r\n\r\n")
    [parsed] = parse(head)
    parsed.body = await reader.readexactly(int(parsed.headers.get("content-length", "0")))
    return parsed


def reset(writer: Writer) -> None:
    """Close a connection with RST."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [reset, lambda writer: writer.close()], ids=["RST", "FIN"])
@pytest.mark.parametrize("sent", [SIZE // 2, SIZE], ids=["in the body", "in service"])
def test_a_call_is_cancelled_once_when_its_client_disconnects(
    loop: str, sent: int, leave: Callable[[Writer], None]
) -> None:
    async def scenario() -> None:
        async with serving() as server:
            _, writer = await connect(server)
            call = post("/predict/waits", bytes(SIZE))
            writer.write(call[: len(call) - SIZE + sent])
            await until(lambda: server.app.budget.reserved == SIZE)
            await until(lambda: sent < SIZE or server.app.futures)
            leave(writer)
            await until(lambda: server.app.outcomes)
            assert server.app.outcomes == ["ClientDisconnectedError"]
            assert server.app.budget.reserved == 0
            assert all(future.cancelled() for future in server.app.futures)
            await until(lambda: not server.connections)

    run(scenario(), loop)


def test_the_buffer_of_a_cancelled_call_is_not_reused_while_it_is_read(loop: str) -> None:
    async def scenario() -> None:
        async with serving() as server:
            _, writer = await connect(server)
            writer.write(post("/predict/waits", b"a" * SIZE))
            await until(lambda: server.app.bodies)
            in_service = server.app.bodies[0]
            reset(writer)
            await until(lambda: server.app.outcomes)
            for _ in range(3):
                reader, writer = await connect(server)
                writer.write(post("/predict/echo", b"b" * SIZE))
                assert (await response(reader)).status == 200
                writer.close()
            assert in_service == b"a" * SIZE

    run(scenario(), loop)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_the_buffer_of_an_answered_call_is_reused() -> None:
    async def scenario() -> None:
        async with serving() as server:
            reader, writer = await connect(server)
            used = set()
            for _ in range(5):
                writer.write(post("/predict/waits", bytes(SIZE)))
                await until(lambda: server.app.bodies)
                used.add(address_of(server.app.bodies[0]))
                server.app.futures[-1].set_result(b"{}")
                assert (await response(reader)).status == 200
                await until(lambda: not server.app.bodies)
            assert len(used) == 1
            writer.close()

    run(scenario())


def test_all_calls_of_a_batch_are_answered_before_one_is_accounted_for(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving() as server:
            begin = HttpCall._begin

            def logged(call: HttpCall, *arguments: Any) -> None:
                server.app.outcomes.append("written")
                begin(call, *arguments)

            monkeypatch.setattr(HttpCall, "_begin", logged)
            clients = [await connect(server) for _ in range(3)]
            for _, writer in clients:
                writer.write(post("/predict/waits", bytes(SIZE)))
            await until(lambda: len(server.app.futures) == len(clients))
            for future in server.app.futures:
                future.set_result(b"{}")
            for reader, writer in clients:
                assert (await response(reader)).status == 200
                writer.close()
            await until(lambda: len(server.app.outcomes) == 2 * len(clients))
            assert server.app.outcomes == ["written"] * 3 + ["200"] * 3

    run(scenario(), loop)


def test_a_slow_body_is_answered_408_and_an_idle_connection_is_closed(loop: str) -> None:
    async def scenario() -> None:
        async with serving(limits=ConnectionLimits(body=0.1, keep_alive=0.1)) as server:
            reader, writer = await connect(server)
            writer.write(post("/predict/echo", bytes(SIZE))[:-1])
            assert (await response(reader)).status == 408
            assert await reader.read() == b""
            writer.close()
            assert server.app.outcomes == ["ClientDisconnectedError"]
            for more in (b"", b"\r\n"):  # an empty line is no request
                reader, writer = await connect(server)
                writer.write(post("/predict/waits", b"abc") + more)
                await until(lambda: server.app.bodies)
                await asyncio.sleep(0.15)
                server.app.futures[-1].set_result(b"")
                assert (await response(reader)).status == 200
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()

    run(scenario(), loop)


def test_a_client_that_does_not_read_its_response_is_disconnected(loop: str) -> None:
    async def scenario() -> None:
        async with serving(limits=ConnectionLimits(reading=0.1)) as server:
            client = await server.pair()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(post("/predict/large", b"abc"))
            await until(lambda: server.connections)
            await until(lambda: not server.connections)
            await until(lambda: server.app.outcomes)
            client.close()

    run(scenario(), loop)


def test_a_client_that_does_not_read_is_not_served_more(loop: str) -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await server.pair()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            call = post("/predict/echo", b"abc", b"Filler: " + b"f" * 4000)  # repeated by the response
            for _ in range(1000):
                with suppress(BlockingIOError):
                    client.send(call)
                await settle(3)
            [connection] = server.connections
            assert connection.transport.get_write_buffer_size() < 2**15, "responses wait for the client to read"
            assert len(server.app.outcomes) < 500
            client.close()

    run(scenario(), loop)


def test_a_timeout_ends_the_wait(loop: str) -> None:
    async def scenario() -> None:
        async with serving() as server:
            responses, _ = await exchange(
                await server.pair(), [post("/predict/waits", b"abc", b"X-Timeout-Ms: 50")], server.busy
            )
            assert [one.status for one in responses] == [504]
            assert server.app.outcomes == ["ExpiredError"]
            assert server.app.futures[0].cancelled()

    async def answered_in_time() -> None:
        async with serving() as server:
            reader, writer = await connect(server)
            writer.write(post("/predict/waits", b"abc", b"X-Timeout-Ms: 60000"))
            await until(lambda: server.app.bodies)
            server.app.futures[0].set_result(b"in time")
            assert (await response(reader)).body == b"in time"
            writer.close()

    run(scenario(), loop)
    run(answered_in_time(), loop)


@pytest.mark.parametrize("count", [17, 3000])
def test_many_pipelined_calls_are_answered_in_order(count: int, loop: str) -> None:
    async def scenario() -> None:
        async with serving() as server:
            sent = b"".join(post("/predict/echo", b"%d" % i, b"X-Request-Id: %d" % i) for i in range(count))
            responses, _ = await exchange(await server.pair(), [sent])
            assert [one.headers["x-request-id"] for one in responses] == [f"{i}" for i in range(count)]

    run(scenario(), loop)


def test_calls_that_are_open_at_shutdown_are_answered_and_their_connections_closed(loop: str) -> None:
    async def scenario(stops: bool) -> None:
        async with serving() as server:
            reader, writer = await connect(server)
            writer.write(post("/predict/waits", b"abc"))
            await until(lambda: server.app.bodies)
            idle_reader, idle = await connect(server)
            idle.write(post("/predict/echo", b"abc"))
            assert (await response(idle_reader)).status == 200
            server.stops = stops
            for connection in server.connections:
                connection.shutdown()  # as uvicorn does
            assert await idle_reader.read() == b""
            server.app.futures[0].set_result(b"{}")
            last = await response(reader)
            assert (last.status, last.headers["connection"]) == (200, "close")
            assert await reader.read() == b""
            for each in (writer, idle):
                each.close()

    for stops in (False, True):
        run(scenario(stops), loop)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ServerError("broken"), 500), (ValueError("secret"), 500), (asyncio.CancelledError(), 500), (SystemExit(3), 500)],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_handler_raises_is_answered_500(error: BaseException, status: int, loop: str) -> None:
    async def fails(context: RequestContext) -> None:
        await context.read_body(ANY, context.memory.grow_to)
        await asyncio.sleep(0)
        raise error

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app) as server:
            calls = [post("/predict/fails", b"abc"), post("/predict/echo", b"abc")]
            responses, _ = await exchange(await server.pair(), calls)
            assert [one.status for one in responses] == [status, 200]
            assert b"error" in responses[0].body
            assert b"secret" not in responses[0].body
            assert "x-request-id" in responses[0].headers

    run(scenario(), loop)


def test_a_handler_without_a_response_closes_the_connection(loop: str) -> None:
    async def fails(context: RequestContext) -> None:
        await context.read_body(ANY, context.memory.grow_to)

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app) as server:
            responses, closed = await exchange(await server.pair(), [post("/predict/fails", b"abc")])
            assert (responses, closed) == ([], True)

    run(scenario(), loop)


def test_a_handler_may_wait_for_anything(loop: str) -> None:
    async def fails(context: RequestContext) -> None:
        body = await context.read_body(ANY, context.memory.grow_to)
        slots = asyncio.Semaphore(1)
        running = asyncio.get_running_loop()

        async def part(i: int) -> int:
            async with slots:
                await asyncio.sleep(0.001)
                return await running.run_in_executor(None, lambda: sum(body[i::4]))

        parts = await context.wait_for(asyncio.gather(*map(part, range(4))))
        await context.respond(200, b"%d" % sum(parts), [])

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app) as server:
            body = bytes(range(256)) * 800
            for _ in range(3):
                responses, _ = await exchange(await server.pair(), [post("/predict/fails", body)], server.busy)
                assert [one.body for one in responses] == [b"%d" % sum(body)]

    run(scenario(), loop)


def test_a_disconnect_is_noticed_by_a_handler_that_reads_late(loop: str) -> None:
    entered = list[bool]()

    async def fails(context: RequestContext) -> None:
        entered.append(True)
        await asyncio.sleep(0.2)
        await context.read_body(ANY, context.memory.grow_to)

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app) as server:
            _, writer = await connect(server)
            writer.write(post("/predict/fails", bytes(SIZE))[:-10])
            await until(lambda: entered)
            for connection in server.connections:
                connection.abort()
            await until(lambda: app.outcomes)
            assert app.outcomes == ["ClientDisconnectedError"]
            writer.close()

    run(scenario(), loop)


def test_spans_of_interleaved_calls_are_separate(loop: str) -> None:
    tracing = Tracing(TracerProvider(), "1")
    found = list[bool]()

    async def fails(context: RequestContext) -> None:
        for _ in range(3):
            current = tracing.current()
            assert current is not None
            assert context.span is not None
            found.append(f"{current.get_span_context().trace_id:032x}" == context.span.trace_id)
            await asyncio.sleep(0.002)
        body = await context.read_body(ANY, context.memory.grow_to)
        await asyncio.sleep(0)
        current = tracing.current()
        assert current is not None
        assert context.span is not None
        found.append(f"{current.get_span_context().trace_id:032x}" == context.span.trace_id)
        assert getattr(current, "parent", None) is None
        await context.respond(200, bytes(body), [])

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app, tracing=tracing) as server:
            sent = post("/predict/fails", b"a" * 9000) * 3
            answered = await asyncio.gather(
                *[exchange(await server.pair(), [sent[:500], sent[500:]], server.busy) for _ in range(4)]
            )
            for responses, _ in answered:
                assert [one.status for one in responses] == [200] * 3
            traces = {one.headers["traceparent"].split("-")[1] for responses, _ in answered for one in responses}
            assert len(traces) == 12
            assert tracing.current() is None

    run(scenario(), loop)
    assert found == [True] * 48


def test_calls_over_tls(loop: str, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    context = ssl.create_default_context(cafile=str(cert))

    async def scenario() -> None:
        async with serving(tls=Tls(cert, key)) as server:
            reader, writer = await connect(server, context)
            body = bytes(range(256)) * 1000
            for path in ("echo", "late", "early", "rejected", "echo"):
                writer.write(post(f"/predict/{path}", body))
                assert (await response(reader)).status == (503 if path == "rejected" else 200)
            writer.write(post("/predict/echo", b"a") * 5 + post("/predict/echo", body))
            assert [(await response(reader)).status for _ in range(6)] == [200] * 6
            sizes = [said["size"] for said, _, _ in server.app.seen]
            assert sizes == [len(body), len(body), len(body), *[1] * 5, len(body)]
            writer.close()
            # what follows a call that closes the connection is not served, even if it was received with it
            reader, writer = await connect(server, context)
            writer.write(post("/predict/early", bytes(9000), b"Connection: close") + post("/predict/echo", b"x"))
            assert (await response(reader)).status == 200
            assert await reader.read() == b""
            assert len(server.app.seen) == len(sizes)
            writer.close()

    run(scenario(), loop)


def test_nothing_of_a_call_is_left_without_garbage_collection(loop: str) -> None:
    calls = list[weakref.ref[Any]]()

    async def fails(context: RequestContext) -> None:
        body = await context.read_body(ANY, context.memory.grow_to)

        class Local:
            pass

        local = Local()
        local.body = body  # type: ignore[attr-defined]
        calls.append(weakref.ref(local))
        del Local
        how = context.headers[b"x-request-id"]
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if how == b"fails":
            asyncio.get_running_loop().call_soon(future.set_exception, ServerError("broken"))
        waits, future = [future], asyncio.get_running_loop().create_future()
        del future
        await context.wait_for(waits.pop(), 0.02 if how == b"expires" else float("inf"))

    async def scenario() -> None:
        app = App()
        app.fails = fails  # type: ignore[attr-defined]
        async with serving(app=app) as server:
            for how in (b"fails", b"expires"):
                responses, _ = await exchange(
                    await server.pair(), [post("/predict/fails", bytes(SIZE), b"X-Request-Id: " + how)], server.busy
                )
                assert [one.status for one in responses] == [{b"fails": 500, b"expires": 504}[how]]
            _, writer = await connect(server)
            writer.write(post("/predict/fails", bytes(SIZE), b"X-Request-Id: leaves"))
            await until(lambda: len(calls) == 3)
            reset(writer)
            await until(lambda: len(app.outcomes) == 3)
            await settle()
            assert [call() for call in calls] == [None] * 3

    gc.disable()
    try:
        run(scenario(), loop)
    finally:
        gc.enable()


def test_an_idle_connection_holds_no_body_and_a_closed_one_nothing(loop: str) -> None:
    async def one_call(server: Server, path: str) -> "weakref.ref[Any]":
        reader, writer = await connect(server)
        writer.write(post(path, b"abc" * 1000))
        await response(reader)
        await settle()
        [connection] = server.connections
        assert connection._call is None
        writer.close()
        return weakref.ref(connection)

    async def scenario() -> None:
        async with serving() as server:
            for path in ("/predict/echo", "/predict/rejected"):
                reference = await one_call(server, path)
                await until(lambda: not server.connections)
                await settle()
                assert reference() is None

    gc.collect()
    gc.disable()
    try:
        run(scenario(), loop)
    finally:
        gc.enable()


@pytest.mark.parametrize("chunked", [True, False])
def test_memory_for_a_long_body_is_reserved_as_it_arrives(chunked: bool, loop: str) -> None:
    half = bytes(600_000)
    head = b"POST /predict/echo HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n"
    head %= b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (2 * len(half))
    pieces = [b"%x\r\n%b\r\n" % (len(half), half)] * 2 + [b"0\r\n\r\n"] if chunked else [half] * 2

    async def scenario() -> None:
        async with serving() as server:
            reader, writer = await connect(server)
            writer.write(head)
            await until(lambda: server.app.budget.reserved)
            assert server.app.budget.reserved == 2**18
            writer.write(pieces[0])
            await until(lambda: server.app.budget.reserved == len(half))
            writer.write(b"".join(pieces[1:]))
            assert (await response(reader)).status == 200
            writer.close()

    run(scenario(), loop)
