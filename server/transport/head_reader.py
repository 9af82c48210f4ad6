"""The heads of the requests of a connection, within limits on their size."""

from time import monotonic
from typing import NoReturn

import httptools

from server.transport.connection_limits import ConnectionLimits
from server.transport.http_call import RequestHead

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
_LONGEST_REPEATED = 2**11  # bytes of a head that is kept, as the next request may have the same
_NO_HEAD = b"\0"  # no request begins with it


class HeadError(Exception):
    """A head that is refused.

    Attributes:
        status: of the response.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HeadReader:
    """Parses the head of one request after another by httptools.

    Only the head is parsed, so that an upgrade to another protocol is ignored, as HTTP allows. A head that repeats the
    last one, both in one piece, is not parsed again.

    Attributes:
        began: instant of the first byte of the request, s of time.monotonic; 0 before that.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        """Start before the first request; `limits` has those of a head."""
        self._limits = limits
        self.began = 0.0
        self._parser: httptools.HttpRequestParser | None = None  # None between requests
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead | None = None  # the last one; None until all of it was parsed
        self._raw = _NO_HEAD  # its bytes if they arrived at once
        self._parsed = 0  # bytes
        self._error: HeadError | None = None

    def feed(self, data: bytes) -> tuple[RequestHead | None, bytes]:
        """Parse the next bytes.

        Returns:
            The head once it is whole, and the bytes that follow it.

        Raises:
            HeadError: it is malformed, or over a limit.
        """
        begins = self._parser is None
        if begins and self._head is not None and data.startswith(self._raw):
            self.began = monotonic()
            return self._head, data[len(self._raw) :]
        if begins:
            self._parser = httptools.HttpRequestParser(self)
            self._head, self._headers, self._url, self._parsed, self.began = None, [], b"", 0, 0.0
        following = self._parse(data)
        if self._head is None:
            if self._parsed > self._limits.header_bytes:
                raise self._too_large()
            return None, b""
        size = len(data) - len(following)
        self._raw = data[:size] if begins and size <= _LONGEST_REPEATED else _NO_HEAD
        return self._head, following

    def end(self) -> None:
        """Forget the request, but for its head if the next one may repeat it."""
        self._parser, self.began, self._headers = None, 0.0, []
        if self._raw is _NO_HEAD:
            self._head = None

    def _parse(self, data: bytes) -> bytes:
        """Parse data up to the end of a head; return the rest.

        The parser is given the data up to each empty line, which may begin in the last read.
        """
        assert self._parser is not None
        start, begins = 0, not self._parsed
        try:
            while start < len(data) and self._head is None:
                if start < 3 and not begins:
                    end = start + 1
                else:
                    found = data.find(b"\r\n\r\n", max(start - 3, 0))
                    end = len(data) if found < 0 else found + 4
                self._parsed += end - start
                piece, start = data[start:end], end
                self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise self._error or HeadError(400, f"malformed HTTP request: {str(error).lower()}") from None
        return data[start:]

    # Called by the parser

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        self.began = monotonic()

    def on_url(self, url: bytes) -> None:
        """Add a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        name = name.lower()
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._refuse(400, "Transfer-Encoding can only be chunked; name compression in Content-Encoding")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head."""
        assert self._parser is not None
        if len(self._headers) > (most := self._limits.header_count):
            self._refuse(431, f"{len(self._headers)} headers, the limit is {most}; send fewer")
        if self._parsed > self._limits.header_bytes:
            self._refuse(431, str(self._too_large()))
        if self._parser.get_method() == b"CONNECT":
            self._refuse(400, "this is no proxy: CONNECT is not supported; send another method")
        if self._parser.should_upgrade():
            self._headers = [header for header in self._headers if header[0] not in _UPGRADE_HEADERS]
        try:
            self._head = RequestHead.of(self._parser, self._url, self._headers)
        except httptools.HttpParserInvalidURLError:
            self._refuse(400, "malformed HTTP request: invalid request target")

    def _refuse(self, status: int, message: str) -> NoReturn:
        """Leave a callback; the error is kept because the parser replaces it by an exception of its own."""
        self._error = HeadError(status, message)
        raise self._error

    def _too_large(self) -> HeadError:
        return HeadError(431, f"the headers are over {self._limits.header_bytes} bytes; send fewer")
