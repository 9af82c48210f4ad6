"""HTTP/1.1 connections: one request at a time, within limits on number, size and time, and the error responses."""

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from server.errors import render_error
from server.transport.chunked_body import ChunkedBody, ChunkedBodyError
from server.transport.connection_limits import ConnectionLimit, TimeLimits, max_connections
from server.transport.http_call import Buffers, HttpApp, HttpCall, RequestHead
from server.transport.tls import Tls

_log = logging.getLogger("batchwright.connection")
_RECEIVE_BUFFER = 2**18  # bytes that are read at once
_FIRST_READ = 2**13  # bytes read at the start of a request, so that most of a body can be received in place
_CHUNKED_READ = 2**16  # bytes read at once of a chunked body; other requests may follow it
_MAX_HEADER_BYTES = 2**16  # bytes of request line and headers, and of trailers and chunk sizes
_MAX_HEADER_COUNT = 200
_SEND_BUFFER = 2**18  # bytes of a response in the kernel's send buffer; the default grows to some megabytes
_WRITE_BUFFER = 2**14  # bytes of a response in the transport's buffer before writing pauses
_MAX_DISCARDED = 2**27  # bytes of a rejected body that are read and dropped, so that the client reads the response
_HEALTH_PREFIX = b"/v2/health/"
_LONGEST_REPEATED = 2**11  # bytes of a head that is kept, as the next request may have the same
_NO_HEAD = b"\0"  # no request begins with it
_RETRY_AFTER = b"retry-after: 1\r\n"
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
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

    limits: TimeLimits = field(default_factory=TimeLimits)
    tls: Tls | None = None
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)
    buffers: Buffers = lambda size: memoryview(bytearray(size))
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BUFFER)))


class Connection(asyncio.BufferedProtocol):
    """One connection, whose requests are served one after another, each in a task.

    httptools parses heads only, so that an upgrade to another protocol is ignored, as HTTP allows. A body is received
    in place, in memory of its length, once the handler reads it; until then reading is paused. What a client sends
    after a whole request, about one read of the socket, is kept until that is answered. Then reading is paused.

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
        self._parser: httptools.HttpRequestParser | None = None  # None between requests
        self._began = 0.0  # at its first byte, s of time.monotonic
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead | None = None  # the last one; None until all of it was parsed
        self._raw_head = _NO_HEAD  # its bytes if they arrived at once
        self._is_whole = False
        self._chunked: ChunkedBody | None = None  # that arrives
        self._parsed_bytes = self._body_bytes = 0
        self._parse_error: tuple[int, str] | None = None
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
        self._response_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when `_stall_timer` was set

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
        for timer in (self._read_timer, self._stall_timer, self._response_timer):
            if timer is not None:
                timer.cancel()
        call, self._call, self._parser, self._chunked, self._kept = self._call, None, None, None, b""
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
        """Start a call once its head is whole; a head that repeats the last one is not parsed."""
        begins = self._parser is None
        if begins:
            self._parsed_bytes = self._body_bytes = 0
        if begins and self._head is not None and data.startswith(self._raw_head):
            self._began, head, following = monotonic(), self._head, data[len(self._raw_head) :]
        else:
            if begins:
                self._parser = httptools.HttpRequestParser(self)
                self._head, self._headers, self._url, self._began = None, [], b"", 0.0
            following = self._parse(data)
            if self._ignores_input:
                return
            if self._head is None:
                if self._parsed_bytes > _MAX_HEADER_BYTES:
                    self._reject(431, f"the headers are over {_MAX_HEADER_BYTES} bytes; send fewer")
                return
            head, size = self._head, len(data) - len(following)
            self._raw_head = data[:size] if begins and size <= _LONGEST_REPEATED else _NO_HEAD
        self._connections.used(self)
        call = self._call = HttpCall(self, head, self._began)
        call.task = self.loop.create_task(self._serve(call))
        self._state.tasks.add(call.task)  # uvicorn waits for them when it stops
        call.task.add_done_callback(self._state.tasks.discard)
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
            call.task = None
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
            if self._chunked.other_bytes > _MAX_HEADER_BYTES + self._body_bytes:
                self._reject(431, f"the chunk sizes are over {_MAX_HEADER_BYTES} bytes; send longer chunks")
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

    def _parse(self, data: bytes) -> bytes:
        """Parse data up to the end of a head; return the rest.

        The parser is given the data up to each empty line, which may begin in the last read.
        """
        assert self._parser is not None
        start, begins = 0, not self._parsed_bytes
        try:
            while start < len(data) and self._head is None:
                if start < 3 and not begins:
                    end = start + 1
                else:
                    found = data.find(b"\r\n\r\n", max(start - 3, 0))
                    end = len(data) if found < 0 else found + 4
                self._parsed_bytes += end - start
                piece, start = data[start:end], end
                self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            self._reject(*(self._parse_error or (400, f"malformed HTTP request: {str(error).lower()}")))
        return data[start:]

    def on_message_begin(self) -> None:
        """Set the deadline at the first byte of a request."""
        self._began = monotonic()
        self._set_deadline(self._limits.headers)

    def on_url(self, url: bytes) -> None:
        """Add a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        name = name.lower()
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._raise_parse_error(400, "Transfer-Encoding can only be chunked; name compression in Content-Encoding")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head."""
        assert self._parser is not None
        if len(self._headers) > _MAX_HEADER_COUNT:
            self._raise_parse_error(431, f"{len(self._headers)} headers, the limit is {_MAX_HEADER_COUNT}; send fewer")
        if self._parsed_bytes > _MAX_HEADER_BYTES:
            self._raise_parse_error(431, f"the headers are over {_MAX_HEADER_BYTES} bytes; send fewer")
        if self._health_only and not self._url.startswith(_HEALTH_PREFIX):
            limit = max_connections()
            self._raise_parse_error(503, f"the limit of {limit} connections is reached; send the request again later")
        if self._parser.get_method() == b"CONNECT":
            self._raise_parse_error(400, "this is no proxy: CONNECT is not supported; send another method")
        if self._parser.should_upgrade():
            self._headers = [header for header in self._headers if header[0] not in _UPGRADE_HEADERS]
        try:
            self._head = RequestHead.of(self._parser, self._url, self._headers)
        except httptools.HttpParserInvalidURLError:
            self._raise_parse_error(400, "malformed HTTP request: invalid request target")
        if self._health_only:
            self._head.keep_alive = False

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
        if self._response_timer is not None and self.can_write:
            self._stop_response_timer()
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
        self._call = self._parser = self._chunked = None
        self._headers = []
        if self._raw_head is _NO_HEAD:
            self._head = None
        self._connections.idle(self)
        self._set_deadline(self._limits.keep_alive)
        if self._response_timer is not None:  # the last response is not read yet
            self._stop_response_timer()
            self._start_write_timers()
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
        self._start_write_timers()

    def resume_writing(self) -> None:
        """Stop the write timers when the client has read its response."""
        if not self.transport.is_closing():
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            if self._call is None or self._call.response_complete:
                self._stop_response_timer()
        self._writable.set()

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
        if self._ignores_input or self.transport.is_closing():
            self._close()
        elif self._call is not None:
            if self._call.response_complete:
                self._close()
            else:
                self._reject(408, f"the body was not complete within {self._limits.body:g} s; send it faster")
        elif self._began and self._parser is not None:
            self._reject(408, f"the headers were not complete within {self._limits.headers:g} s; send faster")
        else:
            self._close()


def _error_response(status: int, message: str, headers: bytes = b"") -> bytes:
    body = render_error(message)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + headers + b"\r\n" + body
