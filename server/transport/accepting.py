"""The TLS handshake of a connection that has just been accepted."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.server import ServerState

from server.transport.connection import Connection, Listener
from server.transport.http_call import HttpApp

_log = logging.getLogger("batchwright.connection")


class TlsAcceptor(asyncio.Protocol):
    """Starts the TLS handshake of a connection that has just been accepted.

    The event loop's own TLS server reports a connection only after its handshake. The limits on the number of
    connections and on time would then not apply to it.
    """

    def __init__(self, listener: Listener, connection: Connection) -> None:
        """`listener` has a TLS context; `connection` is what follows the handshake."""
        self._listener = listener
        self._connection = connection
        self._loop = connection.loop

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
                lambda: self._connection,
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


def protocol_factory(listener: Listener, app: HttpApp) -> Callable[..., asyncio.BaseProtocol]:
    """Return the factory that uvicorn calls for each accepted connection."""

    def create(
        *, server_state: ServerState, _loop: asyncio.AbstractEventLoop | None = None, **_: Any
    ) -> asyncio.BaseProtocol:
        connection = Connection(listener, app, server_state, _loop or asyncio.get_running_loop())
        return connection if listener.tls is None else TlsAcceptor(listener, connection)

    return create
