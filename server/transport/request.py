"""One request, without FastAPI: its context, its body, its timeout and its response."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from starlette.types import Message, Receive, Scope, Send

from server.errors import BadInputError, ExpiredError, ServerError, TooLargeError, render_error
from server.transport.memory_budget import Reservation

if TYPE_CHECKING:
    from server.telemetry.tracing import RequestSpan

_T = TypeVar("_T")
Headers = list[tuple[bytes, bytes]]
Body = bytes | memoryview
JSON_CONTENT = (b"content-type", b"application/json")
Handler = Callable[["RequestContext"], Awaitable[None]]
CHUNK = 2**14  # bytes of a response that are sent at once
_READ_AHEAD = 2**19  # bytes of a body that the connection may buffer: `_BODY_BUFFER` and one read of the socket


class ClientDisconnectedError(Exception):
    """The client closed the connection; no response can be sent."""


class BodyLimit(NamedTuple):
    """Largest size of a body in bytes, and what to do about a larger one, for the error message."""

    max_bytes: int
    remedy: str


class RequestContext(ABC):
    """What belongs to one request from its first byte to its response, and the way to its client.

    Attributes:
        method: of the request.
        path: decoded path below the ASGI `root_path`.
        request_id: its id in logs and responses.
        headers: request headers by lower-case name; of repeated headers the last one.
        began: arrival of the first byte, s of time.monotonic.
        key: name of its API key; None without one.
        span: its tracing span; None where it is not traced.
        status: status of the response; 0 before it starts.
        memory: reservation in the memory budget; only inference calls have one.
        timeout: the client's timeout, s from `began`; inf without one.
        samples: number of samples of an inference call; 1 until it is known.
        received: instant at which the whole body was read, s of time.monotonic; inf before.
        queued: instant at which the samples were queued, s of time.monotonic; inf before.
        answered: instant at which the whole response was written, s of time.monotonic; inf before, and where the
            request ends at once after it.
        waiting: longest waiting time of the samples, s.
        service: longest service time of their batches, s.
        device: name of the device that served the samples.
    """

    __slots__ = (
        *("answered", "began", "device", "headers", "key", "memory", "method", "path", "queued", "received"),
        *("request_id", "samples", "service", "span", "status", "timeout", "waiting"),
    )

    memory: Reservation

    def __init__(self, method: str, path: str, headers: Mapping[bytes, bytes], began: float) -> None:
        """The request began at `began`, s of time.monotonic."""
        self.method = method
        self.path = path
        self.request_id = ""
        self.headers = headers
        self.began = began
        self.key: str | None = None
        self.span: RequestSpan | None = None
        self.status = 0
        self.timeout = inf
        self.samples = 1
        self.received = self.queued = self.answered = inf
        self.waiting = self.service = 0.0
        self.device = ""

    @abstractmethod
    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> Body:
        """Read the whole request body.

        Args:
            limit: limit on the body.
            reserve: called with the total number of bytes to reserve memory for: before reading, then with those read.
                An exception that it raises is passed on.

        Raises:
            TooLargeError: the body is over the limit; raised before reading if Content-Length exceeds it.
            ClientDisconnectedError: the client disconnected before the end of the body.
        """

    @abstractmethod
    async def wait_for(self, future: "asyncio.Future[_T]", time_limit: float = inf) -> _T:
        """Wait for a future, which is cancelled when the client disconnects, or after `time_limit`, s.

        Call it only after the whole body was read.

        Raises:
            ClientDisconnectedError: the client closed the connection.
            ExpiredError: the timeout has passed.
        """

    @abstractmethod
    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole response with these headers, Content-Length, and those that every response has."""

    @abstractmethod
    async def respond_in_pieces(self, status: int, length: int, pieces: AsyncIterator[bytes], headers: Headers) -> None:
        """Send a response whose body arrives in pieces, each once the client has read most of the one before.

        Args:
            status: of the response.
            length: of the body, bytes; the response to HEAD has this Content-Length and no pieces.
            pieces: of the body; with fewer bytes than `length` the connection ends after them.
            headers: as of `respond`.
        """

    async def respond_error(
        self, error: ServerError, headers: Headers | None = None, render: Callable[[ServerError], bytes] | None = None
    ) -> None:
        """Send an error with its status, and with Retry-After if it has one; {"error": ...}, or as `render` says."""
        headers = [JSON_CONTENT, *(headers or [])]
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        await self.respond(error.status, render(error) if render else render_error(str(error)), headers)

    def release_memory(self) -> None:
        """End the reservation of a call whose last piece is about to be sent: its client may send the next one then."""
        memory: Reservation | None = getattr(self, "memory", None)
        if memory is not None:
            memory.resize(0)

    def ended(self) -> float:
        """Return the end of the request: the instant of its answer, now where there is none, s of time.monotonic."""
        return min(monotonic(), self.answered)

    def remaining_timeout(self) -> float:
        """Return the rest of the timeout, s; inf without one.

        Raises:
            ExpiredError: the timeout has passed.
        """
        if self.timeout == inf:
            return inf
        remaining = self.began + self.timeout - monotonic()
        if remaining <= 0.0:
            raise self.expired_error()
        return remaining

    def expired_error(self) -> ExpiredError:
        """Return the error for a timeout that passes before the call is queued."""
        return ExpiredError(f"the timeout of {1e3 * self.timeout:g} ms passed before the input was read and decoded")


