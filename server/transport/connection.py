"""HTTP connections: limits on their number, on the size of requests and on time, and the error responses."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Literal, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import render_error
from server.transport.tls import Tls

_log = logging.getLogger("batchwright.connection")
_ReadState = Literal["idle", "headers", "body"]  # the part of a request that the parser reads; idle: between requests
_BODY_BUFFER = 2**18  # bytes of a body that are buffered before the app receives them
_MAX_HEADER_BYTES = 2**16  # bytes of request line and headers, and of trailers and chunk sizes
_MAX_HEADER_COUNT = 200
_PIPELINED_REQUEST_BYTES = 2**13  # memory of a pipelined request beside its body
_MAX_PIPELINED_BYTES = 2**24  # of all connections together
_SEND_BUFFER = 2**18  # bytes of a response in the kernel's send buffer; the default grows to some megabytes
_INTERIM = b"HTTP/1.1 1"  # start of interim responses (100 Continue)
_WRITE_BUFFER = 2**14  # bytes of a response in the transport's buffer before writing pauses
_MAX_PIPELINED_REQUESTS = 16  # per connection; each takes some 7 KB and 50 us
_MAX_DISCARDED = 2**27  # bytes of a rejected body that are read and dropped, so that the client reads the response
_MAX_CONNECTIONS = 4096  # an idle one takes 7 to 11 KB
_RESERVED_FILES = 128  # file descriptors that the process needs beside its connections
_HEALTH_CONNECTIONS = 32  # connections over the limit that only health checks may use
_HEALTH_PREFIX = b"/v2/health/"
_RETRY_AFTER = b"retry-after: 1\r\n"
_LINGER = 1.0  # s; closing a socket with unread bytes resets the connection, and the client loses the response
_PEER_CHECK_INTERVAL = 0.05  # s before the first check for a disconnected client; doubled each time
_MAX_PEER_CHECK_INTERVAL = 1.0  # s
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # states in Linux's tcp_info


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a connection, s.

    Attributes:
        headers: from connecting, or from the first byte of a later request, to the end of its headers.
        body: from the end of the headers to the end of the body.
        reading: for the client to read any part of the response, from when the write buffer is full.
        answer: for the client to read the whole response, from when the write buffer is first full.
        keep_alive: from the end of a response to the next request.
    """

    headers: float = 20.0
    body: float = 60.0
    reading: float = 30.0
    answer: float = 300.0
    keep_alive: float = 90.0  # longer than in client pools, so that no client posts into a closed connection


