"""A connection to another server that is kept alive, and the HTTP calls on it."""

import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, IncompleteRead
from threading import Timer

from server.errors import DeviceUnavailableError, ModelError, one_line
from server.models.upstream_spec import PREFIX, Upstream

Part = bytes | memoryview
_CONNECT_TIMEOUT = 5.0  # s
_MAX_PARTS = 512  # of one system call; Linux takes 1024
_MAX_RESPONSE = 2**31  # bytes
_PIECE = 2**20  # bytes, of a response without Content-Length


@dataclass(frozen=True, slots=True)
class Response:
    """A response: status, headers by lower-case name, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class UpstreamConnection:
    """One connection, opened when it is needed. Its calls are made by one thread at a time."""

    def __init__(self, upstream: Upstream) -> None:
        """Connect at the first call."""
        self._upstream = upstream
        self._address = upstream.device.removeprefix(PREFIX)
        self._tls = ssl.create_default_context() if upstream.secure else None
        self._socket: socket.socket | None = None
        self._aborted = False

    def call(
        self,
        method: str,
        path: str,
        parts: Sequence[Part] = (),
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """Send a request and wait for its response; a kept-alive connection that is closed is opened again, once.

        Args:
            method: HTTP method.
            path: path of the URL, quoted.
            parts: the body in parts, which are sent without being joined.
            headers: in addition to Host, Accept-Encoding and Content-Length.
            timeout: longest time of the call once it is connected, s; None for no limit.

        Raises:
            DeviceUnavailableError: there is no connection, it was closed before the whole response, or the time is up.
            ModelError: the response is not HTTP, or too large.
        """
        self._aborted = False
        size = sum(map(len, parts))
        lines = {"Host": self._address, "Accept-Encoding": "identity", "Content-Length": size, **(headers or {})}
        head = "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{name}: {lines[name]}\r\n" for name in lines), "\r\n"])
        while True:
            kept_alive = self._socket is not None
            try:
                with self._aborted_after(timeout):
                    return self._exchange(method, [head.encode("latin-1"), *parts])
            except (OSError, HTTPException, ValueError) as error:
                self.close()
                if self._aborted:
                    limit = "" if timeout is None else f" within {timeout:g} s"
                    raise DeviceUnavailableError(f"{self._address} does not answer{limit}") from error
                if kept_alive and isinstance(error, ConnectionError | IncompleteRead):
                    continue
                if isinstance(error, OSError | UnicodeError | IncompleteRead):
                    raise DeviceUnavailableError(f"{self._address} does not answer: {one_line(error)}") from error
                raise ModelError(f"{self._address} does not answer in HTTP: {one_line(error)}") from error

    def abort(self) -> None:
        """Let the call that another thread is making fail."""
        self._aborted = True
        if (connected := self._socket) is not None:
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # that of TLS is not for other threads

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextmanager
    def _aborted_after(self, timeout: float | None) -> Iterator[None]:
        """Abort the call in the `with` block after `timeout`, s; a socket's own timeout is between two reads."""
        if timeout is None:
            yield
            return
        timer = Timer(timeout, self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _connect(self) -> socket.socket:
        upstream = self._upstream
        connected = socket.create_connection((upstream.host, upstream.port), _CONNECT_TIMEOUT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connected = self._tls.wrap_socket(connected, server_hostname=upstream.host)
        connected.settimeout(None)
        return connected

    def _exchange(self, method: str, parts: Sequence[Part]) -> Response:
        if self._socket is None:
            self._socket = self._connect()
        if self._aborted:
            raise ConnectionAbortedError("the call was abandoned")
        with suppress(ConnectionError):  # a server may answer, and close, before it has read everything
            _send(self._socket, parts)
        with HTTPResponse(self._socket, method=method) as response:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            body = _read(response)
        if self._aborted:  # a response without Content-Length ends with the connection
            raise ConnectionAbortedError("the call was abandoned")
        if response.will_close:
            self.close()
        return Response(response.status, headers, body)


def _read(response: HTTPResponse) -> bytes:
    """The body of a response.

    Raises:
        HTTPException: it is cut off, or too large.
    """
    if response.length is not None:
        _check_size(response.length)
        return response.read()
    body = bytearray()
    while piece := response.read(_PIECE):
        body += piece
        _check_size(len(body))
    return bytes(body)


def _check_size(size: int) -> None:
    if size > _MAX_RESPONSE:
        raise HTTPException(f"{size} bytes, over the maximum of {_MAX_RESPONSE}")


def _send(connected: socket.socket, parts: Sequence[Part]) -> None:
    """Send all parts; over TCP without copying them."""
    if isinstance(connected, ssl.SSLSocket):
        connected.sendall(b"".join(parts))
        return
    rest = [memoryview(part) for part in parts]
    first = 0
    while first < len(rest):
        sent = connected.sendmsg(rest[first : first + _MAX_PARTS])
        while first < len(rest) and sent >= len(rest[first]):
            sent -= len(rest[first])
            first += 1
        if sent:
            rest[first] = rest[first][sent:]
