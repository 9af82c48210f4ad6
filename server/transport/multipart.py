"""Multipart forms: the content of one field, found with bytes.find in a body that is in memory already."""

from email.message import Message

from server.errors import BadInputError, TooLargeError

_MAX_PARTS = 8
_MAX_HEADERS = 4096  # bytes of a part's headers
_MAX_BOUNDARY = 70  # bytes, by RFC 2046
_WINDOW = 2**20  # bytes searched at a time, since bytes.find holds the GIL


def is_form(content_type: str) -> bool:
    """Whether a Content-Type is that of a multipart form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def field_of(body: bytes, content_type: str, name: str) -> bytes:
    """The content of the form's first field with this name.

    Raises:
        BadInputError: the form is malformed, or has no such field.
        TooLargeError: the form has too many parts.
    """
    delimiter = b"--" + _boundary(content_type)
    at = _start(body, delimiter)
    for _ in range(_MAX_PARTS):
        if body[at : at + 2] == b"--":
            raise BadInputError(
                f"the form has no file `{name}`; send the picture as -F {name}=@photo.jpg, or as the body"
            )
        headers, start = _headers(body, at)
        end = _find(body, b"\r\n" + delimiter, start - 2)  # in an empty part the CRLF that ends the headers begins it
        if end < 0:
            raise BadInputError("the form ends within a part; send all of it, with its last boundary")
        if _name(headers) == name:
            return body[start:end]
        at = end + 2 + len(delimiter)
    raise TooLargeError(f"the form has over {_MAX_PARTS} parts; send the file `{name}` alone")


def _boundary(content_type: str) -> bytes:
    boundary = _parameter(content_type[: 2 * _MAX_HEADERS], "boundary")
    if not boundary or len(boundary) > _MAX_BOUNDARY or not boundary.isascii():
        raise BadInputError(
            f"the form's Content-Type has no boundary of 1 to {_MAX_BOUNDARY} ASCII characters; add boundary=..."
        )
    return boundary.encode()


def _start(body: bytes, delimiter: bytes) -> int:
    """Position after the first delimiter; the preamble before it is ignored."""
    if body.startswith(delimiter):
        return len(delimiter)
    at = _find(body, b"\r\n" + delimiter, 0)
    if at < 0:
        raise BadInputError("the boundary of the Content-Type is not in the body; send the form with its own boundary")
    return at + 2 + len(delimiter)


def _headers(body: bytes, at: int) -> tuple[str, int]:
    """The headers of the part whose delimiter ends at `at`, and the position of its content."""
    line = body.find(b"\r\n", at, at + _MAX_HEADERS)
    if line < 0 or body[at:line].strip(b" \t"):
        raise BadInputError("a boundary of the form is not followed by a line end; send CRLF after it")
    blank = body.find(b"\r\n\r\n", line, line + _MAX_HEADERS)
    if blank < 0:
        raise BadInputError(f"the headers of a form part do not end within {_MAX_HEADERS} bytes; send fewer of them")
    return body[line + 2 : blank].decode("utf-8", "replace"), blank + 4


def _name(headers: str) -> str | None:
    for line in headers.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            return _parameter(value, "name")
    return None


def _parameter(value: str, name: str) -> str | None:
    message = Message()
    message["Content-Type"] = " ".join(value.splitlines())
    found = message.get_param(name)
    return found if isinstance(found, str) else None  # a tuple is an RFC 2231 value, not allowed in forms (RFC 7578)


def _find(body: bytes, pattern: bytes, start: int) -> int:
    """bytes.find in windows, so that other threads run in between."""
    for at in range(start, len(body), _WINDOW):
        found = body.find(pattern, at, at + _WINDOW + len(pattern) - 1)
        if found >= 0:
            return found
    return -1
