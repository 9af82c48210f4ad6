"""What can go wrong with a request, each with its HTTP status: one small tree.

ServerError
├── BadInputError       400  the client's bytes cannot be used
├── NotFoundError       404  no such model, route or version
├── TooLargeError       413  the body is over the limit
├── UnsupportedError    415  an encoding or media type that is not spoken here
├── QueueFullError      503  no room to wait; Retry-After says when to come again
├── DrainingError       503  the server is stopping
├── ExpiredError        504  the client's time-out passed before the answer
└── ExecutionError      500  the device failed
"""

from typing import ClassVar


class ServerError(Exception):
    """A request that gets an answer other than 200. The message is one line and is shown to the client."""

    status: ClassVar[int] = 500
    outcome: ClassVar[str] = "failed"
    retry_after: int | None = None  # seconds, sent as Retry-After


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


class QueueFullError(ServerError):
    """Admitting the call would exceed the queue's capacity."""

    status = 503
    outcome = "rejected"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(QueueFullError):
    """The server finishes what it accepted and takes nothing new."""


class ExpiredError(ServerError):
    """The client's time-out passed before its answer; if it still waited, it is never run."""

    status = 504
    outcome = "expired"


class ExecutionError(ServerError):
    """The device failed while running the batch."""
