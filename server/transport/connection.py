"""HTTP/1.1 connections: one request at a time, within limits on number, size and time, and the error responses."""

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from math import inf

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from server.errors import render_error
from server.transport.chunked_body import ChunkedBody, ChunkedBodyError
from server.transport.connection_limits import ConnectionLimit, ConnectionLimits, max_connections
from server.transport.head_reader import HeadError, HeadReader
from server.transport.http_call import Buffers, HttpApp, HttpCall
from server.transport.tls import Tls
from server.transport.write_limits import WriteLimits

_log = logging.getLogger("batchwright.connection")
_RECEIVE_BUFFER = 2**18  # bytes that are read at once
_FIRST_READ = 2**13  # bytes read at the start of a request, so that most of a body can be received in place
_CHUNKED_READ = 2**16  # bytes read at once of a chunked body; other requests may follow it
_SEND_BUFFER = 2**18  # bytes of a response in the kernel's send buffer; the default grows to some megabytes
_WRITE_BUFFER = 2**14  # bytes of a response in the transport's buffer before writing pauses
_MAX_DISCARDED = 2**27  # bytes of a rejected body that are read and dropped, so that the client reads the response
_HEALTH_PREFIX = "/v2/health/"
_RETRY_AFTER = b"retry-after: 1\r\n"
_LINGER = 1.0  # s; closing a socket with unread bytes resets the connection, and the client loses the response


@dataclass(frozen=True)
class Listener:
    """The settings and the state that all connections of the server share.

    Attributes:
        limits: time limits of each connection.
        tls: the server's certificate; None for plain HTTP.
        connections: the limit on the number of connections.
        buffers: memory for bodies that are received in place.
        received: for all other bytes; each read of a socket is handled before the next.
    """

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: Tls | None = None
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)
    buffers: Buffers = lambda size: memoryview(bytearray(size))
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BUFFER)))


