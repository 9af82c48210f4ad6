"""What every request passes first: its id, the keys, one line in the log. Bare ASGI, and a few microseconds."""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from itertools import count
from random import getrandbits
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ForbiddenError, ServerError, UnauthorizedError
from server.transport.asgi import Headers, below_root, headers_of, respond_error
from server.transport.auth import Keys

if TYPE_CHECKING:
    from server.telemetry.tracing import RequestSpan, Tracing

_log = logging.getLogger("batchwright.request")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# W3C Trace Context: version, trace id, parent id, flags; later versions may add more
_TRACE = re.compile(rb"(?!ff)([\da-f]{2})-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-([\da-f]{2})(-.*)?")
# pages, and what machines ask that hold no key; the page at / shows what /metrics tells, so what it asks is open
_PAGE = {"/", "/live", "/live/policy", "/assets/app.js", "/assets/charts.js", "/assets/style.css", "/assets/plotly.js"}
_OPEN = frozenset({"/docs", "/openapi.json", "/metrics", "/assets/plotly.css", *_PAGE})
_OPEN_BELOW = "/v2/health/"
_PIECE = 2**14  # bytes of a body that are sent at once; a little more may lie unsent in a connection
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_CHALLENGE: Headers = [(b"www-authenticate", b"Bearer")]


class Front:
    """Stands before the app.

    Authorisation goes by the decoded path below the ASGI `root_path`, the one that routes are chosen by, and before a
    byte of the body is read. The app gets that path without the prefix, so that the two cannot differ.

    Against cross-site requests, admin routes answer pages of this server alone. Against DNS rebinding, without keys,
    they answer only under loopback names, IP addresses and the bound host: to a browser, a page of evil.example whose
    name is made to mean 127.0.0.1 is of the same origin.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None = None,
        tracing: "Tracing | None" = None,
        host: str | None = None,
        refused: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Stands before one app.

        Args:
            app: answers.
            keys: without them everybody may call.
            tracing: without it nothing is traced.
            host: the name that the server was told to bind; it may be steered under it without keys.
            refused: hears of each call that does not get as far as the app: the status of its answer.
        """
        self._app = app
        self._keys = keys
        self._tracing = tracing
        self._host = host
        self._refused = refused
        self._ids = count()
        self._start = secrets.token_hex(6)  # so that two runs have no id in common

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = below_root(scope)
        headers = headers_of(scope)
        call = _Call(headers.get(b"x-request-id"), headers.get(b"traceparent"), send)
        if call.id is None:
            call.id = f"{self._start}-{next(self._ids):x}"
        scope["state"]["request_id"] = call.id
        if self._tracing is not None and not _is_open(scope["path"]):
            call.span = self._tracing.request(scope, headers, call.id)
        try:
            call.key = self._admit(scope["path"], headers, call.began)
            await self._app(scope, receive, call.send)
        except ServerError as error:
            self._refused(error.status)
            await respond_error(call.send, error, _CHALLENGE if isinstance(error, UnauthorizedError) else None)
        except Exception:  # noqa: BLE001  (a bug must not cost the client an answer, nor show what it was)
            _log.exception("request %s met a bug", call.id, extra={"request_id": call.id})
            if not call.status:
                await respond_error(call.send, ServerError("internal error; the server's log has the details"))
        finally:
            if call.span is not None:
                call.span.end(call.status)
            call.log(scope)

    def _admit(self, path: str, headers: Mapping[bytes, bytes], now: float) -> str | None:
        """The name of the key that opens this path; None where none is needed."""
        admin = path == "/admin" or path.startswith("/admin/")
        if admin:
            self._check_page(headers.get(b"origin"), headers.get(b"host", b""))
        if self._keys is None or _is_open(path):
            return None
        return self._keys.admit(headers.get(b"authorization"), "admin" if admin else "predict", now)

    def _check_page(self, origin: bytes | None, host: bytes) -> None:
        """A browser names the page that calls, and always the host: who names neither is no page.

        Raises:
            ForbiddenError: the page is not of this server, or may not be.
        """
        if self._keys is None and host and not _is_own(host.decode("latin-1"), self._host):
            raise ForbiddenError(
                f"{host[:80].decode('latin-1')!r} may be any page's name for this server; without an API key file the "
                "admin routes answer only under localhost, an IP address or the host that was bound"
            )
        if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
            raise ForbiddenError("a page of another origin calls; the admin routes answer only pages of this server")


def _is_own(host: str, bound: str | None) -> bool:
    """Whether nobody else can make this name mean the server: loopback, an address, or what it was told to bind."""
    name, bracket, _ = host.lower().removeprefix("[").partition("]")
    if not bracket:
        name = name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost") or (bound is not None and name == bound.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_open(path: str) -> bool:
    """Whether it needs no key, nor a span: it is asked every few seconds, and serves nobody."""
    return path in _OPEN or path.startswith(_OPEN_BELOW)


class _Call:
    """One request on its way.

    Attributes:
        id: from the client, if it sent a usable one.
        key: name of the key it came with.
        span: where it is traced.
        status: of the answer; 0 before it begins.
        began: s of time.monotonic.
    """

    __slots__ = ("_send", "_trace", "began", "id", "key", "span", "status")

    def __init__(self, request_id: bytes | None, traceparent: bytes | None, send: Send) -> None:
        self.id: str | None = None
        if request_id is not None and _ID.fullmatch(request_id):
            self.id = request_id.decode()
        self.key: str | None = None
        self.span: RequestSpan | None = None
        self.status = 0
        self.began = monotonic()
        self._trace = None if traceparent is None else _TRACE.fullmatch(traceparent)
        if self._trace is not None and self._trace[1] == b"00" and self._trace[4]:
            self._trace = None  # version 00 has nothing more to say
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on, with the headers that every answer has; a large body goes in pieces."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = (b"x-request-id", (self.id or "").encode())
            message["headers"] = [*message.get("headers", ()), _NOSNIFF, request_id, *self._traced()]
        elif len(message.get("body", b"")) > _PIECE:
            return self._send_in_pieces(message)
        return self._send(message)

    async def _send_in_pieces(self, message: Message) -> None:
        """Wait after each piece until the client has taken most of it.

        The transport would copy, or encrypt, the whole body for each client that does not read.
        """
        body, more = message["body"], message.get("more_body", False)
        for end in range(_PIECE, len(body) + _PIECE, _PIECE):
            piece = body[end - _PIECE : end]
            await self._send({**message, "body": piece, "more_body": more or end < len(body)})
            await asyncio.sleep(0)  # other connections take turns, also while this one's client is fast

    def _traced(self) -> Headers:
        if self.span is not None:
            outward = self.span.traceparent
            return [] if outward is None else [(b"traceparent", outward)]
        if self._trace is None:
            return []
        return [(b"traceparent", b"00-%b-%016x-%b" % (self._trace[2], getrandbits(64) or 1, self._trace[3]))]

    def _trace_id(self) -> str | None:
        if self.span is not None:
            return self.span.trace_id
        return None if self._trace is None else self._trace[2].decode()

    def log(self, scope: Scope) -> None:
        """One line at debug; an error names the request at any level."""
        if self.status == 500:
            _log.error("request %s was answered 500", self.id, extra={"request_id": self.id})
        if not _log.isEnabledFor(logging.DEBUG):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status or 499,  # the client has gone
            "ms": round(1e3 * (monotonic() - self.began), 3),
            "request_id": self.id,
            "trace_id": self._trace_id(),
            "key": self.key,
        }
        _log.debug("request", extra=fields)
