"""Errors of requests, each with the HTTP status of its response, and errors of devices."""

import reprlib
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import orjson

INTERNAL_ERROR = "internal error; the server's log has the details"


class ServerError(Exception):
    """Error of a request; its message is one line and is sent to the client.

    Attributes:
        status: HTTP status of the response.
        outcome: outcome of the request in the metrics.
        retry_after: Retry-After of the response, s; None without one.
    """

    status: int = 500
    outcome: str = "failed"
    retry_after: int | None = None

    @classmethod
    def kinds(cls) -> Iterator[type[Self]]:
        """This class and all that derive from it."""
        yield cls
        for each in cls.__subclasses__():
            yield from each.kinds()


class BadInputError(ServerError):
    """The request is malformed; the message has the value, the limit and what to send instead."""

    status = 400
    outcome = "bad_input"


class NotFoundError(BadInputError):
    """There is no such model, version or route."""

    status = 404


class TooLargeError(BadInputError):
    """The body, or the decompressed body, is over the limit."""

    status = 413


class UnsupportedError(BadInputError):
    """The content encoding or media type is not supported."""

    status = 415


class UnauthorizedError(ServerError):
    """The API key is missing or unknown."""

    status = 401


class ForbiddenError(ServerError):
    """The scope of the API key, or the origin of the request, does not permit this route."""

    status = 403


class RetryLaterError(ServerError):
    """The client may send the request again after `retry_after`, s."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyError(RetryLaterError):
    """The rate limit of the API key is exceeded."""

    status = 429


class UnavailableError(RetryLaterError):
    """The device is lost, or unavailable for now, and no other device takes the request over."""

    status = 503


class RejectedError(RetryLaterError):
    """Admission control rejects the request.

    Attributes:
        reason: reason of the rejection in the metrics.
    """

    status = 503
    outcome = "rejected"
    reason: ClassVar[str] = ""


class QueueFullError(RejectedError):
    """The requests of the call would exceed the capacity of the queue."""

    reason = "queue_full"


class TooManyShapesError(RejectedError):
    """Requests of too many different shapes would wait at once."""

    reason = "shapes"


class TooLateError(RejectedError):
    """The response is expected after the client's timeout."""

    reason = "too_late"


class DrainingError(RejectedError):
    """The server is shutting down: it serves the accepted calls and rejects new ones."""

    reason = "draining"


class UnloadedError(RejectedError):
    """The model is unloaded until it is loaded again."""

    reason = "unloaded"


class ExpiredError(ServerError):
    """The client's timeout passed before the response; a request that was still queued is not run."""

    status = 504
    outcome = "expired"


class ExecutionError(ServerError):
    """The device failed on the request."""


class ModelError(ServerError):
    """The code of a user's model failed, or returned what the model's signature does not allow."""


class OutputError(ModelError):
    """The outputs of a user's model do not fit its signature, whatever its inputs are."""


class RowsError(OutputError):
    """The first dimension of an output is not the number of samples."""


class OutOfMemoryError(Exception):
    """The batch does not fit the device's memory; a smaller batch may."""


class NotFiniteError(Exception):
    """An output is not finite; the samples of the batch are retried separately."""


class DeviceLostError(Exception):
    """The device cannot run anything any more, unless its models can be loaded again."""


class DeviceUnavailableError(Exception):
    """The device cannot run anything for now, such as another server that is down; it may recover by itself."""


class BatchTimeoutError(DeviceLostError):
    """A batch did not end within the batch timeout."""


class WorkerDiedError(DeviceLostError):
    """The process of a model has ended; it may be started again."""


def render_error(message: str) -> bytes:
    """Return the JSON body of an error response."""
    # a message may quote a badly decoded URL, whose lone surrogates JSON cannot represent
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


def quote(value: Any) -> str:
    """Quote a value from a client on one short line."""
    return reprlib.repr(value)[:120]  # reprlib bounds the work, but not the length when lists are nested


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one short line, or its type if it has none, or its `__str__` fails."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (a user's exception)
        text = ""
    return " ".join(text.split())[:160] or type(error).__name__
