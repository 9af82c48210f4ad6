"""Errors of requests, each with its HTTP status, and errors of devices.

ServerError
├── BadInputError       400  the client's bytes cannot be used
├── NotFoundError       404  no such model, route or version
├── TooLargeError       413  the body is over the limit
├── UnauthorizedError   401  no key, or one that is not known
├── ForbiddenError      403  the key, or the page that calls, may not do this
├── TooManyError        429  the key's rate is used up; Retry-After says when to come again
├── UnsupportedError    415  an encoding or media type that is not spoken here
├── QueueFullError      503  no room to wait; Retry-After says when to come again
├── TooLateError        503  the answer would come after the client's time-out; refused at once
├── DrainingError       503  the server is stopping
├── UnavailableError    503  the device is lost, the server is about to end
├── ExpiredError        504  the client's time-out passed before the answer
└── ExecutionError      500  the device failed

OutOfMemoryError, NotFiniteError and DeviceLostError are raised by devices.
"""

import reprlib
from typing import Any, ClassVar

import orjson


class ServerError(Exception):
    """A request that gets an answer other than 200. The message is one line and is shown to the client.

    Attributes:
        status: of the answer.
        outcome: as the metrics name it.
        retry_after: s, sent as Retry-After; None sends none.
    """

    status: ClassVar[int] = 500
    outcome: ClassVar[str] = "failed"
    retry_after: int | None = None


class BadInputError(ServerError):
    """The client's bytes cannot be used; the message names the value, the bound and the remedy."""

    status = 400
    outcome = "bad_input"


class NotFoundError(BadInputError):
    """There is no such model, version or route."""

    status = 404


class TooLargeError(BadInputError):
    """The body, or what it decompresses to, is over the limit."""

    status = 413


class UnsupportedError(BadInputError):
    """A content encoding or media type that is not spoken here."""

    status = 415


class UnauthorizedError(ServerError):
    """No key, or one that is not known."""

    status = 401


class ForbiddenError(ServerError):
    """The key, or the page that calls, may not do this."""

    status = 403


class TooManyError(ServerError):
    """The key's rate is used up."""

    status = 429

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(ServerError):
    """Admitting the call would exceed the queue's capacity.

    Attributes:
        reason: why, as the metrics name it.
    """

    status = 503
    outcome = "rejected"
    reason: ClassVar[str] = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLateError(QueueFullError):
    """The answer would come after the client's time-out: it is better refused at once than late."""

    reason = "too_late"


class DrainingError(QueueFullError):
    """The server finishes what it accepted and takes nothing new."""

    reason = "draining"


class UnavailableError(ServerError):
    """The device is lost: whoever was accepted is told, and the server ends."""

    status = 503

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ExpiredError(ServerError):
    """The client's time-out passed before its answer; if it still waited, it is never run."""

    status = 504
    outcome = "expired"


class ExecutionError(ServerError):
    """The device failed while running the batch."""


class OutOfMemoryError(Exception):
    """The batch does not fit the device's memory; a smaller batch may."""


class NotFiniteError(Exception):
    """An output is not finite; the samples of the batch are retried separately."""


class DeviceLostError(Exception):
    """The device cannot run anything any more; the process has to be restarted."""


def render_error(message: str) -> bytes:
    """Return the JSON body of an answer other than 200."""
    # Part of a message may come from a URL, and JSON cannot hold the lone surrogates of a badly decoded one.
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


def quote(value: Any) -> str:
    """Quote a value from a client on one short line."""
    return reprlib.repr(value)[:120]  # reprlib bounds the work, but not the length when lists are nested