class ConnectionLimit:
    """Limit on the open connections of a server, TLS handshakes included.

    Over the limit the connection that has been idle longest is closed: first a closing one, then one that has not
    completed the headers of a request, then one that is kept alive. If all are in use, a few more are accepted for
    health checks alone, so that an orchestrator does not restart a busy server.

    Attributes:
        pipelined_bytes: memory of the pipelined requests of all connections, bytes.
    """

    def __init__(self) -> None:
        """Start without connections."""
        self._open: set[Connection] = set()
        # each in the order in which connections became idle; a dict for removal in constant time
        self._closing: dict[Connection, None] = {}
        self._unused: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._warned = False
        self.pipelined_bytes = 0

    def opened(self, connection: "Connection") -> bool:
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

    def used(self, connection: "Connection") -> None:
        """Record that a request began on the connection."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: "Connection") -> None:
        """Record that the connection is kept alive and has no request."""
        if connection in self._open:
            self._idle[connection] = None

    def closing(self, connection: "Connection") -> None:
        """Record that the connection closes once the client has read the last response."""
        if connection in self._open:
            self.used(connection)
            self._closing[connection] = None

    def closed(self, connection: "Connection") -> None:
        """Record that the connection is closed or being aborted."""
        self._open.discard(connection)
        self._closing.pop(connection, None)
        self.used(connection)

    def _warn(self, limit: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the limit of %d connections is reached; idle ones are closed for new ones", limit)


@dataclass(frozen=True)
class Listener:
    """The settings and the state that all connections of the server share.

    Attributes:
        limits: time limits of each connection.
        tls: the server's certificate; None for plain HTTP.
        connections: the limit on the number of connections.
    """

    limits: TimeLimits = field(default_factory=TimeLimits)
    tls: Tls | None = None
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)


class _PipelineFlowControl(FlowControl):
    """uvicorn's flow control that does not resume reading while pipelined requests wait.

    The app of the running request resumes reading to detect a disconnect. Pipelined requests would then accumulate.
    """

    pipelining = False

    def resume_reading(self) -> None:
        """Resume reading unless pipelined requests wait."""
        if not self.pipelining:
            super().resume_reading()


class _ResponseWriter:
    """Passes the head of a response to the transport with the first part of its body, in one system call."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None  # held back; empty once it is written

    def write(self, data: bytes) -> None:
        """Write a part of the response, or an interim response, which is no part of it."""
        if self._head is None and not data.startswith(_INTERIM):
            self._head = data
        elif self._head:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the transport is closing."""
        return self._transport.is_closing()

    def flush(self) -> None:
        """Write a head without a body."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Close the transport once the response is sent."""
        self.flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on size, number and time.

    A body of up to `_BODY_BUFFER` bytes is passed to the app in one message instead of one for every 64 KiB. This
    avoids pausing the connection and two copies. A larger body is passed on in chunks, so that the app can apply its
    own limit. Pipelined requests are read only up to the end of one read of the socket, 256 KiB.

    A client may close its sending side after its last request and still get the response, except over TLS. A client
    that has closed the whole connection sends the same FIN. An interim response (100 Continue, which clients must
    accept, RFC 9110 section 15.2) distinguishes the two, since a closed socket answers it with RST.

    One timer serves all read deadlines. A new deadline does not move it: the timer is set again when it fires before
    the deadline, so that requests create no timers.
    """

    def __init__(
        self,
        listener: Listener,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Create the protocol of one connection; uvicorn passes all arguments but `listener`, by these names."""
        super().__init__(config, server_state, app_state, _loop)
        self._connections = listener.connections
        self._limits = listener.limits
        self.connected = False  # until the end of the TLS handshake
        self.handshake: asyncio.Task[None] | None = None
        self._health_only = False
        self._pipelined_bytes = 0
        self._half_closed = False
        self._peer_check: asyncio.TimerHandle | None = None
        self._response_timer: asyncio.TimerHandle | None = None
        self._read_state: _ReadState = "idle"
        self._timed_state: _ReadState = "idle"  # the state that `_deadline` belongs to
        self._deadline = self._timer_at = inf
        self._read_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when `_stall_timer` was set
        self._body_chunks: list[bytes] = []
        self._buffered_bytes = self._body_bytes = self._request_bytes = self._received_bytes = 0
        self._running_cycle: RequestResponseCycle | None = None
        self._parse_error: tuple[int, str] | None = None
        self._ignores_input = False
        self._pending_error: bytes | None = None  # sent after the responses to earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the buffer sizes and the deadline for the headers of the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_BUFFER)
        plain = transport.get_extra_info("socket")
        if plain is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.connected = True
        self.flow = self._flow = _PipelineFlowControl(transport)
        if self.scheme == "http":
            self.accepted()
        if not transport.is_closing():
            self._set_deadline(self._limits.headers)

    def accepted(self) -> None:
        """Register the connection with the limit, which may close an idle one."""
        self._health_only = self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers and pass the disconnect to the app of the request that runs."""
        self._connections.closed(self)
        self._release_pipelined()
        for timer in (self._read_timer, self._stall_timer, self._response_timer, self._peer_check):
            if timer is not None:
                timer.cancel()
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            _mark_disconnected(self._running_cycle)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.connected:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # Reading

    def data_received(self, data: bytes) -> None:
        """Parse the bytes received, within the limits."""
        if self._ignores_input:
            return
        self._received_bytes = len(data)
        if self._read_state != "idle":
            self._request_bytes += self._received_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._reject(*(self._parse_error or (400, f"malformed HTTP request: {_reason(error)}")))
        except httptools.HttpParserUpgrade:
            # Served as HTTP/1.1, which the client must accept; the parser cannot continue after an upgrade request.
            self._ignores_input, self.cycle.keep_alive = True, False
        else:
            if self._read_state != "idle":
                self._check_incomplete_request()

    def _check_incomplete_request(self) -> None:
        """Limit the bytes that are not part of a body, such as headers, trailers and chunk sizes; set the deadline."""
        if self._request_bytes > _MAX_HEADER_BYTES + 2 * self._body_bytes or (
            self._read_state == "headers" and self._headers_too_large()
        ):
            self._reject(431, f"the headers are over {_MAX_HEADER_BYTES} bytes; send fewer")
        elif self._body_bytes > _MAX_DISCARDED and self.cycle.response_complete:
            self._close()
        elif self._timed_state != self._read_state:
            self._timed_state = self._read_state
            self._set_deadline(self._limits.headers if self._read_state == "headers" else self._limits.body)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open while a request sent in full has no response yet."""
        unanswered = self._running_cycle is not None and not self._running_cycle.response_complete
        if self.scheme == "https" or self._read_state == "body" or not unanswered:
            return None  # closes the connection
        self._ignores_input, self._deadline = True, inf
        self._check_peer_after(_PEER_CHECK_INTERVAL)
        return True

    def _check_peer_after(self, seconds: float) -> None:
        if self._peer_check is None:
            self._peer_check = self.loop.call_later(seconds, self._check_peer, seconds)

    def _check_peer(self, waited: float) -> None:
        """Abort the connection if the client has closed it, which is not reported while reading is paused."""
        self._peer_check = None
        state = _tcp_state(self.transport)
        if (
            state is None
            or self.transport.is_closing()
            or self._running_cycle is None
            or self._running_cycle.response_complete
        ):
            return
        if state == _TCP_CLOSE:
            self.transport.abort()
            return
        if state == _TCP_CLOSE_WAIT and not self._half_closed:
            self._half_closed = True
            if not self._running_cycle.response_started and self._running_cycle.scope["http_version"] == "1.1":
                self.transport.write(STATUS_LINE[100] + b"\r\n")
            waited = _PEER_CHECK_INTERVAL / 2
        self._check_peer_after(min(2 * waited, _MAX_PEER_CHECK_INTERVAL))

    def on_message_begin(self) -> None:
        """Reset the counters at the first byte of a request."""
        self._read_state, self._timed_state, self._request_bytes, self._body_bytes = "headers", "idle", 0, 0
        super().on_message_begin()
        self.scope["state"]["began"] = monotonic()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers after the body are ignored."""
        if self._read_state != "headers":
            return
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._raise_parse_error(400, "Transfer-Encoding can only be chunked; name compression in Content-Encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the app, or reject the request."""
        self._check_headers()
        self._body_chunks, self._buffered_bytes = [], 0
        self._connections.used(self)
        super().on_headers_complete()
        self.cycle.transport = _ResponseWriter(self.transport)  # type: ignore[assignment]  # what a cycle needs of it
        self._read_state = "body"
        if self.pipeline:
            self._flow.pipelining = True
            self._check_peer_after(_PEER_CHECK_INTERVAL)  # a disconnect is not reported while reading is paused
        if self.expect_100_continue or self._health_only:
            # After an early rejection the client may or may not send the body, so the next request cannot be found.
            self.cycle.keep_alive = False

    def _check_headers(self) -> None:
        if len(self.headers) > _MAX_HEADER_COUNT:
            self._raise_parse_error(431, f"{len(self.headers)} headers, the limit is {_MAX_HEADER_COUNT}; send fewer")
        if self._headers_too_large():
            self._raise_parse_error(431, f"the headers are over {_MAX_HEADER_BYTES} bytes; send fewer")
        if len(self.pipeline) >= _MAX_PIPELINED_REQUESTS:
            self._raise_parse_error(400, f"over {_MAX_PIPELINED_REQUESTS} pipelined requests; wait for responses")
        if self._health_only and not self.url.startswith(_HEALTH_PREFIX):
            limit = max_connections()
            self._raise_parse_error(503, f"the limit of {limit} connections is reached; send the request again later")
        if self.parser.should_upgrade() and self.parser.get_method() not in (b"GET", b"HEAD"):
            # The parser would treat the body as bytes of the other protocol.
            self._raise_parse_error(400, "protocol upgrades are not supported; send the request without Upgrade")
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            self._charge_pipelined(_PIPELINED_REQUEST_BYTES)

    def _headers_too_large(self) -> bool:
        """Return whether the headers exceed the limit; they are counted only if enough bytes were received."""
        if self._request_bytes + self._received_bytes <= _MAX_HEADER_BYTES:
            return False
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > _MAX_HEADER_BYTES

    def on_body(self, body: bytes) -> None:
        """Buffer a chunk of a body, and pass the buffer to the app when it is over its limit."""
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            return
        if self.pipeline:
            self._charge_pipelined(len(body))
        self._body_chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > _BODY_BUFFER:
            pieces, self._body_chunks, self._buffered_bytes = self._body_chunks, [], 0
            super().on_body(b"".join(pieces))

    def _charge_pipelined(self, count: int) -> None:
        """Count bytes of a pipelined request; reject it if all pipelined requests together exceed the limit."""
        limit = self._connections
        if limit.pipelined_bytes + count > _MAX_PIPELINED_BYTES:
            self._body_chunks = []
            self._raise_parse_error(503, "pipelined requests take too much memory; wait for each response")
        limit.pipelined_bytes += count
        self._pipelined_bytes += count

    def _release_pipelined(self) -> None:
        self._connections.pipelined_bytes -= self._pipelined_bytes
        self._pipelined_bytes = 0

    def on_message_complete(self) -> None:
        """Pass the whole body to the app and stop the read deadline."""
        self._read_state, self._deadline = "idle", inf
        if self._body_chunks:
            self.cycle.body = b"".join((self.cycle.body, *self._body_chunks))  # type: ignore[assignment]  # bytes suffice
            self._body_chunks = []
        super().on_message_complete()
        if self.cycle.response_complete:
            self._set_deadline(self._limits.keep_alive)

    # Responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, app)
        if self._response_timer is not None:  # of the previous response
            self._stop_response_timer()
            self._start_write_timers()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, close the connection, or wait for a request."""
        self.server_state.total_requests += 1
        if self._running_cycle is not None:
            self._running_cycle.transport.flush()  # type: ignore[attr-defined]
        if self._response_timer is not None and not self.flow.write_paused:
            self._stop_response_timer()
        if self.transport.is_closing():
            self._connections.closing(self)
            self._start_write_timers()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._pending_error is not None:
            self._send_and_close(self._pending_error)
        elif self._half_closed or self._ignores_input:
            self._close()
        else:
            self._connections.idle(self)
            if self._read_state == "idle":
                self._set_deadline(self._limits.keep_alive)
        if not self.pipeline:
            self._release_pipelined()
            self._flow.pipelining = False
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Start the write timers when the client does not read its response."""
        super().pause_writing()
        self._start_write_timers()

    def resume_writing(self) -> None:
        """Stop the write timers when the client has read its response."""
        if not self.transport.is_closing():
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            if self._running_cycle is None or self._running_cycle.response_complete:
                self._stop_response_timer()
        super().resume_writing()

    def _start_write_timers(self) -> None:
        """Start the time limits for the client to read a part of the response, and all of it."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._response_timer is None:
            self._response_timer = self.loop.call_later(self._limits.answer, self._on_response_timeout)
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.reading, self._on_stall)

    def _on_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._start_write_timers()
            return
        _log.debug("a client read nothing for %g s; %d bytes are dropped", self._limits.reading, self._unsent_bytes)
        self.transport.abort()

    def _on_response_timeout(self) -> None:
        _log.debug("a client did not read its response within %g s; the connection is closed", self._limits.answer)
        self.transport.abort()

    def _stop_response_timer(self) -> None:
        if self._response_timer is not None:
            self._response_timer.cancel()
            self._response_timer = None

    # Rejecting

    def _raise_parse_error(self, status: int, message: str) -> NoReturn:
        """Leave a parser callback; the error is stored because the parser replaces it by an exception of its own."""
        self._parse_error = (status, message)
        raise ValueError(message)

    def _reject(self, status: int, message: str) -> None:
        """Send an error in place of the response to the invalid request, and close the connection."""
        self._ignores_input, self._deadline = True, inf
        response = _error_response(status, message, _RETRY_AFTER if status == 503 else b"")
        if self._read_state == "body":
            if self.pipeline:
                self.pipeline.popleft()  # its app has not been started
            elif self.cycle.response_started:
                response = b""
            else:
                _mark_disconnected(self.cycle)
                self._send_and_close(response)
                return
        if self._running_cycle is None or self._running_cycle.response_complete:
            self._send_and_close(response)
        else:
            self._pending_error = response

    def _send_and_close(self, response: bytes) -> None:
        if self.transport.is_closing():
            return
        self._ignores_input = True
        self._connections.closing(self)
        self.transport.write(response)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._set_deadline(_LINGER)
        else:
            self._close()

    def _close(self) -> None:
        self._ignores_input = True
        self._connections.closing(self)
        self._start_write_timers()
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
        self._on_read_timeout()

    def _on_read_timeout(self) -> None:
        if self._ignores_input or self.transport.is_closing():
            self._close()
        elif self._read_state == "headers":
            self._reject(408, f"the headers were not complete within {self._limits.headers:g} s")
        elif self._read_state == "idle" or self.cycle.response_complete:
            self._close()
        elif self.pipeline:
            self._set_deadline(self._limits.body)  # reading is paused
        else:
            self._reject(408, f"the body was not complete within {self._limits.body:g} s")


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


def protocol_factory(listener: Listener) -> Callable[..., asyncio.Protocol]:
    """Return the factory that uvicorn calls for each accepted connection."""
    return partial(Connection if listener.tls is None else TlsAcceptor, listener)


def _mark_disconnected(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _reason(error: httptools.HttpParserError) -> str:
    """Describe a parser error; one from uvicorn's callbacks is an invalid request target."""
    return "invalid request target" if isinstance(error, httptools.HttpParserCallbackError) else str(error).lower()


def max_connections() -> int:
    """Return the largest number of open connections, which the limit on open files may reduce."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(files // 2, files - _RESERVED_FILES))


def _tcp_state(transport: asyncio.Transport) -> int | None:
    """Return the connection's state in Linux's tcp_info; None if it is not available."""
    try:
        return int(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    except (AttributeError, OSError):  # not Linux, or a closed socket
        return None


def _error_response(status: int, message: str, headers: bytes = b"") -> bytes:
    body = render_error(message)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + headers + b"\r\n" + body
