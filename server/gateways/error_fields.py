"""Errors of requests as fields that another process can make the same error of."""

from server import errors
from server.errors import INTERNAL_ERROR, RetryLaterError, ServerError

ErrorFields = tuple[str, str, int | None]  # name of the class in server.errors, message, Retry-After in s


def error_fields(error: ServerError) -> ErrorFields:
    """The fields of an error whose class is in server.errors."""
    return type(error).__name__, str(error), error.retry_after


def make_error(fields: ErrorFields) -> ServerError:
    """Make the error of these fields again."""
    name, message, retry_after = fields
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, ServerError):
        return ServerError(INTERNAL_ERROR)
    return kind(message) if retry_after is None or not issubclass(kind, RetryLaterError) else kind(message, retry_after)
