"""A connection to another server that is kept alive, by the standard library's HTTP client."""

import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead

from server.errors import DeviceUnavailableError, ModelError, one_line
from server.models.upstream_spec import PREFIX, Upstream

Part = bytes | memoryview
_CONNECT_TIMEOUT = 5.0  # s
_MAX_PARTS = 512  # of one system call; Linux takes 1024
_MAX_RESPONSE = 2**31  # bytes


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
        self._address = upstream.device.removeprefix(PREFIX)
        kind = HTTPSConnection if upstream.secure else HTTPConnection
        self._http = kind(upstream.host, upstream.port, timeout=_CONNECT_TIMEOUT)
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
            path: path of the URL.
            parts: the body in parts, which are sent without being joined.
            headers: in addition to those of HTTP.
            timeout: longest time without any progress, s; None for no limit.

        Raises:
            DeviceUnavailableError: there is no connection, it was closed before the whole response, or the time is up.
            ModelError: the response is not HTTP, or too large.
        """
        self._aborted = False
        while True:
            kept_alive = self._http.sock is not None
            try:
                return self._exchange(method, path, parts, headers or {}, timeout)
            except (OSError, UnicodeError, IncompleteRead) as error:
                self.close()
                closed = isinstance(error, ConnectionError | IncompleteRead)
                if self._aborted or not (kept_alive and closed):
                    raise DeviceUnavailableError(f"{self._address} does not answer: {one_line(error)}") from error
            except HTTPException as error:
                self.close()
                raise ModelError(f"{self._address} does not answer in HTTP: {one_line(error)}") from error

    def abort(self) -> None:
        """Let the call that another thread is making fail."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS is not for other threads

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        self._http.close()
        self._socket = None

    def _exchange(
        self, method: str, path: str, parts: Sequence[Part], headers: Mapping[str, str], timeout: float | None
    ) -> Response:
        http = self._http
        if http.sock is None:
            http.connect()
            self._socket = http.sock
        if self._aborted:
            raise ConnectionAbortedError("the call was abandoned")
        http.sock.settimeout(timeout)
        http.putrequest(method, path)
        for name, value in headers.items():
            http.putheader(name, value)
        if method == "POST":
            http.putheader("Content-Length", str(sum(map(len, parts))))
        with suppress(ConnectionError):  # a server may answer, and close, before it has read everything
            http.endheaders()
            _send(http.sock, parts)
        response = http.getresponse()
        if (response.length or 0) > _MAX_RESPONSE:
            raise HTTPException(f"{response.length} bytes, over the maximum of {_MAX_RESPONSE}")
        names = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, names, response.read())


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
