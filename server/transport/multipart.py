"""Multipart forms: the one field that matters, found at the speed of bytes.find.

Pure, and run off the event loop. Nothing is spooled to a file: the body is in memory already.
"""

from email.message import Message

from server.errors import BadInputError, TooLargeError

_MAX_PARTS = 8
_MAX_HEAD = 4096  # bytes of a part's headers
_MAX_BOUNDARY = 70  # bytes, by RFC 2046
_WINDOW = 2**20  # bytes searched at a time: a search keeps the interpreter from all other threads


def is_form(content_type: str) -> bool:
    """Whether a Content-Type announces a multipart form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def field_of(body: bytes, content_type: str, name: str) -> bytes:
    """The content of the form's first field of that name.

    Raises:
        BadInputError: the form cannot be read, or has no such field.
        TooLargeError: it has too many parts.
    """
    delimiter = b"--" + _boundary(content_type)
    at = _start(body, delimiter)
    for _ in range(_MAX_PARTS):
        if body[at : at + 2] == b"--":
            raise BadInputError(
                f"the form has no file `{name}`; send the picture as -F {name}=@photo.jpg, or as the body"
            )
        head, begin = _head(body, at)
        end = _find(body, b"\r\n" + delimiter, begin - 2)  # an empty part's own line end begins the delimiter
        if end < 0:
            raise BadInputError("the form ends in the middle of a part; send all of it, with its last boundary")
        if _name(head) == name:
            return body[begin:end]
        at = end + 2 + len(delimiter)
    raise TooLargeError(f"the form has over {_MAX_PARTS} parts; send the file `{name}` alone")


def _boundary(content_type: str) -> bytes:
    boundary = _parameter(content_type[: 2 * _MAX_HEAD], "boundary")
    if not boundary or len(boundary) > _MAX_BOUNDARY or not boundary.isascii():
        raise BadInputError(f"the form's Content-Type names no boundary of 1 to {_MAX_BOUNDARY} ASCII characters")
    return boundary.encode()


def _start(body: bytes, delimiter: bytes) -> int:
    """Where the first delimiter ends; what is before it is nothing."""
    if body.startswith(delimiter):
        return len(delimiter)
    at = _find(body, b"\r\n" + delimiter, 0)
    if at < 0:
        raise BadInputError("the body does not hold the boundary that its Content-Type names")
    return at + 2 + len(delimiter)


def _head(body: bytes, at: int) -> tuple[str, int]:
    """The headers of the part whose delimiter ends at `at`, and where its content begins."""
    line = body.find(b"\r\n", at, at + _MAX_HEAD)
    if line < 0 or body[at:line].strip(b" \t"):
        raise BadInputError("a boundary in the form is not at the end of its line")
    blank = body.find(b"\r\n\r\n", line, line + _MAX_HEAD)
    if blank < 0:
        raise BadInputError(f"a part of the form has no end of its headers within {_MAX_HEAD} bytes")
    return body[line + 2 : blank].decode("utf-8", "replace"), blank + 4


def _name(head: str) -> str | None:
    for line in head.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            return _parameter(value, "name")
    return None


def _parameter(value: str, name: str) -> str | None:
    message = Message()
    message["Content-Type"] = " ".join(value.splitlines())
    found = message.get_param(name)
    return found if isinstance(found, str) else None  # a tuple is RFC 2231's, which forms must not use


def _find(body: bytes, sought: bytes, start: int) -> int:
    """bytes.find in windows, between which other threads may run."""
    for at in range(start, len(body), _WINDOW):
        found = body.find(sought, at, at + _WINDOW + len(sought) - 1)
        if found >= 0:
            return found
    return -1
