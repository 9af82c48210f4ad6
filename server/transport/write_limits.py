"""Time limits for a client to read its response."""

import asyncio
import logging

from server.transport.connection_limits import ConnectionLimits

_log = logging.getLogger("batchwright.connection")


class WriteLimits:
    """Aborts a connection whose client reads no part of the response, or not all of it, in time."""

    def __init__(self, limits: ConnectionLimits, loop: asyncio.AbstractEventLoop) -> None:
        """Start without a response."""
        self._limits = limits
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._whole: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when the stall timer was set

    def start(self, transport: asyncio.Transport) -> None:
        """Begin both times, since the client does not read; that for the whole response only if it has not begun."""
        self._transport = transport
        self.end_stall()
        if self._whole is None:
            self._whole = self._loop.call_later(self._limits.answer, self._on_timeout)
        self._unsent = transport.get_write_buffer_size()
        self._stall = self._loop.call_later(self._limits.reading, self._on_stall)

    def restart(self, transport: asyncio.Transport) -> None:
        """Begin the times of another response, while the last one is not read yet."""
        if self._whole is not None:
            self.end_response()
            self.start(transport)

    def end_stall(self) -> None:
        """End the time for a part, since the client has read it."""
        if self._stall is not None:
            self._stall.cancel()

    def end_response(self) -> None:
        """End the time for the whole response."""
        if self._whole is not None:
            self._whole.cancel()
            self._whole = None

    def _on_stall(self) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < self._unsent:
            self.start(self._transport)
            return
        _log.debug("a client read nothing for %g s; %d bytes are dropped", self._limits.reading, self._unsent)
        self._transport.abort()

    def _on_timeout(self) -> None:
        assert self._transport is not None
        _log.debug("a client did not read its response within %g s; the connection is closed", self._limits.answer)
        self._transport.abort()
