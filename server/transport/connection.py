"""HTTP connections: limits on their number, on the size of requests and on time, and the error responses."""

import asyncio
import logging
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any, Literal, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import render_error
from server.transport.connection_limits import ConnectionLimit, TimeLimits, max_connections
from server.transport.direct_call import Buffers, CallHead, DirectApp, DirectCall
from server.transport.tls import Tls

_log = logging.getLogger("batchwright.connection")
_ReadState = Literal["idle", "headers", "body"]  # the part of a request that the parser reads; idle: between requests
_RECEIVE_BUFFER = 2**18  # bytes that are read at once
_FIRST_READ = 2**13  # bytes read at the start of a request, so that most of a body can be received in place
_BODY_BUFFER = 2**18  # bytes of a body that are buffered before the app receives them
_DIRECT_BODY = 2**20  # bytes; memory for a larger body is reserved as it arrives, through ASGI
_NOT_DIRECT = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"))
_MAX_HEADER_BYTES = 2**16  # bytes of request line and headers, and of trailers and chunk sizes
_MAX_HEADER_COUNT = 200
_PIPELINED_REQUEST_BYTES = 2**13  # memory of a pipelined request beside its body
_MAX_PIPELINED_BYTES = 2**24  # of all connections together
_SEND_BUFFER = 2**18  # bytes of a response in the kernel's send buffer; the default grows to some megabytes
_INTERIM = b"HTTP/1.1 1"  # start of interim responses (100 Continue)
_WRITE_BUFFER = 2**14  # bytes of a response in the transport's buffer before writing pauses
_MAX_PIPELINED_REQUESTS = 16  # per connection; each takes some 7 KB and 50 us
_MAX_DISCARDED = 2**27  # bytes of a rejected body that are read and dropped, so that the client reads the response
_HEALTH_PREFIX = b"/v2/health/"
_PIPELINED_REMEDY = "pipelined requests take too much memory; wait for each response"
_RETRY_AFTER = b"retry-after: 1\r\n"
_LINGER = 1.0  # s; closing a socket with unread bytes resets the connection, and the client loses the response
_PEER_CHECK_INTERVAL = 0.05  # s before the first check for a disconnected client; doubled each time
_MAX_PEER_CHECK_INTERVAL = 1.0  # s
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # states in Linux's tcp_info


