"""One connection: what a client may send, how long it may take, and what it hears when it does otherwise."""

import asyncio
import logging
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Literal, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.protocol import render_error

_log = logging.getLogger("batchwright.connection")
_Stage = Literal["between", "headers", "body"]  # where the parser stands; between: requests
_HELD = 2**20  # bytes of a body that wait for its end
_MAX_HEAD = 2**16  # bytes of request line and headers, and of whatever frames a body
_MAX_HEADERS = 200
_MAX_PIPELINED = 128  # requests that wait for the answer of the one before
_MAX_DISCARDED = 2**27  # bytes read of a body, its refusal being sent, so that the client comes to read the refusal
_MAX_CONNECTIONS = 4096  # of 7 to 11 KB each while nothing is asked
_OTHER_FILES = 128  # that a process needs beside its connections
_PARTING = 64  # connections beside them that are about to end, having heard a last word; any more are cut at once
_RETRY = b"retry-after: 1\r\n"
_LINGER = 1.0  # s; closing with bytes unread would reset the connection, and the refusal be lost


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a connection, s.

    Attributes:
        headers: from connecting, or from the first byte of a later request, to the end of its headers.
        body: from the end of the headers to the end of the body.
        reading: for the client to take some of what was written, once buffers are full.
        keep_alive: between an answer and the next request.
    """

    headers: float = 20.0
    body: float = 60.0
    reading: float = 30.0
    keep_alive: float = 90.0  # longer than any client's pool keeps a connection, or it would post into a closed one


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits, and an app that is woken once for a body, not once for every 64 KiB of it.

    A picture then comes without pausing the connection in the middle, and with two copies fewer. What is over
    `_HELD` goes to the app piece by piece, so that its own limit holds.

    One timer serves all limits of time. It is not moved with every request: it fires, sees what is due now, and is
    set again, so that a request costs no timer.
    """

    def __init__(
        self,
        limits: TimeLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Uvicorn gives all but `limits`, by these names."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
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
        """Take a client, who has so long to send a first request, if there is room for another."""
        super().connection_made(transport)
        room, all_of_them = _room(), self.server_state.connections
        if len(all_of_them) > room + _PARTING:
            self.transport.abort()
        elif len(all_of_them) > room and _served(all_of_them) > room:
            _log.warning("%d connections are open, the limit; another one is refused", room)
            self._say_and_close(_error(503, f"{room} connections are open, the limit; come again later", _RETRY))
        else:
            self._limit(self._limits.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the app, whose request need not be the last one parsed."""
        for timer in (self._timer, self._stuck):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        super().connection_lost(exc)

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
        if len(self.headers) > _MAX_HEADERS:
            self._fail(431, f"{len(self.headers)} headers, the limit is {_MAX_HEADERS}; send fewer")
        if self._head_is_too_large():
            self._fail(431, f"the headers are over {_MAX_HEAD} bytes; send fewer")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail(400, f"over {_MAX_PIPELINED} requests sent ahead of their answers; wait for some")
        if self.parser.should_upgrade() and self.parser.get_method() not in (b"GET", b"HEAD"):
            # The parser would take the body for another protocol's bytes.
            self._fail(400, "there is no protocol to upgrade to; send the request in HTTP/1.1 without Upgrade")
        self._pieces, self._held = [], 0
        super().on_headers_complete()
        self._stage = "body"
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # refused early, the body may come or not: the next request could not be told

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
        self._pieces.append(body)
        self._held += len(body)
        if self._held > _HELD:
            pieces, self._pieces, self._held = self._pieces, [], 0
            super().on_body(b"".join(pieces))

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

    def on_response_complete(self) -> None:
        """Begin the next of several pipelined requests, or wait for one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._watch_reading()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say_and_close(self._last_words)
        elif self._stage == "between":
            self._limit(self._limits.keep_alive)

    def pause_writing(self) -> None:
        """The client does not take its answer: wait a while."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """It does."""
        if self._stuck is not None and not self.transport.is_closing():
            self._stuck.cancel()
        super().resume_writing()

    def _watch_reading(self) -> None:
        """See after a while whether the client has taken something: what it never reads is not kept for ever."""
        if self._stuck is not None:
            self._stuck.cancel()
        self._unread = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self._limits.reading, self._on_unread)

    def _on_unread(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_reading()
            return
        _log.debug("a client has read nothing for %g s, %d bytes are dropped", self._limits.reading, self._unread)
        self.transport.abort()

    # Refusing

    def _fail(self, status: int, message: str) -> NoReturn:
        """Leave a callback of the parser, which keeps no exception but its own."""
        self._problem = (status, message)
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """End the connection with an error, in the place of the answer to the request at fault."""
        self._deaf, self._due = True, inf
        words = _error(status, message)
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
        self.transport.write(words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._limit(_LINGER)
        else:
            self._close()

    def _close(self) -> None:
        self._deaf = True
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


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _reason(error: httptools.HttpParserError) -> str:
    """What the parser says; what it only reports from a callback was an address that cannot be read."""
    return "its address cannot be read" if isinstance(error, httptools.HttpParserCallbackError) else str(error).lower()


def _served(connections: Iterable[object]) -> int:
    """How many of them are not about to end."""
    return sum(isinstance(one, Connection) and not one._deaf for one in connections)


def _room() -> int:
    """Connections that may be open at once: fewer where the system allows few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(files // 2, files - _OTHER_FILES))


def _error(status: int, message: str, more: bytes = b"") -> bytes:
    body = render_error(message)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + more + b"\r\n" + body
