"""One request on bare ASGI, without FastAPI: its context, its body, its timeout and its response."""

from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Receive, Scope, Send

from server.errors import BadInputError, ExpiredError, ServerError, TooLargeError, render_error
from server.transport.memory_budget import Reservation

if TYPE_CHECKING:
    from server.telemetry.tracing import RequestSpan

Headers = list[tuple[bytes, bytes]]
_READ_AHEAD = 2**19  # bytes of a body that the connection may buffer: `_BODY_BUFFER` and one read of the socket


class ClientDisconnectedError(Exception):
    """The client closed the connection; no response can be sent."""


class BodyLimit(NamedTuple):
    """Largest size of a body in bytes, and what to do about a larger one, for the error message."""

    max_bytes: int
    remedy: str


class RequestContext:
    """What belongs to one request from its first byte to its response.

    Attributes:
        request_id: its id in logs and responses.
        headers: request headers by lower-case name.
        receive: ASGI receive.
        began: arrival of the first byte, s of time.monotonic.
        key: name of its API key; None without one.
        span: its tracing span; None where it is not traced.
        status: status of the response; 0 before it starts.
        memory: reservation in the memory budget; only inference calls have one.
        timeout: the client's timeout, s from `began`; inf without one.
        samples: number of samples of an inference call; 1 until it is known.
        received: instant at which the whole body was read, s of time.monotonic; inf before.
        queued: instant at which the samples were queued, s of time.monotonic; inf before.
        waiting: longest waiting time of the samples, s.
        service: longest service time of their batches, s.
        device: name of the device that served the samples.
    """

    __slots__ = (
        *("began", "device", "headers", "key", "memory", "queued", "receive", "received", "request_id", "samples"),
        *("service", "span", "status", "timeout", "waiting"),
    )

    memory: Reservation

    def __init__(self, scope: Scope, receive: Receive, request_id: str = "") -> None:
        """The request began at its first byte if the connection recorded that, else now."""
        self.request_id = request_id
        self.headers = headers_of(scope)
        self.receive = receive
        self.began: float = scope["state"].get("began") or monotonic()
        self.key: str | None = None
        self.span: RequestSpan | None = None
        self.status = 0
        self.timeout = inf
        self.samples = 1
        self.received = self.queued = inf
        self.waiting = self.service = 0.0
        self.device = ""

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


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, limit: BodyLimit, reserve: Callable[[int], None]
) -> bytes:
    """Read the whole request body.

    Args:
        headers: the request's headers.
        receive: ASGI receive of the request.
        limit: limit on the body.
        reserve: called with the total number of bytes to reserve memory for: before reading with those that the
            connection may buffer, then with those read. An exception that it raises is passed on.

    Raises:
        TooLargeError: the body is over the limit; raised before reading if Content-Length exceeds it.
        ClientDisconnectedError: the client disconnected before the end of the body.
    """
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit.max_bytes:
        raise TooLargeError(f"the body has {int(length)} bytes, the limit is {limit.max_bytes}; {limit.remedy}")
    reserve(min(int(length), _READ_AHEAD) if length.isdigit() else _READ_AHEAD)
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


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has closed the connection; call it only after the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
    """Send a whole response with status 200."""
    await _send(send, 200, body, [(b"content-type", content_type), *(headers or [])])


async def respond_error(send: Send, error: ServerError, headers: Headers | None = None) -> None:
    """Send an error as {"error": ...} with its status, and with Retry-After if it has one."""
    headers = [(b"content-type", b"application/json"), *(headers or [])]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await _send(send, error.status, render_error(str(error)), headers)


async def _send(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


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
