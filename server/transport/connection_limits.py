"""Limits of connections: their number, and the times that they may take."""

import logging
import resource
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger("batchwright.connection")
_MAX_CONNECTIONS = 4096  # an idle one takes 7 to 11 KB
_RESERVED_FILES = 128  # file descriptors that the process needs beside its connections
_HEALTH_CONNECTIONS = 32  # connections over the limit that only health checks may use


class OpenConnection(Protocol):
    """What the limit needs of a connection."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a connection: times, s, and the size of a head.

    Attributes:
        headers: from connecting, or from the first byte of a later request, to the end of its headers.
        body: from the end of the headers to the end of the body.
        reading: for the client to read any part of the response, from when the write buffer is full.
        answer: for the client to read the whole response, from when the write buffer is first full.
        keep_alive: from the end of a response to the next request.
        header_bytes: of request line and headers.
        header_count: number of headers.
    """

    headers: float = 20.0
    body: float = 60.0
    reading: float = 30.0
    answer: float = 300.0
    keep_alive: float = 90.0  # longer than in client pools, so that no client posts into a closed connection
    header_bytes: int = 2**16
    header_count: int = 200


class ConnectionLimit:
    """Limit on the open connections of a server, TLS handshakes included.

    Over the limit the connection that has been idle longest is closed: first a closing one, then one that has not
    completed the headers of a request, then one that is kept alive. If all are in use, a few more are accepted for
    health checks alone, so that an orchestrator does not restart a busy server.
    """

    def __init__(self) -> None:
        """Start without connections."""
        self._open: set[OpenConnection] = set()
        # each in the order in which connections became idle; a dict for removal in constant time
        self._closing: dict[OpenConnection, None] = {}
        self._unused: dict[OpenConnection, None] = {}
        self._idle: dict[OpenConnection, None] = {}
        self._warned = False

    def opened(self, connection: OpenConnection) -> bool:
        """Count a new connection and close an idle one if needed; return whether it is for health checks alone."""
        limit, reserved = max_connections(), False
        if len(self._open) >= limit:
            self._warn(limit)
            victim = next((one for group in (self._closing, self._unused, self._idle) for one in group), None)
            if victim is not None:
                self.closed(victim)
                victim.abort()
            else:
                reserved = True
        self._open.add(connection)
        self._unused[connection] = None
        if len(self._open) > limit + _HEALTH_CONNECTIONS:
            self.closed(connection)
            connection.abort()
        return reserved

    def used(self, connection: OpenConnection) -> None:
        """Record that a request began on the connection."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: OpenConnection) -> None:
        """Record that the connection is kept alive and has no request."""
        if connection in self._open:
            self._idle[connection] = None

    def closing(self, connection: OpenConnection) -> None:
        """Record that the connection closes once the client has read the last response."""
        if connection in self._open:
            self.used(connection)
            self._closing[connection] = None

    def closed(self, connection: OpenConnection) -> None:
        """Record that the connection is closed or being aborted."""
        self._open.discard(connection)
        self._closing.pop(connection, None)
        self.used(connection)

    def _warn(self, limit: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the limit of %d connections is reached; idle ones are closed for new ones", limit)


def max_connections() -> int:
    """Return the largest number of open connections, which the limit on open files may reduce."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(files // 2, files - _RESERVED_FILES))
