"""What the server does with a connection that has just been accepted: its protocol, and the TLS handshake before."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from server.transport.connection import Connection, Listener

_log = logging.getLogger("batchwright.connection")


class _BufferedConnection(asyncio.BufferedProtocol):
    """The protocol of a transport: a `Connection` that receives into its own buffers.

    The connection itself is an asyncio.Protocol, as uvicorn's base class is: for one, the loop would allocate and copy.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.receive_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.buffer_received(nbytes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class TlsAcceptor(asyncio.Protocol):
    """Starts the TLS handshake of a connection that has just been accepted.

    The event loop's own TLS server reports a connection only after its handshake. The limits on the number of
    connections and on time would then not apply to it.
    """

    def __init__(self, listener: Listener, **given: Any) -> None:
        """Take the arguments of `Connection`; `listener` has a TLS context."""
        self._listener = listener
        self._connection = Connection(listener, **given)
        self._loop = self._connection.loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Move the socket from the plain transport, which has read nothing yet, to a TLS transport."""
        accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        accepted.setblocking(False)
        transport.abort()  # type: ignore[attr-defined]  # a Transport; closes only its own descriptor
        handshake = self._connection.handshake = self._loop.create_task(self._handshake(accepted))
        handshake.add_done_callback(lambda _: self._on_handshake_end(accepted))
        self._connection.accepted()

    async def _handshake(self, accepted: socket.socket) -> None:
        assert self._listener.tls is not None
        try:
            await self._loop.connect_accepted_socket(
                lambda: _BufferedConnection(self._connection),
                accepted,
                ssl=self._listener.tls.context,
                ssl_handshake_timeout=self._listener.limits.headers,
            )
        except OSError as error:  # ssl.SSLError is an OSError
            _log.debug("a TLS handshake failed: %s", error)

    def _on_handshake_end(self, accepted: socket.socket) -> None:
        if not self._connection.connected:
            self._listener.connections.closed(self._connection)
            accepted.close()


def protocol_factory(listener: Listener) -> Callable[..., asyncio.BaseProtocol]:
    """Return the factory that uvicorn calls for each accepted connection."""
    if listener.tls is not None:
        return partial(TlsAcceptor, listener)
    return lambda **given: _BufferedConnection(Connection(listener, **given))