class Connection(asyncio.BufferedProtocol):
    """One connection, whose requests are served one after another, each in a task.

    A body is received in place, in memory of its length, once the handler reads it; until then reading is paused. What
    a client sends after a whole request, about one read of the socket, is kept until that is answered. Then reading is
    paused.

    A client that closes its sending side has disconnected, as for other servers: what it waits for is cancelled.

    One timer serves all read deadlines. A new deadline does not move it: the timer is set again when it fires before
    the deadline, so that requests create no timers.

    Attributes:
        transport: of the connection.
        connected: False until the end of the TLS handshake.
        handshake: its task.
        app: serves the requests.
        buffers: memory for bodies that are received in place.
        loop: the event loop.
    """

    def __init__(self, listener: Listener, app: HttpApp, state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        """Create the protocol of one connection; `state` is uvicorn's, of the server."""
        self.app, self.loop, self.buffers = app, loop, listener.buffers
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is connected
        self.connected = False
        self.handshake: asyncio.Task[None] | None = None
        self._state = state
        self._connections, self._limits, self._received = listener.connections, listener.limits, listener.received
        self._health_only = False
        # the request that is read
        self._heads = HeadReader(listener.limits)
        self._is_whole = False
        self._chunked: ChunkedBody | None = None  # that arrives
        self._body_bytes = 0
        self._body_time = inf  # s left for the rest of the body while reading is paused
        # the request that is served
        self._call: HttpCall | None = None
        self._kept = b""  # received after it
        self._ignores_input = False  # no further request is read
        self._reads = True  # whether reading is not paused
        self._writable = asyncio.Event()
        self._writable.set()
        self._deadline = self._timer_at = inf
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_limits = WriteLimits(listener.limits, loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the buffer sizes and the deadline for the headers of the first request."""
        self.transport = transport  # type: ignore[assignment]  # a Transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn calls only `shutdown` of it
        self.transport.set_write_buffer_limits(_WRITE_BUFFER)
        plain = transport.get_extra_info("socket")
        if plain is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.connected = True
        if self.handshake is None:
            self.accepted()
        if not self.transport.is_closing():
            self._set_deadline(self._limits.headers)

    def accepted(self) -> None:
        """Register the connection with the limit, which may close an idle one."""
        self._health_only = self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers and the call that has no response yet."""
        self._state.connections.discard(self)
        self._connections.closed(self)
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._write_limits.end_stall()
        self._write_limits.end_response()
        self._heads.end()
        call, self._call, self._chunked, self._kept = self._call, None, None, b""
        if call is not None:
            call.disconnect()
        self._writable.set()

    def eof_received(self) -> bool | None:
        """Close the connection once the client has read what was written, since it has disconnected."""
        if self._call is not None and not self._call.response_complete:
            self._call.disconnect()
        self._close()
        return None

    def shutdown(self) -> None:
        """Close the connection, after the response to the request that is served."""
        if self._call is None:
            self.transport.close()
        elif self._call.response_complete:  # the rest of its body is dropped
            self._send_and_close(b"")
        else:
            self._call.keep_alive = False

    def abort(self) -> None:
        """Close the connection at once."""
        if self.connected:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # Reading

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory that the next bytes are to be received in."""
        call = self._call
        if call is None or self._is_whole:
            return self._received[:_FIRST_READ]
        place = call.place()
        if place is not None:
            return place
        rest = _CHUNKED_READ if call.head.length is None else call.head.length - self._body_bytes
        return self._received[: min(rest, _RECEIVE_BUFFER)]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes received in `get_buffer`."""
        call = self._call
        if call is not None and call.place() is not None:
            call.fill(nbytes)
            self._end_of_body(call)
        else:
            self._receive(bytes(self._received[:nbytes]))

    def _receive(self, data: bytes) -> None:
        if self._ignores_input or self.transport.is_closing():  # TLS still passes on what arrived before
            return
        if self._kept or (self._call is not None and self._is_whole):
            self._kept += data
        elif self._call is None:
            self._receive_head(data)
        else:
            self._receive_body(self._call, data)
        self.update_reading()

    def _receive_head(self, data: bytes) -> None:
        """Start a call once its head is whole."""
        began = self._heads.began
        try:
            head, following = self._heads.feed(data)
        except HeadError as error:
            self._reject(error.status, str(error))
            return
        if head is None:
            if self._heads.began != began:
                self._set_deadline(self._limits.headers)
            return
        if self._health_only:
            if not head.path.startswith(_HEALTH_PREFIX):
                limit = max_connections()
                self._reject(503, f"the limit of {limit} connections is reached; send the request again later")
                return
            head.keep_alive = False
        self._body_bytes = 0
        self._connections.used(self)
        call = self._call = HttpCall(self, head, self._heads.began)
        task = self.loop.create_task(self._serve(call))
        self._state.tasks.add(task)  # uvicorn waits for them when it stops
        task.add_done_callback(self._state.tasks.discard)
        self._is_whole = head.length == 0
        if head.length is None:
            self._chunked = ChunkedBody(self._add_to_body)
        if self._is_whole:
            self._deadline = inf
            self._kept = following
        else:
            self._set_deadline(self._limits.body)
            if following:
                self._receive_body(call, following)

    async def _serve(self, call: HttpCall) -> None:
        try:
            await self.app.handle(call)
        except Exception:  # noqa: BLE001 - of any kind; the connection ends in it
            _log.exception("the response to request %s failed", call.request_id)
        finally:
            if not (call.response_complete or call.disconnected):
                self.abort()

    def _receive_body(self, call: HttpCall, data: bytes) -> None:
        if self._chunked is not None:
            try:
                following = self._chunked.feed(data)
            except ChunkedBodyError as error:
                self._reject(400, f"malformed HTTP request: {error}")
                return
            self._is_whole = self._chunked.is_whole
            if self._chunked.other_bytes > self._limits.header_bytes + self._body_bytes:
                self._reject(431, f"the chunk sizes are over {self._limits.header_bytes} bytes; send longer chunks")
                return
        else:
            assert call.head.length is not None
            own = call.head.length - self._body_bytes
            self._add_to_body(data[:own])
            following = data[own:]
            self._is_whole = self._body_bytes == call.head.length
        if self._body_bytes > _MAX_DISCARDED and call.response_complete:
            self._close()
            return
        if self._is_whole:
            self._kept = following
            call.body_complete()
            self._end_of_body(call)

    def _end_of_body(self, call: HttpCall) -> None:
        """Stop the deadline if the body is whole, and go on if its call is answered."""
        self._is_whole = self._is_whole or call.is_whole
        if self._is_whole:
            self._deadline = inf
            if call.response_complete and call.keep_alive:
                self._next_request()
            elif call.response_complete:
                self._close()

    def update_reading(self) -> None:
        """Pause or resume reading: the rest of a body waits for its handler, and further requests for the response."""
        call = self._call
        reads = len(self._kept) < _FIRST_READ and (
            call is None or self._is_whole or call.response_complete or call.awaits_body
        )
        if reads == self._reads or self.transport.is_closing():
            return
        self._reads = reads
        if not reads:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        if not self._is_whole:  # the time in which the handler does not read is not the client's
            now = self.loop.time()
            if reads:
                self._set_deadline(self._body_time)
            else:
                self._body_time, self._deadline = self._deadline - now, inf

    def _add_to_body(self, body: bytes) -> None:
        """Pass on a part of the body, or drop it once the request is answered."""
        self._body_bytes += len(body)
        if self._call is not None and not self._call.response_complete:
            self._call.add(body)

    # Responses

    async def writable(self) -> bool:
        """Wait until the client has read most of what was written; return whether the connection is still open."""
        await self._writable.wait()
        return not self.transport.is_closing()

    @property
    def can_write(self) -> bool:
        """Whether the client has read most of what was written."""
        return self._writable.is_set()

    def response_completed(self, call: HttpCall) -> None:
        """Go on with the next request, or close the connection."""
        self._state.total_requests += 1
        if self.can_write:
            self._write_limits.end_response()
        if self.transport.is_closing():
            self._connections.closing(self)
        elif not call.keep_alive:
            if self._is_whole:
                self._close()
            else:
                self._send_and_close(b"")
        elif self._is_whole:
            self._next_request()
        else:
            self.update_reading()  # the rest of the body is dropped

    def _next_request(self) -> None:
        """Read the next request, of which a part may have arrived."""
        self._call = self._chunked = None
        self._heads.end()
        self._connections.idle(self)
        self._set_deadline(self._limits.keep_alive)
        self._write_limits.restart(self.transport)
        if self._kept:
            self.loop.call_soon(self._receive_kept)
        else:
            self.update_reading()

    def _receive_kept(self) -> None:
        data, self._kept = self._kept, b""
        self._receive(data)

    def pause_writing(self) -> None:
        """Start the write timers when the client does not read its response."""
        self._writable.clear()
        self._write_limits.start(self.transport)

    def resume_writing(self) -> None:
        """Stop the write timers when the client has read its response."""
        if not self.transport.is_closing():
            self._write_limits.end_stall()
            if self._call is None or self._call.response_complete:
                self._write_limits.end_response()
        self._writable.set()

    # Rejecting

    def _reject(self, status: int, message: str) -> None:
        """Send an error in place of the response to the invalid request, and close the connection."""
        call, response = self._call, _error_response(status, message, _RETRY_AFTER if status == 503 else b"")
        if call is not None:
            if call.status:
                response = b""
            call.disconnect()
        self._send_and_close(response)

    def _send_and_close(self, response: bytes) -> None:
        """Send the last response, and drop what the client sends until it has read it."""
        self._ignores_input, self._deadline = True, inf
        if self.transport.is_closing():
            return
        self._connections.closing(self)
        if response:
            self.transport.write(response)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._set_deadline(_LINGER)
            if not self._reads:
                self._reads = True
                self.transport.resume_reading()
        else:
            self._close()

    def _close(self) -> None:
        self._ignores_input = True
        self._connections.closing(self)
        self._write_limits.start(self.transport)
        self.transport.close()

    # Read deadlines

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds
        if self._deadline < self._timer_at:
            if self._read_timer is not None:
                self._read_timer.cancel()
            self._schedule_read_timer()

    def _schedule_read_timer(self) -> None:
        self._timer_at = self._deadline
        self._read_timer = None if self._deadline == inf else self.loop.call_at(self._deadline, self._on_read_timer)

    def _on_read_timer(self) -> None:
        if self.loop.time() < self._deadline:
            self._schedule_read_timer()
            return
        self._read_timer, self._timer_at, self._deadline = None, inf, inf
        if self._ignores_input or self.transport.is_closing():
            self._close()
        elif self._call is not None:
            if self._call.response_complete:
                self._close()
            else:
                self._reject(408, f"the body was not complete within {self._limits.body:g} s; send it faster")
        elif self._heads.began:
            self._reject(408, f"the headers were not complete within {self._limits.headers:g} s; send faster")
        else:
            self._close()


def _error_response(status: int, message: str, headers: bytes = b"") -> bytes:
    body = render_error(message)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + headers + b"\r\n" + body
