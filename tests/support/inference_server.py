"""A small server of inference calls over sockets, for tests of the connection: handlers, middleware and clients."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import orjson
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.errors import QueueFullError
from server.transport.accepting import protocol_factory
from server.transport.auth import Keys, parse_keys
from server.transport.connection import Connection, Listener
from server.transport.connection_limits import ConnectionLimit, ConnectionLimits
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware
from server.transport.request import JSON_CONTENT, BodyLimit, Handler, RequestContext, client_timeout
from server.transport.tls import Tls
from server.workers.worker import shared_memory

KEYS = f"""
user    predict  {sha256(b"user").hexdigest()}
admin   admin    {sha256(b"admin").hexdigest()}
slow    predict  {sha256(b"slow").hexdigest()}  0.0001
"""
LIMIT = BodyLimit(100_000, "send less")
ANY = BodyLimit(2**26, "send less")
_HANDLERS = ("echo", "limited", "rejected", "early", "late", "large", "broken", "waits", "fails")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


@dataclass
class App:
    """Handlers of calls to /predict/NAME, each a method `NAME`; other paths are answered 404.

    Attributes:
        seen: what each handler received.
        futures: those that the handler `waits` waits for.
        outcomes: how the calls ended.
        bodies: kept by the handler `keeps`.
        budget: memory of the calls.
    """

    seen: list[Any] = field(default_factory=list)
    futures: list["asyncio.Future[bytes]"] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(2**26))

    def find(self, path: str) -> Handler | None:
        """Return the handler of this path."""
        prefix, _, name = path.rpartition("/")
        return partial(self._serve, getattr(self, name)) if prefix == "/predict" and name in _HANDLERS else None

    async def _serve(self, handler: Handler, context: RequestContext) -> None:
        outcome = "left"
        with self.budget.reservation() as context.memory:
            try:
                await handler(context)
                outcome = str(context.status)
            except BaseException as error:
                outcome = type(error).__name__
                raise
            finally:
                self.outcomes.append(outcome)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by ASGI."""
        context: RequestContext = scope["state"]["context"]
        await context.respond(404, orjson.dumps({"error": f"{scope['method']} {scope['path']}"}), [JSON_CONTENT])

    async def echo(self, context: RequestContext, limit: BodyLimit = ANY) -> None:
        """Answer with a digest of the body."""
        await self.answer(context, await context.read_body(limit, context.memory.grow_to))

    async def answer(self, context: RequestContext, body: Any) -> None:
        known = {name.decode(): value.decode("latin-1") for name, value in sorted(context.headers.items())}
        said = {"path": context.path, "size": len(body), "sha256": sha256(body).hexdigest(), "headers": known}
        self.seen.append((said, context.key, context.method))
        await context.respond(200, orjson.dumps(said), [JSON_CONTENT])

    async def limited(self, context: RequestContext) -> None:
        """Answer as `echo`, up to a limit on the body."""
        await self.echo(context, LIMIT)

    async def rejected(self, context: RequestContext) -> None:
        """Reject the call before its body is read."""
        raise QueueFullError("the queue is full", 3)

    async def early(self, context: RequestContext) -> None:
        """Answer without reading the body."""
        await context.respond(200, b"{}", [JSON_CONTENT])

    async def late(self, context: RequestContext) -> None:
        """Wait before and after the body is read."""
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        body = await context.read_body(ANY, context.memory.grow_to)
        await asyncio.sleep(0)
        digest = await asyncio.get_running_loop().run_in_executor(None, lambda: sha256(body).hexdigest())
        assert digest == sha256(body).hexdigest()
        await self.answer(context, body)

    async def large(self, context: RequestContext) -> None:
        """Answer with more than the write buffer."""
        body = await context.read_body(ANY, context.memory.grow_to)
        await context.respond(200, sha256(body).hexdigest().encode() * 40_000, [])

    async def broken(self, context: RequestContext) -> None:
        """Fail after the body was read."""
        await context.read_body(ANY, context.memory.grow_to)
        raise RuntimeError("secret")

    async def waits(self, context: RequestContext) -> None:
        """Answer with what the next of `futures` is set to."""
        context.timeout = client_timeout(context.headers)
        body = await context.read_body(ANY, context.memory.grow_to)
        self.futures.append(asyncio.get_running_loop().create_future())
        self.bodies.append(body)
        try:
            await context.respond(200, await context.wait_for(self.futures[-1], context.remaining_timeout()), [])
        finally:
            del self.bodies[-1:]


