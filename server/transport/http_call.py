"""One HTTP request on its connection: its head, its body as it arrives, and its response; also as an ASGI request."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.errors import TooLargeError
from server.transport.request import Body, BodyLimit, ClientDisconnectedError, Headers, RequestContext, check_length

Buffers = Callable[[int], memoryview]  # returns memory for a body of this size

CHUNK = 2**14  # bytes of a response that are sent at once
_IN_PLACE = 2**20  # bytes; memory for a longer body is reserved as it arrives
_READ_AHEAD = 2**18  # bytes of a body that may arrive before the handler reads on: one read of the socket
_CLOSE = (b"connection", b"close")


@dataclass(slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        method: in capitals.
        raw_path: path of the request target, as it was sent.
        path: its text, without escapes.
        query: what follows the first `?`.
        headers: in their order, with lower-case names.
        by_name: the last of each name.
        length: of the body, bytes; None for a chunked one.
        http_version: 1.0 or 1.1.
        keep_alive: whether the client keeps the connection open.
    """

    method: str
    raw_path: bytes
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    by_name: Mapping[bytes, bytes]
    length: int | None
    http_version: str
    keep_alive: bool

    @classmethod
    def of(
        cls, parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> "RequestHead":
        """The head that a parser has found, with its request target.

        Raises:
            HttpParserInvalidURLError: the target has no path, or other characters than ASCII.
        """
        raw, query = url, b""
        if not url.startswith(b"/") or b"?" in url or b"#" in url:
            parsed = httptools.parse_url(url)
            raw, query = parsed.path or b"", parsed.query or b""
        if not raw or not raw.isascii():
            raise httptools.HttpParserInvalidURLError
        path, by_name = raw.decode(), dict(headers)
        if "%" in path:
            path = unquote(path)
        length = None if b"transfer-encoding" in by_name else int(by_name.get(b"content-length", 0))
        method, version = parser.get_method().decode(), parser.get_http_version()
        keep_alive = version == "1.1" and parser.should_keep_alive()
        return cls(method, raw, path, query, headers, by_name, length, version, keep_alive)


class CallConnection(Protocol):
    """What a call needs of its connection.

    Attributes:
        transport: of the connection.
        app: serves the requests.
        buffers: memory for bodies that are received in place.
        loop: the event loop.
    """

    transport: asyncio.Transport
    app: "HttpApp"
    buffers: Buffers
    loop: asyncio.AbstractEventLoop

    @property
    def can_write(self) -> bool:
        """Whether the client has read most of what was written."""
        ...

    async def writable(self) -> bool:
        """Wait until the client has read most of what was written; return whether the connection is still open."""
        ...

    def update_reading(self) -> None:
        """Pause or resume reading, as the call needs it."""
        ...

    def response_completed(self, call: "HttpCall", /) -> None:
        """Go on with the next request, or close the connection."""
        ...


class HttpCall(RequestContext):
    """One request on its connection.

    Attributes:
        head: of the request.
        keep_alive: whether the connection stays open after the response.
        response_complete: whether the whole response was written.
        is_whole: whether the whole body has arrived.
    """

    __slots__ = (
        "_connection",
        "_continues",
        "_ended",
        "_missing",
        "_parts",
        "_pending",
        "_read",
        "_unsent",
        "_view",
        "_waiters",
        "head",
        "is_whole",
        "keep_alive",
        "response_complete",
    )

    def __init__(self, connection: CallConnection, head: RequestHead, began: float) -> None:
        """Create the call of a request with this head that began at `began`, s of time.monotonic."""
        super().__init__(head.method, head.path, head.by_name, began)
        self.head = head
        self.keep_alive = head.keep_alive
        self.response_complete = False
        self.is_whole = head.length == 0
        self._connection = connection
        expects = head.by_name.get(b"expect", b"").lower() == b"100-continue" and head.http_version == "1.1"
        self._continues = expects  # whether the client waits for 100 Continue
        self._parts: list[bytes] = []  # of the body, not read yet
        self._view: memoryview | None = None  # the body, of which `_missing` bytes have not arrived
        self._missing = 0
        self._waiters: list[asyncio.Future[None]] = []  # of the tasks of the handler that wait for more of the body
        self._read = False  # whether ASGI has received the whole body
        self._pending: tuple[int, Headers] | None = None  # start of a response by ASGI
        self._unsent: int | None = None  # bytes of that response, by its Content-Length
        self._ended: asyncio.Future[None] | None = None  # the disconnect, or the end of the response

    # For the connection

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""
        return self._disconnected

    @property
    def awaits_body(self) -> bool:
        """Whether the handler waits for more of the body."""
        return any(not each.done() for each in self._waiters)

    def place(self) -> memoryview | None:
        """Return the memory for the next bytes of the body; None if they are to be passed to `add`."""
        return self._view[-self._missing :] if self._missing and self._view is not None else None

    def fill(self, count: int) -> None:
        """Account for bytes that were received in `place`."""
        self._missing -= count
        if not self._missing:
            self.body_complete()

    def add(self, part: bytes) -> None:
        """Add a part of the body."""
        self._parts.append(part)
        if self.head.length is None or self.head.length > _IN_PLACE:
            self._wake()

    def body_complete(self) -> None:
        """Note that the whole body has arrived."""
        self.is_whole = True
        self._wake()

    def disconnect(self) -> None:
        """Cancel the call, since its client has disconnected."""
        super().disconnect()
        self._wake()
        self._end()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # The body

    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> Body:
        """Receive the body, in place if its length is known and at most 1 MiB.

        A view of that buffer is returned, unless all of it arrived with the head.
        """
        length = self.head.length
        if length is not None:
            check_length(length, limit)
        if length is None or length > _IN_PLACE:
            return await self._read_long(limit, reserve)
        reserve(length)
        if self._disconnected:
            raise ClientDisconnectedError
        first = self._take()
        if len(first) == length:
            return first
        view = self._view = self._connection.buffers(length)
        view[: len(first)] = first
        self._missing = length - len(first)
        await self._wait()
        self._view = None
        return view.toreadonly()

    async def _read_long(self, limit: BodyLimit, reserve: Callable[[int], None]) -> bytes:
        """Receive a body part by part, and reserve memory for each."""
        reserve(_READ_AHEAD)
        parts, size, more = list[bytes](), 0, True
        while more:
            part, more = await self._next_part()
            parts.append(part)
            size += len(part)
            reserve(size)
            if size > limit.max_bytes:
                raise TooLargeError(f"the body is over {limit.max_bytes} bytes; {limit.remedy}")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _next_part(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether more follows."""
        while not (self._parts or self.is_whole):
            await self._wait()
        return self._take(), not self.is_whole

    def _take(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _wait(self) -> None:
        """Wait for more of the body.

        Raises:
            ClientDisconnectedError: the client closed the connection.
        """
        if not self._disconnected:
            if self._continues:
                self._continues = False
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            waiter: asyncio.Future[None] = self._connection.loop.create_future()
            self._waiters = [*(each for each in self._waiters if not each.done()), waiter]
            self._connection.update_reading()
            await waiter
        if self._disconnected:
            self._view = None
            raise ClientDisconnectedError

    # The response

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Write the response with its head in one piece; a large body in several, as fast as the client reads.

        It returns in a later turn of the event loop, so that the other calls of a batch are answered before this one is
        counted and logged.
        """
        self._begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        if await self._write(body, last=True):
            self.answered = monotonic()
            await asyncio.sleep(0)

    def _begin(self, status: int, headers: Headers) -> None:
        """Start a response; its head is written with the first part of its body."""
        self.status = status
        self._pending = status, headers + self._connection.app.response_headers(self)

    async def _write(self, body: bytes, last: bool) -> bool:
        """Write a part of the body, as fast as the client reads; return whether the connection is still open."""
        if self.method == "HEAD":
            body = b""
        end = max(len(body), 1)
        for start in range(0, end, CHUNK):
            if start or self._pending is None:
                await asyncio.sleep(0)  # serve other connections in between, also if this client reads fast
            if not (self._connection.can_write or await self._connection.writable()) or self._disconnected:
                return False
            ends = last and start + CHUNK >= end
            if ends:
                self.release_memory()
            self._connection.transport.write(self._head_bytes() + body[start : start + CHUNK])
        if last:
            self.response_complete = True
            self._end()
            self._connection.response_completed(self)
        return True

    def _head_bytes(self) -> bytes:
        """Return the head of the response if it was not written yet."""
        if self._pending is None:
            return b""
        (status, headers), self._pending = self._pending, None
        if self._continues and not self.is_whole:
            self.keep_alive = self._continues = False  # the client may or may not send the body
        if not self.keep_alive and _CLOSE not in headers:
            headers.append(_CLOSE)
        self.keep_alive = _CLOSE not in headers
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join((STATUS_LINE[status], *lines, b"\r\n"))

    # As an ASGI request

    def scope(self) -> Scope:
        """The ASGI scope, in which the call is `state["context"]`; HEAD is a GET whose body is not sent."""
        transport = self._connection.transport
        server, client = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.head.http_version,
            "method": "GET" if self.method == "HEAD" else self.method,
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "path": self.path,
            "raw_path": self.head.raw_path,
            "query_string": self.head.query,
            "root_path": "",
            "headers": self.head.headers,
            "server": server[:2] if isinstance(server, tuple) else None,
            "client": client[:2] if isinstance(client, tuple) else None,
            "state": {"context": self},
        }

    async def receive(self) -> Message:
        """Receive a part of the body by ASGI; after its end wait for the disconnect, or the end of the response."""
        if not (self._read or self._disconnected):
            try:
                part, more = await self._next_part()
            except ClientDisconnectedError:
                return {"type": "http.disconnect"}
            self._read = not more
            return {"type": "http.request", "body": part, "more_body": more}
        if not (self._disconnected or self.response_complete):
            self._ended = self._ended or self._connection.loop.create_future()
            await asyncio.shield(self._ended)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the response by ASGI; one of unknown length ends with the connection."""
        if self._disconnected:
            return
        if self.response_complete:
            raise RuntimeError("an ASGI message after the end of the response")
        if message["type"] == "http.response.start":
            self._begin(message["status"], list(message.get("headers", ())))
            length = next((value for name, value in message.get("headers", ()) if name == b"content-length"), None)
            self._unsent = None if length is None else int(length)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._unsent is not None and self.method != "HEAD":
            self._unsent -= len(body)
            if self._unsent < 0 or (self._unsent and not more):
                raise RuntimeError("a response of another length than its Content-Length")
        if self._pending is not None:
            status, headers = self._pending
            if status not in (204, 304) and all(name != b"content-length" for name, _ in headers):
                headers.append(_CLOSE if more else (b"content-length", b"%d" % len(body)))
        await self._write(body, last=not more)


class HttpApp(Protocol):
    """What serves the requests of all connections.

    Attributes:
        app: the ASGI application within it, whose lifespan is that of the server.
    """

    app: ASGIApp

    async def handle(self, call: HttpCall, /) -> None:
        """Serve one request. It ends without a response only if the client has disconnected."""
        ...

    def response_headers(self, context: RequestContext, /) -> Headers:
        """Return the headers that every response has."""
        ...