class CancellableContext(RequestContext):
    """A request whose connection calls `disconnect` when its client is gone."""

    __slots__ = ("_awaited", "_disconnected", "_reason")

    def __init__(self, method: str, path: str, headers: Mapping[bytes, bytes], began: float) -> None:
        """The request began at `began`, s of time.monotonic."""
        super().__init__(method, path, headers, began)
        self._awaited: asyncio.Future[Any] | None = None
        self._reason: Callable[[], Exception] | None = None  # not the exception, which would refer to the call
        self._disconnected = False

    def disconnect(self) -> None:
        """Cancel the call, since its client is gone."""
        self._disconnected = True
        self._cancel(ClientDisconnectedError)

    async def wait_for(self, future: "asyncio.Future[_T]", time_limit: float = inf) -> _T:
        """Wait for a future; the connection tells of a disconnect."""
        if self._disconnected:
            future.cancel()
            raise ClientDisconnectedError
        timer = None if time_limit == inf else future.get_loop().call_later(time_limit, self._expire)
        self._awaited, self._reason = future, None
        try:
            return await future
        except asyncio.CancelledError:
            if self._reason is not None:
                raise self._reason() from None
            raise
        finally:
            self._awaited = None
            if timer is not None:
                timer.cancel()
            del future  # its exception refers to this frame

    def _expire(self) -> None:
        self._cancel(self.expired_error)

    def _cancel(self, reason: Callable[[], Exception]) -> None:
        if self._awaited is not None and self._awaited.cancel():
            self._reason = reason


class AsgiContext(RequestContext):
    """A request that reaches the server through ASGI."""

    __slots__ = ("_receive", "_response_headers", "_send")

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        response_headers: Callable[[RequestContext], Headers] = lambda _: [],
    ) -> None:
        """The request began at its first byte if the connection recorded that, else now.

        `response_headers` returns the headers that every response has.
        """
        began = scope.get("state", {}).get("began") or monotonic()
        super().__init__(scope["method"], scope["path"], headers_of(scope), began)
        self._receive = receive
        self._send = send
        self._response_headers = response_headers

    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> bytes:
        """Receive the body in messages."""
        return await receive_body(self.headers, self._receive, limit, reserve)

    async def wait_for(self, future: "asyncio.Future[_T]", time_limit: float = inf) -> _T:
        """Wait for a future, and after a short time for a disconnect, too."""
        watch = DisconnectWatch(self, future, time_limit)
        try:
            return await future
        except asyncio.CancelledError:
            if watch.reason is not None:
                raise watch.reason() from None
            raise
        finally:
            watch.stop()
            del watch, future  # the exception of the future refers to this frame

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has closed the connection; call it only after the whole body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send the response by `send`."""
        await self._start(status, len(body), headers)
        if len(body) <= CHUNK:
            self.release_memory()
        await self.send({"type": "http.response.body", "body": body})

    async def respond_in_pieces(self, status: int, length: int, pieces: AsyncIterator[bytes], headers: Headers) -> None:
        """Send the response by `send`."""
        await self._start(status, length, headers)
        sent = 0
        async for piece in pieces:
            sent += len(piece)
            await self.send({"type": "http.response.body", "body": piece, "more_body": sent < length})
        if not sent and (not length or self.method == "HEAD"):
            await self.send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, length: int, headers: Headers) -> None:
        headers = [*headers, (b"content-length", str(length).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def send(self, message: Message) -> Awaitable[None]:
        """Send an ASGI message with the headers that every response has; a large body is sent in chunks."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._response_headers(self)]
        elif len(message.get("body", b"")) > CHUNK:
            return self._send_in_chunks(message)
        return self._send(message)

    async def _send_in_chunks(self, message: Message) -> None:
        """Send a body in chunks, each once the client has read most of the one before.

        The transport would otherwise copy, or encrypt, the whole body for each client that does not read.
        """
        body, more = message["body"], message.get("more_body", False)
        for end in range(CHUNK, len(body) + CHUNK, CHUNK):
            chunk = body[end - CHUNK : end]
            if end >= len(body) and not more:
                self.release_memory()
            await self._send({**message, "body": chunk, "more_body": more or end < len(body)})
            await asyncio.sleep(0)  # serve other connections in between, also if this client reads fast


