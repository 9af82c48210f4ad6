"""The few things about HTTP that the hot routes need, on bare ASGI: no middleware, no model validation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic

from starlette.types import Receive, Scope, Send

from server.api.open_inference.protocol import render_error
from server.errors import BadInputError, ExpiredError, ServerError, TooLargeError

Headers = list[tuple[bytes, bytes]]
_UNSEEN = 2**19  # bytes of a body that the connection may hold before any of them is seen here
_REMEDY = "send fewer samples per call"


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


@dataclass(slots=True)
class Caller:
    """Who waits for the answer to one call.

    Attributes:
        receive: of the connection.
        began: when the call began, s of time.monotonic.
        timeout: the client's, s from the beginning; inf where it has none.
        samples: how many the call brings, as far as is known.
        asked: when its samples were put into the queue, s of time.monotonic.
        waiting: the longest waiting time of its samples, s.
        service: the longest service time of their batches, s.
        device: the device that served it.
    """

    receive: Receive
    began: float
    timeout: float = inf
    samples: int = 1
    asked: float = inf
    waiting: float = 0.0
    service: float = 0.0
    device: str = ""

    def left(self) -> float:
        """What is left of the time-out, s.

        Raises:
            ExpiredError: nothing.
        """
        if self.timeout == inf:
            return inf
        left = self.began + self.timeout - monotonic()
        if left <= 0.0:
            raise self.expired()
        return left

    def expired(self) -> ExpiredError:
        """What to tell it when the time-out passes before the call is in the queue."""
        return ExpiredError(f"the time-out of {1e3 * self.timeout:g} ms passed before the input was read and decoded")


def caller_of(scope: Scope, receive: Receive) -> Caller:
    """Who waits; its call began with the first byte, where the connection tells when that was."""
    return Caller(receive, scope["state"].get("began", monotonic()))


def below_root(scope: Scope) -> Scope:
    """The scope as it would be without the ASGI `root_path`, below which a proxy or another app mounts this one.

    The prefix is kept as `app_root_path`, from which Starlette makes the server's own URLs.
    """
    root, path = scope.get("root_path", ""), scope["path"]
    if not root:
        return scope
    inside = path == root or path.startswith(f"{root.rstrip('/')}/")
    below = path[len(root.rstrip("/")) :] or "/" if inside else path
    return {**scope, "path": below, "root_path": "", "app_root_path": root}


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The request's headers by lower-case name; the last of equal ones counts."""
    return dict(scope["headers"])


async def read_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    max_bytes: int,
    hold: Callable[[int], None],
    remedy: str = _REMEDY,
) -> bytes:
    """Read the whole request body.

    Args:
        headers: of the request.
        receive: of the connection.
        max_bytes: the largest body.
        hold: reserves memory; given the number of bytes that there may be so far, first of all of those that the
            connection reads ahead. What it raises ends the reading.
        remedy: what a client should do whose body is too large.

    Raises:
        TooLargeError: it is over `max_bytes`; said before reading where the client announces the length.
        ClientGoneError: the client left in the middle.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise TooLargeError(f"the body has {int(announced)} bytes, the limit is {max_bytes}; {remedy}")
    hold(min(int(announced), _UNSEEN) if announced.isdigit() else _UNSEEN)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        hold(size)
        if size > max_bytes:
            raise TooLargeError(f"the body is over {max_bytes} bytes; {remedy}")
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection; await only after the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
    """Send a whole answer with status 200."""
    await _send(send, 200, body, [(b"content-type", content_type), *(headers or [])])


async def respond_error(send: Send, error: ServerError, headers: Headers | None = None) -> None:
    """Send an error as {"error": ...} with its status, and Retry-After where it has one."""
    headers = [(b"content-type", b"application/json"), *(headers or [])]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await _send(send, error.status, render_error(str(error)), headers)


async def _send(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def client_timeout(headers: Mapping[bytes, bytes]) -> float:
    """The client's time-out by its X-Timeout-Ms, s; inf where it has none.

    Raises:
        BadInputError: it is not a positive, finite number.
    """
    text = headers.get(b"x-timeout-ms")
    return inf if text is None else milliseconds(text.decode("latin-1")) or inf


def milliseconds(text: str | None) -> float | None:
    """X-Timeout-Ms in s; None when absent.

    Raises:
        BadInputError: it is not a positive, finite number.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise BadInputError(f"X-Timeout-Ms is {text[:20]!r}; send the milliseconds that the client will wait, above 0")
    return value / 1e3