@dataclass(frozen=True)
class Listener:
    """The settings and the state that all connections of the server share.

    Attributes:
        limits: time limits of each connection.
        tls: the server's certificate; None for plain HTTP.
        direct: serves inference calls without ASGI; None: all requests go through ASGI.
        connections: the limit on the number of connections.
        buffers: memory for the bodies of direct calls.
        received: for all other bytes; each read of a socket is handled before the next.
    """

    limits: TimeLimits = field(default_factory=TimeLimits)
    tls: Tls | None = None
    direct: DirectApp | None = None
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)
    buffers: Buffers = lambda size: memoryview(bytearray(size))
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BUFFER)))


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

    An inference call whose head arrives in one piece is served without ASGI, as a `DirectCall`. What is pipelined after
    it waits unparsed, and reading is paused meanwhile.

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
        self._listener = listener
        self._connections = listener.connections
        self._limits = listener.limits
        self._head: CallHead | None = None  # of the last direct call
        self._finds_call = False  # whether the parser is given the head of what may be a direct call
        self._found: CallHead | None = None
        self._direct: DirectCall | None = None  # whose body is being received
        self._pipelined = b""  # received after a direct call that has no response yet
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
        self._running_cycle: RequestResponseCycle | DirectCall | None = None
        self._writer: _ResponseWriter | None = None  # of the running cycle
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
        self._direct = self._running_cycle = None  # calls refer to their connection
        if isinstance(self.cycle, DirectCall):
            self.cycle = None  # type: ignore[assignment]  # uvicorn has none before the first request
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.connected:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # Reading

    def receive_buffer(self) -> memoryview:
        """Return the memory that the next bytes are to be received in."""
        if self._direct is not None:
            body = self._direct.body_buffer()
            return self._listener.received if body is None else body
        return self._listener.received[: _FIRST_READ if self._read_state == "idle" else _RECEIVE_BUFFER]

    def buffer_received(self, count: int) -> None:
        """Handle the bytes received in `receive_buffer`."""
        if self._direct is None:
            self.data_received(bytes(self._listener.received[:count]))
        elif not self._ignores_input:
            self._receive_direct_body(count)

    def _receive_direct_body(self, count: int) -> None:
        """Account for bytes of a direct call's body; what follows the end of one that is dropped is another request."""
        assert self._direct is not None
        call, own = self._direct, min(count, self._direct.remaining)
        following = bytes(self._listener.received[own:count])
        call.body_received(own)
        if not call.remaining:
            self._end_direct_body(call)
            if following:
                self.data_received(following)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes received, within the limits."""
        if self._ignores_input or self.transport.is_closing():  # TLS still passes on what arrived before
            return
        unanswered, app = self._unanswered(), self._listener.direct
        if self._pipelined or isinstance(unanswered, DirectCall):
            self._keep_pipelined(data)
        elif app is not None and unanswered is None and self._read_state == "idle" and data.startswith(b"POST /"):
            self._receive_call(data, app)
        else:
            self._parse(data)

    def _receive_call(self, data: bytes, app: DirectApp) -> None:
        """Start a direct call, or pass what is none to the parser."""
        head = self._head
        if head is None or not data.startswith(head.raw):
            end = data.find(b"\r\n\r\n", 0, _FIRST_READ) + 4
            if end < 4 or self._health_only:
                self._parse(data)
                return
            head = self._parse_head(data[:end])
            if head is None:
                if len(data) > end and not self._ignores_input:
                    self._parse(data[end:])
                return
            self._head = head
            self._start_parser()  # this one expects a body
        self._start_direct(head, app, data)

    def _parse_head(self, data: bytes) -> CallHead | None:
        """Parse a whole head; return it if it is that of a direct call, else the request has begun as usual."""
        self._finds_call = True
        self._parse(data)
        self._finds_call = False
        found, self._found = self._found, None
        return None if found is None else replace(found, raw=data)

    def _start_direct(self, head: CallHead, app: DirectApp, data: bytes) -> None:
        start, end = len(head.raw), len(head.raw) + head.length
        self._read_state = self._timed_state = "body"
        self._request_bytes = self._body_bytes = 0
        self._connections.used(self)
        call = self._direct = DirectCall(self, app, self._listener.buffers, head)
        self.cycle = call  # type: ignore[assignment]  # what this class and uvicorn's use of a cycle
        self._begin_response(call, None)
        call.start(data[start:end])
        if call.remaining:
            self._set_deadline(self._limits.body)
        else:
            self._end_direct_body(call)
        if len(data) > end:
            self._keep_pipelined(data[end:])
            if call.response_complete:
                self.loop.call_soon(self._receive_pipelined)

    def _end_direct_body(self, call: DirectCall) -> None:
        self._direct, self._read_state, self._deadline = None, "idle", inf
        if call.response_complete:
            self._set_deadline(self._limits.keep_alive)

    def _keep_pipelined(self, data: bytes) -> None:
        """Keep what follows a direct call until that is answered; reading is paused."""
        if self._connections.pipelined_bytes + len(data) > _MAX_PIPELINED_BYTES:
            self._pipelined = b""
            self._reject(503, _PIPELINED_REMEDY)
            return
        self._count_pipelined(len(data))
        self._pipelined += data
        self._flow.pause_reading()
        self._flow.pipelining = True
        self._check_peer_after(_PEER_CHECK_INTERVAL)  # a disconnect is not reported while reading is paused

    def _receive_pipelined(self) -> None:
        data, self._pipelined = self._pipelined, b""
        self._resume_after_pipelined()
        if not self.transport.is_closing():
            self._await_request()
            self.data_received(data)

    def _unanswered(self) -> "RequestResponseCycle | DirectCall | None":
        """The running request, if its response is not complete."""
        running = self._running_cycle
        return None if running is None or running.response_complete else running

    def _parse(self, data: bytes) -> None:
        self._received_bytes = len(data)
        if self._read_state != "idle":
            self._request_bytes += self._received_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._reject(*(self._parse_error or (400, f"malformed HTTP request: {_reason(error)}")))
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        else:
            if self._read_state != "idle":
                self._check_incomplete_request()

    def _parse_without_upgrade(self, following: bytes) -> None:
        """Parse a request for another protocol, at whose head the parser ends, without what HTTP allows to ignore."""
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings")]
        self._start_parser()
        self._parse(b"".join((line, *kept, b"\r\n", following)))

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
        if self.scheme == "https" or self._read_state == "body" or self._unanswered() is None:
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
        state, running = _tcp_state(self.transport), self._unanswered()
        if state is None or self.transport.is_closing() or running is None:
            return
        if state == _TCP_CLOSE:
            self.transport.abort()
            return
        if state == _TCP_CLOSE_WAIT and not self._half_closed:
            self._half_closed = True
            if not running.response_started and _http_version(running) == "1.1":
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
        if self.parser.should_upgrade():
            return  # it is parsed again
        self._body_chunks, self._buffered_bytes = [], 0
        if self._finds_call and self._find_call():
            return
        self._connections.used(self)
        super().on_headers_complete()
        self._read_state = "body"
        if self.pipeline:
            self._flow.pipelining = True
            self._check_peer_after(_PEER_CHECK_INTERVAL)  # a disconnect is not reported while reading is paused
        if self.expect_100_continue or self._health_only:
            # After an early rejection the client may or may not send the body, so the next request cannot be found.
            self.cycle.keep_alive = False

    def _find_call(self) -> bool:
        """Whether the head is that of a direct call."""
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if (
            not length.isdigit()
            or not 0 < int(length) <= _DIRECT_BODY
            or not _NOT_DIRECT.isdisjoint(headers)
            or self.parser.get_http_version() != "1.1"
            or not self.url.isascii()
            or any(mark in self.url for mark in b"%?#")
        ):
            return False
        assert self._listener.direct is not None
        path = self.url.decode()
        handler = self._listener.direct.find_inference(path)
        if handler is None:
            return False
        self._found = CallHead(b"", path, headers, int(length), handler, self.parser.should_keep_alive())
        return True

    def _start_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools < 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

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
        if self.parser.get_method() == b"CONNECT":
            self._raise_parse_error(400, "this is no proxy: CONNECT is not supported; send another method")
        if self._unanswered() is not None:
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
        if self._connections.pipelined_bytes + count > _MAX_PIPELINED_BYTES:
            self._body_chunks = []
            self._raise_parse_error(503, _PIPELINED_REMEDY)
        self._count_pipelined(count)

    def _count_pipelined(self, count: int) -> None:
        self._connections.pipelined_bytes += count
        self._pipelined_bytes += count

    def _release_pipelined(self) -> None:
        self._connections.pipelined_bytes -= self._pipelined_bytes
        self._pipelined_bytes = 0

    def on_message_complete(self) -> None:
        """Pass the whole body to the app and stop the read deadline."""
        if self.parser.should_upgrade():
            return
        self._read_state, self._deadline = "idle", inf
        if self._body_chunks:
            self.cycle.body = b"".join((self.cycle.body, *self._body_chunks))  # type: ignore[assignment]  # bytes suffice
            self._body_chunks = []
        super().on_message_complete()
        if self.cycle.response_complete:
            self._set_deadline(self._limits.keep_alive)

    # Responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        writer = _ResponseWriter(self.transport)
        cycle.transport = writer  # type: ignore[assignment]  # what a cycle needs of it
        self._begin_response(cycle, writer)
        super()._start_asgi_task(cycle, app)

    def _begin_response(self, cycle: "RequestResponseCycle | DirectCall", writer: _ResponseWriter | None) -> None:
        self._running_cycle, self._writer = cycle, writer
        if self._response_timer is not None:  # of the previous response
            self._stop_response_timer()
            self._start_write_timers()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, close the connection, or wait for a request."""
        self.server_state.total_requests += 1
        if self._writer is not None:
            self._writer.flush()
        if self._response_timer is not None and not self.flow.write_paused:
            self._stop_response_timer()
        if self.transport.is_closing():
            self._connections.closing(self)
            self._start_write_timers()
            return
        if self._pipelined:
            self.loop.call_soon(self._receive_pipelined)
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._pending_error is not None:
            self._send_and_close(self._pending_error)
        elif self._half_closed or self._ignores_input:
            self._close()
        else:
            self._await_request()
        if not (self.pipeline or self._pipelined) and self.flow.read_paused:
            self._resume_after_pipelined()

    def _await_request(self) -> None:
        self._connections.idle(self)
        if self._read_state == "idle":
            self._set_deadline(self._limits.keep_alive)

    def _resume_after_pipelined(self) -> None:
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
            if self._unanswered() is None:
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
        if self._unanswered() is None:
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


def _http_version(cycle: RequestResponseCycle | DirectCall) -> str:
    return cycle.http_version if isinstance(cycle, DirectCall) else cycle.scope["http_version"]


def _mark_disconnected(cycle: RequestResponseCycle | DirectCall) -> None:
    if isinstance(cycle, DirectCall):
        cycle.disconnect()
        return
    cycle.disconnected = True
    cycle.message_event.set()


def _reason(error: httptools.HttpParserError) -> str:
    """Describe a parser error; one from uvicorn's callbacks is an invalid request target."""
    return "invalid request target" if isinstance(error, httptools.HttpParserCallbackError) else str(error).lower()


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