@dataclass
class Server:
    """A listening server.

    Attributes:
        app: its handlers.
        listener: its settings and shared state.
        address: its host and port.
        state: uvicorn's state of it.
        create: creates the protocol of a connection.
        errors: what reached the loop's exception handler.
        stops: whether it is shutting down.
    """

    app: App
    listener: Listener
    state: ServerState
    create: Callable[[], asyncio.BaseProtocol]
    errors: list[Any]
    address: tuple[str, int] = ("", 0)
    stops: bool = False

    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        return list(self.state.connections)  # type: ignore[arg-type]

    def busy(self) -> bool:
        """Whether a request has no response yet."""
        return any(one._call or one._kept or not one._reads for one in self.connections)

    async def pair(self) -> socket.socket:
        """Return the client's end of a new connection, a socket that does not block."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self.create, theirs)
        return ours


@asynccontextmanager
async def serving(
    limits: ConnectionLimits | None = None,
    tls: Tls | None = None,
    tracing: Any = None,
    keys: bool = False,
    app: App | None = None,
) -> AsyncIterator[Server]:
    """Serve an app; at the end no error may have reached the loop's exception handler."""
    loop, errors, served = asyncio.get_running_loop(), list[Any](), app or App()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    given = Keys(parse_keys(KEYS, "keys")) if keys else None
    middleware = RequestMiddleware(
        served, given, tracing, shutting_down=lambda: server.stops, find_inference=served.find
    )
    listener = Listener(limits or ConnectionLimits(), tls, ConnectionLimit(), shared_memory().buffer)
    state = ServerState()
    create = partial(protocol_factory(listener, middleware), server_state=state, _loop=loop)
    server = Server(served, listener, state, create, errors)
    listening = await loop.create_server(create, "127.0.0.1", 0)
    server.address = listening.sockets[0].getsockname()
    try:
        yield server
    finally:
        listening.close()
        for connection in server.connections:
            connection.transport.abort()
        await settle()
    assert errors == [], "no input may reach the loop's exception handler"
    assert served.budget.reserved == 0


async def settle(rounds: int = 20) -> None:
    """Run the event loop until its callbacks and tasks wait."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    while not condition():  # noqa: ASYNC110  (any condition)
        await asyncio.sleep(0.001)


def run(work: Any, loop: str = "uvloop") -> Any:
    """Run a coroutine on a new event loop of that kind, for at most a minute."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(asyncio.wait_for(work, 60))


def post(path: str, body: bytes = b"", *headers: bytes) -> bytes:
    """Return the bytes of a call."""
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@dataclass
class Response:
    """A response, or an interim response."""

    status: int
    headers: dict[str, str]
    body: bytes


def parse(received: bytes) -> list[Response]:
    """Parse the responses that a client has received; the body of the last may be incomplete."""
    return [*_parse(received)]


def _parse(received: bytes) -> Iterator[Response]:
    while received:
        head, separator, received = received.partition(b"\r\n\r\n")
        assert separator, head
        lines = head.decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:]]
        headers = dict(pairs)
        assert len(headers) == len(pairs), "a header is repeated"
        length = int(headers.get("content-length", "0"))
        yield Response(int(lines[0].split()[1]), headers, received[:length])
        received = received[length:]


def _receive(client: socket.socket, received: list[bytes]) -> bool:
    """Receive what has arrived; return whether the server has closed the connection, after which `received` ends."""
    while b"" not in received:
        try:
            received.append(client.recv(2**18))
        except BlockingIOError:
            return False
        except ConnectionError:
            received.append(b"")
    return True


async def exchange(
    client: socket.socket, pieces: Sequence[bytes], busy: Callable[[], bool] = lambda: False
) -> tuple[list[Response], bool]:
    """Send the pieces one after the other, and close the sending side when the server is not `busy`.

    Returns:
        The responses, and whether the server closed the connection before the client did.
    """
    received: list[bytes] = []
    for piece in pieces:
        left = memoryview(piece)
        while left and not _receive(client, received):
            with suppress(BlockingIOError, ConnectionError):
                left = left[client.send(left) :]
            await settle(3)
        await settle(6)
    count = -1
    while count != len(received) or busy():
        count = len(received)
        await settle(10)
        await asyncio.sleep(0.005)
        _receive(client, received)
    closed = b"" in received
    if not closed:
        client.shutdown(socket.SHUT_WR)
    await until(lambda: _receive(client, received))
    client.close()
    return parse(b"".join(received)), closed
