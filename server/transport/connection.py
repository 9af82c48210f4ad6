"""Connections: how many may be open, what a client may send, how long it may take, and the errors it gets."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Mapping
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
_Stage = Literal["between", "headers", "body"]  # where the parser stands; between: requests
_HELD = 2**18  # bytes of a body that wait for its end
_MAX_HEAD = 2**16  # bytes of request line and headers, and of whatever frames a body
_MAX_HEADERS = 200
_PIPELINED_REQUEST = 2**13  # bytes that one takes beside its body
_MAX_PIPELINED_BYTES = 2**24  # of all connections together
_SEND_BUFFER = 2**18  # bytes of an answer that the kernel may hold for a connection; it would grow to some megabytes
_WRITE_BUFFER = 2**14  # bytes of an answer that a connection may hold before it waits for its client
_MAX_PIPELINED = 16  # requests that wait for the answer of the one before; each takes some 7 KB and 50 us
_MAX_DISCARDED = 2**27  # bytes read of a body, its refusal being sent, so that the client comes to read the refusal
_MAX_CONNECTIONS = 4096  # of 7 to 11 KB each while nothing is asked
_OTHER_FILES = 128  # that a process needs beside its connections
_RESERVED = 32  # connections beside them that only health checks may use
_HEALTH = b"/v2/health/"
_RETRY = b"retry-after: 1\r\n"
_LINGER = 1.0  # s; closing with bytes unread would reset the connection, and the refusal be lost
_PEER_CHECK = 0.05  # s between two looks at whether a client that sends nothing more is still there; doubled each time
_MAX_PEER_CHECK = 1.0  # s
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # states in Linux's tcp_info


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a connection, s.

    Attributes:
        headers: from connecting, or from the first byte of a later request, to the end of its headers.
        body: from the end of the headers to the end of the body.
        reading: for the client to take some of what was written, once buffers are full.
        answer: for the client to take the whole answer, from when buffers are first full.
        keep_alive: between an answer and the next request.
    """

    headers: float = 20.0
    body: float = 60.0
    reading: float = 30.0
    answer: float = 300.0
    keep_alive: float = 90.0  # longer than any client's pool keeps a connection, or it would post into a closed one


