"""Multipart forms: the content of one field, by python-multipart."""

import logging
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import BadInputError, TooLargeError

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs a warning for each malformed form
_MAX_PARTS = 8
_MAX_CONTENT_TYPE = 8192  # characters
_MAX_BOUNDARY = 70  # bytes, by RFC 2046
_WINDOW = 2**20  # bytes parsed at a time, since parsing holds the GIL


def field_of(body: bytes, content_type: str, name: str) -> bytes:
    """The content of the form's first field with this name.

    Raises:
        BadInputError: the form is malformed, or has no such field.
        TooLargeError: the form has too many parts.
    """
    boundary = parse_options_header(content_type[:_MAX_CONTENT_TYPE].encode("latin-1", "replace"))[1].get(
        b"boundary", b""
    )
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise BadInputError(
            f"the form's Content-Type has no boundary of 1 to {_MAX_BOUNDARY} ASCII characters; add boundary=..."
        )
    start = 0 if body.startswith(b"--" + boundary) else body.find(b"\r\n--" + boundary)  # after a preamble
    if start < 0:
        raise BadInputError("the boundary of the Content-Type is not in the body; send the form with its own boundary")
    field = _Field(name)
    parser = MultipartParser(boundary, field.callbacks())
    try:
        for at in range(start + 2 * (start > 0), len(body), _WINDOW):
            parser.write(body[at : at + _WINDOW])
            if field.complete:
                return b"".join(field.content)
    except MultipartParseError as error:
        raise BadInputError(f"the form is malformed ({error}); send it as curl -F does") from error
    if field.ended:
        raise BadInputError(f"the form has no file `{name}`; send the image as -F {name}=@photo.jpg, or as the body")
    raise BadInputError("the form ends within a part; send all of it, with its last boundary")


class _Field:
    """Collects the first field of a name from a parser's callbacks.

    Attributes:
        content: pieces of the field's content.
        complete: whether all of it was parsed.
        ended: whether the form's last boundary was parsed.
    """

    def __init__(self, name: str) -> None:
        self.content: list[bytes] = []
        self.complete = self.ended = False
        self._name = name.encode()
        self._parts = 0
        self._header, self._value = b"", b""
        self._wanted = False

    def callbacks(self) -> Any:
        """Return the callbacks for `MultipartParser`."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_part_data": self._on_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS and not self.complete:
            raise TooLargeError(f"the form has over {_MAX_PARTS} parts; send the file `{self._name.decode()}` alone")

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._wanted = not self.complete and parse_options_header(self._value)[1].get(b"name") == self._name
        self._header, self._value = b"", b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._wanted:
            self.content.append(data[start:end])

    def _end_part(self) -> None:
        self.complete |= self._wanted
        self._wanted = False

    def _end(self) -> None:
        self.ended = True