class DisconnectWatch:
    """Cancels a call when its client closes the connection, or when its timeout passes.

    The task that waits for the disconnect starts only after a delay: most calls are answered before. A task, or a
    timer, for each of them would take a considerable part of the time of a call, so all calls share one timer.

    Attributes:
        reason: makes the exception of a cancelled call; the exception itself would refer to the watch.
    """

    DELAY = 0.02  # s

    def __init__(self, context: AsgiContext, future: "asyncio.Future[Any]", time_limit: float) -> None:
        """Watch until `stop`; `time_limit` is that of the future, s."""
        self._context = context
        self._future: asyncio.Future[Any] | None = future
        self._task: asyncio.Task[None] | None = None
        loop = future.get_loop()  # without a system call, unlike asyncio.get_running_loop
        self._timeout_timer = None if time_limit == inf else loop.call_later(time_limit, self._expire)
        self.reason: Callable[[], Exception] | None = None
        self._watched = _watched_by_loop.setdefault(loop, {})
        if loop not in _armed:
            _armed.add(loop)
            loop.call_later(self.DELAY, _start_watching, loop, self._watched)
        self._watched[self] = loop.time()

    def stop(self) -> None:
        """End the watch."""
        self._watched.pop(self, None)
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._task = self._future = None  # the task refers to this, and the future's exception to the call's samples

    def start(self) -> None:
        """Start the task that waits for the disconnect."""
        self._task = asyncio.ensure_future(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        await self._context.wait_for_disconnect()
        self._cancel(ClientDisconnectedError)

    def _expire(self) -> None:
        self._cancel(self._context.expired_error)

    def _cancel(self, reason: Callable[[], Exception]) -> None:
        if self._future is not None and self._future.cancel():
            self.reason = reason


_armed: "WeakSet[asyncio.AbstractEventLoop]" = WeakSet()  # whose timer is set
_watched_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[DisconnectWatch, float]]" = WeakKeyDictionary()


def _start_watching(loop: asyncio.AbstractEventLoop, watched: dict[DisconnectWatch, float]) -> None:
    """Start the tasks of the calls that have waited long enough; `watched` has the start of each, s, in order."""
    due = loop.time() - DisconnectWatch.DELAY
    for watch, since in [*watched.items()]:
        if since > due:
            break
        del watched[watch]
        watch.start()
    if watched:
        loop.call_later(DisconnectWatch.DELAY, _start_watching, loop, watched)
    else:
        _armed.discard(loop)


def below_root(scope: Scope) -> Scope:
    """Return the scope with the ASGI `root_path`, the prefix of a proxy or a mounting app, removed from the path.

    The prefix is kept as `app_root_path`, which Starlette uses to build the server's own URLs.
    """
    root, path = scope.get("root_path", ""), scope["path"]
    if not root:
        return scope
    inside = path == root or path.startswith(f"{root.rstrip('/')}/")
    below = path[len(root.rstrip("/")) :] or "/" if inside else path
    return {**scope, "path": below, "root_path": "", "app_root_path": root}


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the request's headers by lower-case name; of repeated headers the last one."""
    return dict(scope["headers"])


def is_form(content_type: str) -> bool:
    """Whether a Content-Type is that of a multipart form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def body_length(headers: Mapping[bytes, bytes], limit: BodyLimit) -> int | None:
    """Return the length of a request's body by Content-Length; None without a valid one.

    Raises:
        TooLargeError: it is over the limit.
    """
    sent = headers.get(b"content-length", b"")
    if not sent.isdigit():
        return None
    length = int(sent)
    if length > limit.max_bytes:
        raise TooLargeError(f"the body has {length} bytes, the limit is {limit.max_bytes}; {limit.remedy}")
    return length


async def receive_body(
    headers: Mapping[bytes, bytes], receive: Receive, limit: BodyLimit, reserve: Callable[[int], None]
) -> bytes:
    """Receive a body by ASGI; arguments and errors as of `RequestContext.read_body`.

    `reserve` is called before reading with the bytes that the connection may buffer.
    """
    length = body_length(headers, limit)
    reserve(_READ_AHEAD if length is None else min(length, _READ_AHEAD))
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        reserve(size)
        if size > limit.max_bytes:
            raise TooLargeError(f"the body is over {limit.max_bytes} bytes; {limit.remedy}")
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def client_timeout(headers: Mapping[bytes, bytes]) -> float:
    """Return the client's timeout from X-Timeout-Ms, s; inf if there is none.

    Raises:
        BadInputError: it is not a positive, finite number.
    """
    sent = headers.get(b"x-timeout-ms")
    if sent is None:
        return inf
    text = sent.decode("latin-1")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise BadInputError(f"X-Timeout-Ms is {text[:20]!r}; send the milliseconds that the client will wait, above 0")
    return value / 1e3
