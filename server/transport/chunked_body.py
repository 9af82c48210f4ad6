"""Chunked bodies (RFC 9112, section 7.1): their parts, their end, and what follows it.

httptools tells of a chunked body neither its end in the data nor the sizes of its chunks, so that it can only be given
the data up to each empty line, of which a body can consist.
"""

import re
from collections.abc import Callable

_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_EXTENSION = rb";" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|\"[^\x00-\x08\x0a-\x1f\x7f\"\\]*\"))?"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:" + _EXTENSION + rb")*\r\n")
_TRAILER = re.compile(_TOKEN + rb":" + _TEXT + rb"\r\n")


class ChunkedBodyError(Exception):
    """The bytes are no chunked body."""


class ChunkedBody:
    """Decodes a chunked body, however its bytes arrive.

    Attributes:
        is_whole: whether it has ended.
        other_bytes: bytes of sizes, extensions, line ends and trailers until now.
    """

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        """`on_body` is called with each part of the body."""
        self.is_whole = False
        self.other_bytes = 0
        self._on_body = on_body
        self._left = 0  # bytes of the chunk that have not arrived
        self._line = b""  # its beginning
        self._take: Callable[[bytes], None] = self._take_size

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes; return those after the end of the body.

        Raises:
            ChunkedBodyError: the bytes are no chunked body.
        """
        start = 0
        while start < len(data) and not self.is_whole:
            if self._left:
                part = data[start : start + self._left]
                self._left -= len(part)
                start += len(part)
                self._on_body(part)
                continue
            found = data.find(b"\n", start)
            end = len(data) if found < 0 else found + 1
            self._line += data[start:end]
            self.other_bytes += end - start
            start = end
            if found >= 0:
                line, self._line = self._line, b""
                self._take(line)
        return data[start:]

    def _take_size(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise ChunkedBodyError(f"invalid chunk size {line[:20]!r}")
        self._left = int(match[1], 16)
        self._take = self._take_end if self._left else self._take_trailer

    def _take_end(self, line: bytes) -> None:
        if line != b"\r\n":
            raise ChunkedBodyError("a chunk is longer than its size")
        self._take = self._take_size

    def _take_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.is_whole = True
        elif _TRAILER.fullmatch(line) is None:
            raise ChunkedBodyError(f"invalid trailer {line[:20]!r}")
