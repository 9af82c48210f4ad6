"""An inference call that its connection serves directly: without an asyncio task, an ASGI scope or a copy of the body.

The connection recognises it when the whole head has arrived. The call is served by the same coroutine as through ASGI,
which runs within the connection's callbacks: at the head up to the body, when the body is complete up to the answer of
the batch, and then to the end of the response.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from types import coroutine
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.transport.request import (
    CHUNK,
    Body,
    BodyLimit,
    CancellableContext,
    ClientDisconnectedError,
    Handler,
    Headers,
    RequestContext,
    body_length,
)

_log = logging.getLogger("batchwright.connection")
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class CallHead:
    """The head of an inference call; clients repeat it byte by byte.

    Attributes:
        raw: its bytes.
        path: the path, which has no escapes.
        headers: by lower-case name.
        length: Content-Length, bytes.
        handler: serves the call.
        keep_alive: whether the client keeps the connection open.
    """

    raw: bytes
    path: str
    headers: Mapping[bytes, bytes]
    length: int
    handler: Handler
    keep_alive: bool


class DirectApp(Protocol):
    """The application as a connection calls it without ASGI."""

    def find_inference(self, path: str, /) -> Handler | None:
        """Return the handler of POST requests with this path; None if they are served by ASGI."""
        ...

    def response_headers(self, context: RequestContext, /) -> Headers:
        """Return the headers that every response has."""
        ...

    def serve(self, context: RequestContext, handler: Handler, *arguments: Any) -> Coroutine[Any, Any, None]:
        """Serve one request by a handler."""
        ...


class DirectConnection(Protocol):
    """What a call needs of its connection."""

    transport: asyncio.Transport
    flow: FlowControl

    def abort(self) -> None:
        """Close the connection at once."""
        ...

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        ...


Buffers = Callable[[int], memoryview]  # memory of a size for a body, for as long as something refers to it


class DirectCall(CancellableContext):
    """One inference call on its connection; to the connection it is what uvicorn's cycle is for an ASGI request.

    Attributes:
        keep_alive: whether the connection stays open after the response.
        response_complete: whether the response was written.
        remaining: bytes of the body that have not arrived.
    """

    __slots__ = (
        *("_app", "_buffers", "_connection", "_context", "_coroutine", "_first"),
        *("_head", "_reads_body", "_view", "keep_alive", "remaining", "response_complete"),
    )

    http_version = "1.1"

    def __init__(self, connection: DirectConnection, app: DirectApp, buffers: Buffers, head: CallHead) -> None:
        """The call has arrived with this head."""
        super().__init__("POST", head.path, head.headers, monotonic())
        self._connection = connection
        self._app = app
        self._buffers = buffers
        self._head = head
        self._context = copy_context()
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._reads_body = False
        self._first = b""
        self._view: memoryview | None = None
        self.keep_alive = head.keep_alive
        self.response_complete = False
        self.remaining = head.length

    # For the connection

    @property
    def response_started(self) -> bool:
        """Whether a part of the response was written."""
        return self.status != 0

    def start(self, first: bytes) -> None:
        """Serve the call, up to its body; `first` are the bytes of the body that arrived with the head."""
        self._first = first
        self.remaining -= len(first)
        self._coroutine = self._app.serve(self, self._head.handler, self)
        self._context.run(self._step)
        if self.remaining and not (self._reads_body or self.response_complete):
            self._connection.flow.pause_reading()  # until the handler reads the body

    def body_buffer(self) -> memoryview | None:
        """Return where the next bytes of the body are to be received; None if they are to be dropped."""
        return None if self._view is None else self._view[-self.remaining :]

    def body_received(self, count: int) -> None:
        """Account for `count` more bytes of the body, and go on serving the call when it is complete."""
        self.remaining -= count
        if not self.remaining and self._reads_body:
            self._context.run(self._step)

    def disconnect(self) -> None:
        """Cancel the call, since its client has closed the connection."""
        if self._disconnected:
            return
        super().disconnect()
        if self._reads_body:
            self._context.run(self._step)

    # For the coroutine

    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> Body:
        """Receive the body into one buffer; a view of it is returned unless all of it arrived with the head."""
        length = self._head.length
        body_length(self.headers, limit)
        reserve(length)
        if self._disconnected:
            raise ClientDisconnectedError
        first, self._first = self._first, b""
        if not self.remaining:
            return first
        self._view = self._buffers(length)
        self._view[: len(first)] = first
        self._reads_body = True
        self._connection.flow.resume_reading()
        await _suspend()
        self._reads_body = False
        view, self._view = self._view, None
        if self.remaining:
            raise ClientDisconnectedError
        return view.toreadonly()

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Write the response with its head in one piece; a large body in several, as fast as the client reads.

        It returns in a later turn of the event loop, so that the other calls of a batch are answered before this one is
        counted and logged.
        """
        flow = self._connection.flow
        if flow.write_paused:
            await flow.drain()  # the client does not read its previous responses
        if self._disconnected:
            return
        if len(body) <= CHUNK:
            self.release_memory()
        self._write_head(status, len(body), headers, body[:CHUNK])
        for start in range(CHUNK, len(body), CHUNK):
            if start + CHUNK >= len(body):
                self.release_memory()
            if not await self._write(body[start : start + CHUNK]):
                return
        self._complete()
        self.answered = monotonic()
        await asyncio.sleep(0)

    async def respond_in_pieces(self, status: int, length: int, pieces: AsyncIterator[bytes], headers: Headers) -> None:
        """Write the response, as fast as the client reads."""
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        if self._disconnected:
            return
        self._write_head(status, length, headers, b"")
        async for piece in pieces:
            length -= len(piece)
            if not await self._write(piece):
                return
        if not length:
            self._complete()

    def _write_head(self, status: int, length: int, headers: Headers, first: bytes) -> None:
        self.status = status
        headers = headers + self._app.response_headers(self)
        if not self.keep_alive and _CLOSE not in headers:
            headers.append(_CLOSE)
        self.keep_alive = _CLOSE not in headers
        lines = [b"%b: %b\r\n" % header for header in headers]
        end = b"content-length: %d\r\n\r\n" % length
        self._connection.transport.write(b"".join((STATUS_LINE[status], *lines, end, first)))

    async def _write(self, piece: bytes) -> bool:
        """Write a further piece of the body; whether the connection is still open."""
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        await asyncio.sleep(0)  # serve other connections in between, also if this client reads fast
        if self._connection.transport.is_closing():
            return False
        self._connection.transport.write(piece)
        return True

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._connection.transport.close()
        self._connection.on_response_complete()

    def _step(self, _: object = None) -> None:
        """Run the coroutine until it waits; a future that it waits for calls this again."""
        assert self._coroutine is not None
        try:
            future = self._coroutine.send(None)
        except StopIteration:
            self._end()
        except Exception:  # noqa: BLE001  (as a task, which ends with any exception)
            _log.exception("the response to request %s failed", self.request_id)
            self._end()
        else:
            if future is None:  # asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(self._step, context=self._context)
            elif future is not _BODY:
                future._asyncio_future_blocking = False  # as asyncio.Task does
                future.add_done_callback(self._step, context=self._context)

    def _end(self) -> None:
        self._coroutine = self._view = None
        self._first = b""
        if not (self.response_complete or self._disconnected):
            self._connection.abort()


_BODY = object()  # what a call yields that waits for its body


@coroutine
def _suspend() -> Generator[object, None, None]:
    yield _BODY