class ConnectionLimit:
    """Bounds the open connections of a server, TLS handshakes included.

    Over the limit the connection that has been idle longest makes room: first one that is about to be closed, then one
    that has never completed the headers of a request, then one that is kept alive. If all are in use, a few more are
    accepted for health checks alone, so that an orchestrator does not kill a busy server.

    Attributes:
        pipelined_bytes: that pipelined requests of all connections hold before their turn.
    """

    def __init__(self) -> None:
        """No connection is open."""
        self._open: set[Connection] = set()
        # each in the order in which connections became idle; a dict, to take one out of the middle at no cost
        self._closing: dict[Connection, None] = {}
        self._unused: dict[Connection, None] = {}
        self._kept: dict[Connection, None] = {}
        self._warned = False
        self.pipelined_bytes = 0

    def opened(self, connection: "Connection") -> bool:
        """Count a new connection, and make room for it; whether it is one of the few for health checks alone."""
        room, reserved = max_connections(), False
        if len(self._open) >= room:
            self._warn(room)
            victim = next((one for group in (self._closing, self._unused, self._kept) for one in group), None)
            if victim is not None:
                self.closed(victim)
                victim.abort()
            else:
                reserved = True
        self._open.add(connection)
        self._unused[connection] = None
        if len(self._open) > room + _RESERVED:
            self.closed(connection)
            connection.abort()
        return reserved

    def used(self, connection: "Connection") -> None:
        """A request began on it: it is not idle."""
        self._unused.pop(connection, None)
        self._kept.pop(connection, None)

    def idle(self, connection: "Connection") -> None:
        """Its last request is answered; it is kept alive."""
        if connection in self._open:
            self._kept[connection] = None

    def closing(self, connection: "Connection") -> None:
        """It gets no more answers, and is open only until the client has read the last one."""
        if connection in self._open:
            self.used(connection)
            self._closing[connection] = None

    def closed(self, connection: "Connection") -> None:
        """It is gone, or about to be."""
        self._open.discard(connection)
        self._closing.pop(connection, None)
        self.used(connection)

    def _warn(self, room: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%d connections are open, the limit; from now on idle ones are closed to make room", room)


@dataclass(frozen=True)
class Listening:
    """What all connections of a server share.

    Attributes:
        limits: time limits of each connection.
        tls: the server's certificate; None: plain HTTP.
        reload: by name of a file, the function that reads it again; called on SIGHUP.
        connections: the limit on their number.
    """

    limits: TimeLimits = field(default_factory=TimeLimits)
    tls: Tls | None = None
    reload: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    connections: ConnectionLimit = field(default_factory=ConnectionLimit)


class _Flow(FlowControl):
    """uvicorn's flow control, which does not resume reading while pipelined requests wait.

    A running request resumes reading in order to notice that its client leaves; what is read then would pile up.
    """

    pipelining = False

    def resume_reading(self) -> None:
        """Read on, unless requests that were read already wait for their turn."""
        if not self.pipelining:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits, and an app that is woken once for a body, not once for every 64 KiB of it.

    A picture then comes without pausing the connection in the middle, and with two copies fewer. What is over
    `_HELD` goes to the app piece by piece, so that its own limit holds. Pipelined requests are read at most as far as
    one read of the socket goes, 256 KiB.

    A client may close its sending side after its last request and still get the answer, except over TLS. A client that
    is gone sends the same FIN, so an interim response (100 Continue, which clients must accept, RFC 9110 section 15.2)
    is sent: a closed socket answers it with RST.

    One timer serves the limits of time for reading. It is not moved with every request: it fires, sees what is due now,
    and is set again, so that a request costs no timer.
    """

    def __init__(
        self,
        listening: Listening,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Uvicorn gives all but `listening`, by these names."""
        super().__init__(config, server_state, app_state, _loop)
        self._connections = listening.connections
        self._limits = listening.limits
        self.connected = False  # it is not before the TLS handshake
        self.handshake: asyncio.Task[None] | None = None
        self._health_only = False
        self._pipelined_bytes = 0
        self._half_closed = False
        self._peer_check: asyncio.TimerHandle | None = None
        self._too_slow: asyncio.TimerHandle | None = None
        self._stage: _Stage = "between"
        self._timed: _Stage = "between"  # the stage that `_due` is for
        self._due = self._fires = inf
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes, when `_stuck` was set
        self._pieces: list[bytes] = []
        self._held = self._payload = self._fed = self._chunk = 0
        self._running: RequestResponseCycle | None = None
        self._problem: tuple[int, str] | None = None
        self._deaf = False  # nothing more is read
        self._last_words: bytes | None = None  # to be said after the answers that are still due

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the headers of the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_BUFFER)
        plain = transport.get_extra_info("socket")
        if plain is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.connected = True
        self.flow = self._flow = _Flow(transport)
        if self.scheme == "http":
            self.accepted()
        if not transport.is_closing():
            self._limit(self._limits.headers)

    def accepted(self) -> None:
        """Register the connection with the limit, which may close an idle one."""
        self._health_only = self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the app, whose request need not be the last one parsed."""
        self._connections.closed(self)
        self._release_pipelined()
        for timer in (self._timer, self._stuck, self._too_slow, self._peer_check):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close it at once."""
        if self.connected:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # Reading

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the limits."""
        if self._deaf:
            return
        self._chunk = len(data)
        if self._stage != "between":
            self._fed += self._chunk
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(*(self._problem or (400, f"this is no HTTP request: {_reason(error)}")))
        except httptools.HttpParserUpgrade:
            # Served as HTTP/1.1, which the client must accept; the parser takes nothing more after it.
            self._deaf, self.cycle.keep_alive = True, False
        else:
            if self._stage != "between":
                self._check_unfinished()

    def _check_unfinished(self) -> None:
        """Bound what the parser keeps to itself, endless lines, trailers and chunk sizes, and the time for it."""
        if self._fed > _MAX_HEAD + 2 * self._payload or (self._stage == "headers" and self._head_is_too_large()):
            self._refuse(431, f"the headers are over {_MAX_HEAD} bytes; send fewer")
        elif self._payload > _MAX_DISCARDED and self.cycle.response_complete:
            self._close()
        elif self._timed != self._stage:
            self._timed = self._stage
            self._limit(self._limits.headers if self._stage == "headers" else self._limits.body)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more; it still gets the answers to what it has sent in full."""
        unanswered = self._running is not None and not self._running.response_complete
        if self.scheme == "https" or self._stage == "body" or not unanswered:
            return None  # which closes the connection
        self._deaf, self._due = True, inf
        self._check_peer_after(_PEER_CHECK)
        return True

    def _check_peer_after(self, seconds: float) -> None:
        if self._peer_check is None:
            self._peer_check = self.loop.call_later(seconds, self._check_peer, seconds)

    def _check_peer(self, waited: float) -> None:
        """End the connection if the client is gone, which is not seen while nothing is read."""
        self._peer_check = None
        state = _tcp_state(self.transport)
        if state is None or self.transport.is_closing() or self._running is None or self._running.response_complete:
            return
        if state == _TCP_CLOSE:
            self.transport.abort()
            return
        if state == _TCP_CLOSE_WAIT and not self._half_closed:
            self._half_closed = True
            if not self._running.response_started and self._running.scope["http_version"] == "1.1":
                self.transport.write(STATUS_LINE[100] + b"\r\n")
            waited = _PEER_CHECK / 2
        self._check_peer_after(min(2 * waited, _MAX_PEER_CHECK))

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._stage, self._timed, self._fed, self._payload = "headers", "between", 0, 0
        super().on_message_begin()
        self.scope["state"]["began"] = monotonic()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; what follows the body as a trailer is not one."""
        if self._stage != "headers":
            return
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._fail(400, "Transfer-Encoding can only be chunked here; name compression in Content-Encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the app, or refuse."""
        self._check_headers()
        self._pieces, self._held = [], 0
        self._connections.used(self)
        super().on_headers_complete()
        self._stage = "body"
        if self.pipeline:
            self._flow.pipelining = True
            self._check_peer_after(_PEER_CHECK)  # a disconnect is not seen while reading is paused
        if self.expect_100_continue or self._health_only:
            self.cycle.keep_alive = False  # refused early, the body may come or not: the next request could not be told

    def _check_headers(self) -> None:
        if len(self.headers) > _MAX_HEADERS:
            self._fail(431, f"{len(self.headers)} headers, the limit is {_MAX_HEADERS}; send fewer")
        if self._head_is_too_large():
            self._fail(431, f"the headers are over {_MAX_HEAD} bytes; send fewer")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail(400, f"over {_MAX_PIPELINED} requests sent ahead of their answers; wait for some")
        if self._health_only and not self.url.startswith(_HEALTH):
            room = max_connections()
            self._fail(503, f"{room} connections are in use, the limit; send the request again later")
        if self.parser.should_upgrade() and self.parser.get_method() not in (b"GET", b"HEAD"):
            # The parser would take the body for another protocol's bytes.
            self._fail(400, "there is no protocol to upgrade to; send the request in HTTP/1.1 without Upgrade")
        if self._running is not None and not self._running.response_complete:
            self._charge_pipelined(_PIPELINED_REQUEST)

    def _head_is_too_large(self) -> bool:
        """Counted in full only where so much came; some of it may be the end of the request before."""
        if self._fed + self._chunk <= _MAX_HEAD:
            return False
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > _MAX_HEAD

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._payload += len(body)
        if self.cycle.response_complete:
            return
        if self.pipeline:
            self._charge_pipelined(len(body))
        self._pieces.append(body)
        self._held += len(body)
        if self._held > _HELD:
            pieces, self._pieces, self._held = self._pieces, [], 0
            super().on_body(b"".join(pieces))

    def _charge_pipelined(self, count: int) -> None:
        """Count bytes of a request that waits for its turn; end the connection if all such requests hold too many."""
        limit = self._connections
        if limit.pipelined_bytes + count > _MAX_PIPELINED_BYTES:
            self._pieces = []
            self._fail(503, "too many requests are sent ahead of their answers; wait for each answer")
        limit.pipelined_bytes += count
        self._pipelined_bytes += count

    def _release_pipelined(self) -> None:
        self._connections.pipelined_bytes -= self._pipelined_bytes
        self._pipelined_bytes = 0

    def on_message_complete(self) -> None:
        """Hand the body over; from here the time is the server's own."""
        self._stage, self._due = "between", inf
        if self._pieces:
            self.cycle.body = b"".join((self.cycle.body, *self._pieces))  # type: ignore[assignment]  # bytes will do
            self._pieces = []
        super().on_message_complete()
        if self.cycle.response_complete:
            self._limit(self._limits.keep_alive)

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)
        if self._too_slow is not None:  # the time for the last answer does not count for this one
            self._stop_timing_answer()
            self._watch_reading()

    def on_response_complete(self) -> None:
        """Begin the next of several pipelined requests, or wait for one."""
        self.server_state.total_requests += 1
        if self._too_slow is not None and not self.flow.write_paused:
            self._stop_timing_answer()
        if self.transport.is_closing():
            self._connections.closing(self)
            self._watch_reading()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say_and_close(self._last_words)
        elif self._half_closed or self._deaf:
            self._close()
        else:
            self._connections.idle(self)
            if self._stage == "between":
                self._limit(self._limits.keep_alive)
        if not self.pipeline:
            self._release_pipelined()
            self._flow.pipelining = False
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client does not take its answer: wait a while."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """Stop the timers when the client takes data."""
        if not self.transport.is_closing():
            if self._stuck is not None:
                self._stuck.cancel()
            if self._running is None or self._running.response_complete:
                self._stop_timing_answer()
        super().resume_writing()

    def _watch_reading(self) -> None:
        """See after a while whether the client has taken something, and after a longer while whether it took it all."""
        if self._stuck is not None:
            self._stuck.cancel()
        if self._too_slow is None:
            self._too_slow = self.loop.call_later(self._limits.answer, self._on_too_slow)
        self._unread = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self._limits.reading, self._on_unread)

    def _on_unread(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_reading()
            return
        _log.debug("a client has read nothing for %g s, %d bytes are dropped", self._limits.reading, self._unread)
        self.transport.abort()

    def _on_too_slow(self) -> None:
        _log.debug("a client has not read its answer within %g s", self._limits.answer)
        self.transport.abort()

    def _stop_timing_answer(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    # Refusing

    def _fail(self, status: int, message: str) -> NoReturn:
        """Leave a callback of the parser, which keeps no exception but its own."""
        self._problem = (status, message)
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """End the connection with an error, in the place of the answer to the request at fault."""
        self._deaf, self._due = True, inf
        words = _error(status, message, _RETRY if status == 503 else b"")
        if self._stage == "body":
            if self.pipeline:
                self.pipeline.popleft()  # it has not begun
            elif self.cycle.response_started:
                words = b""
            else:
                _disconnect(self.cycle)
                self._say_and_close(words)
                return
        if self._running is None or self._running.response_complete:
            self._say_and_close(words)
        else:
            self._last_words = words

    def _say_and_close(self, words: bytes) -> None:
        if self.transport.is_closing():
            return
        self._deaf = True
        self._connections.closing(self)
        self.transport.write(words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._limit(_LINGER)
        else:
            self._close()

    def _close(self) -> None:
        self._deaf = True
        self._connections.closing(self)
        self._watch_reading()
        self.transport.close()

    # Time

    def _limit(self, seconds: float) -> None:
        self._due = self.loop.time() + seconds
        if self._due < self._fires:
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        self._fires = self._due
        self._timer = None if self._due == inf else self.loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        if self.loop.time() < self._due:
            self._set_timer()
            return
        self._timer, self._fires, self._due = None, inf, inf
        self._out_of_time()

    def _out_of_time(self) -> None:
        if self._deaf or self.transport.is_closing():
            self._close()
        elif self._stage == "headers":
            self._refuse(408, f"the headers were not complete within {self._limits.headers:g} s")
        elif self._stage == "between" or self.cycle.response_complete:
            self._close()
        elif self.pipeline:
            self._limit(self._limits.body)  # it was not read yet
        else:
            self._refuse(408, f"the body was not complete within {self._limits.body:g} s")


class TlsAcceptor(asyncio.Protocol):
    """Begins the TLS handshake of a connection that has just been accepted.

    The event loop's own server would report a connection only after its handshake, so that the limits on the number of
    connections and on time would not cover it.
    """

    def __init__(self, listening: Listening, **given: Any) -> None:
        """As `Connection`; `listening` has a TLS context."""
        self._listening = listening
        self._connection = Connection(listening, **given)
        self._loop = self._connection.loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket away from the plain transport, which has read nothing yet."""
        accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        accepted.setblocking(False)
        transport.abort()  # type: ignore[attr-defined]  # a Transport; its copy of the socket alone is closed
        handshake = self._connection.handshake = self._loop.create_task(self._shake_hands(accepted))
        handshake.add_done_callback(lambda _: self._ended(accepted))
        self._connection.accepted()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        assert self._listening.tls is not None  # or there would be no handshake
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._connection,
                accepted,
                ssl=self._listening.tls.context,
                ssl_handshake_timeout=self._listening.limits.headers,
            )
        except OSError as error:  # ssl.SSLError is an OSError
            _log.debug("a TLS handshake failed: %s", error)

    def _ended(self, accepted: socket.socket) -> None:
        if not self._connection.connected:
            self._listening.connections.closed(self._connection)
            accepted.close()


def accept(listening: Listening) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes a protocol with for each connection."""
    return partial(Connection if listening.tls is None else TlsAcceptor, listening)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _reason(error: httptools.HttpParserError) -> str:
    """What the parser says; what it only reports from a callback was an address that cannot be read."""
    return "its address cannot be read" if isinstance(error, httptools.HttpParserCallbackError) else str(error).lower()


def max_connections() -> int:
    """How many connections may be open at once: fewer where the system allows few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(files // 2, files - _OTHER_FILES))


def _tcp_state(transport: asyncio.Transport) -> int | None:
    """The state of a connection as the kernel names it; None where it does not tell."""
    try:
        return int(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    except (AttributeError, OSError):  # another system than Linux, or a socket that is closed
        return None


def _error(status: int, message: str, more: bytes = b"") -> bytes:
    body = render_error(message)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + more + b"\r\n" + body
