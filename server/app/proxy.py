"""Requests that a gateway passes on to the serving process, over HTTP on a socket of the file system."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.inference import ANY_BODY
from server.errors import UnavailableError
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import ADMIN_PREFIXES
from server.transport.request import CHUNK, AsgiContext, ClientDisconnectedError, Headers, RequestContext, headers_of

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_SCHEME, _ID = b"x-forwarded-proto", b"x-request-id"  # of the client's request
_SPAN = b"traceparent"
_OF_CONNECTION = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length"))
_REPLACED = _OF_CONNECTION | {b"upgrade", b"expect", _SCHEME, _ID}
_WITHOUT_BODY = (204, 304)  # statuses
_HEAD_END = b"\r\n\r\n"


class Proxy:
    """Passes requests on, each as a whole and on a connection of its own, and their responses back in pieces."""

    def __init__(self, path: Path, budget: MemoryBudget, scheme: str, host: str) -> None:
        """Pass requests on.

        Args:
            path: that of the socket.
            budget: has room for the bodies.
            scheme: that of the clients' requests, http or https.
            host: host and port for requests without a Host header.
        """
        self._path = str(path)
        self._budget = budget
        self._scheme = scheme.encode()
        self._host = host.encode()

    async def serve(self, context: RequestContext, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Serve one request by the serving process.

        The response is passed on as fast as the client reads it, so that only some chunks of it are in memory here.

        Args:
            context: the request.
            target: its path and query, as the client has sent them.
            headers: by lower-case name.

        Raises:
            UnavailableError: there is no serving process.
            TooLargeError: the body is over 64 MiB.
        """
        with suppress(ClientDisconnectedError), ExitStack() as stack:
            with self._budget.reservation() as memory:
                body = await context.read_body(ANY_BODY, memory.grow_to)
                request = self._head(context, target, headers, len(body)) + body
                del body
                connection = stack.enter_context(_unconnected())
                exchange = asyncio.ensure_future(self._exchange(connection, request))
                del request
                status, given, first = await context.wait_for(exchange)
            length = 0 if status in _WITHOUT_BODY else int(dict(given)[b"content-length"])
            missing = 0 if context.method == "HEAD" else length
            pieces = _pieces(context, connection, first, missing)
            passed = [header for header in given if header[0] not in _OF_CONNECTION]
            await context.respond_in_pieces(status, length, pieces, passed)

    def _head(
        self, context: RequestContext, target: bytes, headers: Sequence[tuple[bytes, bytes]], length: int
    ) -> bytes:
        """The head of a request to the serving process."""
        span = None if context.span is None else context.span.traceparent
        replaced = _REPLACED if span is None else _REPLACED | {_SPAN}
        passed = [header for header in headers if header[0] not in replaced]
        if span is not None:
            passed.append((_SPAN, span))
        if b"host" not in context.headers:
            passed.append((b"host", self._host))
        passed += [
            (b"connection", b"close"),
            (b"content-length", b"%d" % length),
            (_SCHEME, self._scheme),
            (_ID, context.request_id.encode()),
        ]
        lines = [b"%b: %b\r\n" % header for header in passed]
        return b"".join((b"%b %b HTTP/1.1\r\n" % (context.method.encode(), target), *lines, b"\r\n"))

    async def _exchange(self, connection: socket.socket, request: bytes) -> tuple[int, Headers, bytes]:
        """Send a request; return status and headers, by lower-case name, of the response, and the start of its body."""
        loop = asyncio.get_running_loop()
        received = bytearray()
        with suppress(OSError):
            await loop.sock_connect(connection, self._path)
            with suppress(OSError):  # an error can be answered before the body was read
                await loop.sock_sendall(connection, request)
            while _HEAD_END not in received and (piece := await loop.sock_recv(connection, CHUNK)):
                received += piece
        head, end, body = bytes(received).partition(_HEAD_END)
        if not end:
            raise UnavailableError("the serving process does not answer for now; send the request again", 1)
        first, *lines = head.split(b"\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        return int(first.split()[1]), headers, body


def _unconnected() -> socket.socket:
    try:
        connection = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise UnavailableError("the gateway has too many open files; send the request again", 1) from error
    connection.setblocking(False)
    return connection


async def _pieces(
    context: RequestContext, connection: socket.socket, first: bytes, missing: int
) -> AsyncIterator[bytes]:
    """The body of a response of `missing` bytes, which begins with `first`; shorter if the connection ends before.

    Raises:
        ClientDisconnectedError: the client closed its connection.
    """
    loop = asyncio.get_running_loop()
    piece = first[:missing]
    with suppress(OSError):
        while missing:
            if piece:
                yield piece
            missing -= len(piece)
            if missing:
                following = asyncio.ensure_future(loop.sock_recv(connection, min(CHUNK, missing)))
                piece = await context.wait_for(following)
                if not piece:
                    return


class ProxiedApplication:
    """The application of the serving process for requests that gateways pass on, with what they know of the client."""

    def __init__(self, app: ASGIApp, publish: Callable[[], None], tracing: "Tracing | None" = None) -> None:
        """Serve requests by `app`.

        Args:
            app: the application of the server.
            publish: publishes the state; called before the response to a request that may have changed it.
            tracing: links the spans of batches to those of requests.
        """
        self._app = app
        self._publish = publish
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        scope["scheme"] = headers[_SCHEME].decode()
        if scope["path"].startswith(ADMIN_PREFIXES):
            send = self._publishing(send)
        context = scope["state"]["context"] = AsgiContext(scope, receive, send)
        context.request_id = headers[_ID].decode()
        span = None if self._tracing is None else self._tracing.fields_in(headers.get(_SPAN))
        with nullcontext() if span is None or self._tracing is None else self._tracing.remote(span):
            await self._app(scope, receive, context.send)

    def _publishing(self, send: Send) -> Send:
        async def publish_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._publish()
            await send(message)

        return publish_and_send
