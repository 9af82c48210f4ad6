"""One request, without FastAPI: its context, its body, its timeout and its response."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from server.errors import BadInputError, ExpiredError, ServerError, TooLargeError, render_error
from server.transport.memory_budget import Reservation

if TYPE_CHECKING:
    from server.telemetry.tracing import RequestSpan

_T = TypeVar("_T")
Headers = list[tuple[bytes, bytes]]
Body = bytes | memoryview
JSON_CONTENT = (b"content-type", b"application/json")
Handler = Callable[["RequestContext"], Awaitable[None]]


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
        path: without escapes.
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
        steps: of a pipeline: what each of its requests took.
        priority: `parameters.priority` of the protocol; 0 without one.
        least_level: the first priority level that its key may have.
        level: its priority level; 1 is the first.
    """

    __slots__ = (
        *("answered", "began", "device", "headers", "key", "memory", "method", "path", "queued"),
        *("received", "request_id", "samples", "service", "span", "status", "steps", "timeout", "waiting"),
        *("least_level", "level", "priority"),
        *("_awaited", "_disconnected", "_reason"),
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
        self.steps: list[dict[str, Any]] = []
        self.priority = 0
        self.least_level = self.level = 1
        self._awaited: asyncio.Future[Any] | None = None
        self._reason: Callable[[], Exception] | None = None  # not the exception, which would refer to the call
        self._disconnected = False

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

    def disconnect(self) -> None:
        """Cancel the call, since its client has disconnected."""
        self._disconnected = True
        self._cancel(ClientDisconnectedError)

    async def wait_for(self, future: "asyncio.Future[_T]", time_limit: float = inf) -> _T:
        """Wait for a future, which is cancelled when the client disconnects, or after `time_limit`, s.

        Raises:
            ClientDisconnectedError: the client closed the connection.
            ExpiredError: the timeout has passed.
        """
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

    @abstractmethod
    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole response with these headers, Content-Length, and those that every response has."""

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


def is_form(content_type: str) -> bool:
    """Whether a Content-Type is that of a multipart form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def check_length(length: int, limit: BodyLimit) -> None:
    """Check the length of a body by Content-Length.

    Raises:
        TooLargeError: it is over the limit.
    """
    if length > limit.max_bytes:
        raise TooLargeError(f"the body has {length} bytes, the limit is {limit.max_bytes}; {limit.remedy}")


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
