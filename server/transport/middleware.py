"""ASGI middleware for every request: its id, authentication, browser protections, tracing and the access log."""

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

from server.errors import INTERNAL_ERROR, ForbiddenError, ServerError, UnauthorizedError
from server.transport.asgi import Headers, below_root, headers_of, respond_error
from server.transport.auth import Keys

if TYPE_CHECKING:
    from server.telemetry.tracing import RequestSpan, Tracing

_log = logging.getLogger("batchwright.request")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# W3C Trace Context: version, trace id, parent id, flags; later versions may add fields
_TRACEPARENT = re.compile(rb"(?!ff)([\da-f]{2})-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-([\da-f]{2})(-.*)?")
# Routes without a key: pages, health and metrics; the dashboard shows what /metrics exports, so its routes are public
_ASSETS = ("app.js", "charts.js", "style.css", "plotly.js", "plotly.css")
_PUBLIC = frozenset(
    {"/", "/live", "/live/policy", "/docs", "/openapi.json", "/metrics", *(f"/assets/{file}" for file in _ASSETS)}
)
_PUBLIC_PREFIX = "/v2/health/"
_CHUNK = 2**14  # bytes of a body that are sent at once
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_CHALLENGE: Headers = [(b"www-authenticate", b"Bearer")]


class RequestMiddleware:
    """Middleware for each request: its id, authorisation before the app handles it, its span and its log line.

    Authorisation uses the decoded path below the ASGI `root_path`, and precedes reading the body. The app receives the
    same path without the prefix, so that routing and authorisation cannot differ.

    Admin routes are protected against cross-site requests: an Origin header has to be the server's own. Without API
    keys they are also protected against DNS rebinding, which makes the page of a foreign domain same-origin for a
    browser: the Host header has to be a loopback name, an IP address or the bound host.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None = None,
        tracing: "Tracing | None" = None,
        host: str | None = None,
        on_rejected: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Wrap an app.

        Args:
            app: handles the requests that pass.
            keys: the API keys; None authorises every request.
            tracing: creates the spans; None traces nothing.
            host: the host name that the server is bound to; admin requests without keys may use it as Host header.
            on_rejected: called with the status of each request that is rejected here.
        """
        self._app = app
        self._keys = keys
        self._tracing = tracing
        self._host = host
        self._on_rejected = on_rejected
        self._ids = count()
        self._id_prefix = secrets.token_hex(6)  # differs between runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the app, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = below_root(scope)
        headers = headers_of(scope)
        request = _Request(self._request_id(headers.get(b"x-request-id")), headers.get(b"traceparent"), send)
        scope["state"]["request_id"] = request.id
        if self._tracing is not None and not _is_public(scope["path"]):
            request.span = self._tracing.request(scope, headers, request.id)
        try:
            request.key = self._authorise(scope["path"], headers, request.began)
            await self._app(scope, receive, request.send)
        except ServerError as error:
            self._on_rejected(error.status)
            await respond_error(request.send, error, _CHALLENGE if isinstance(error, UnauthorizedError) else None)
        except Exception:  # noqa: BLE001  (the client gets a response to any exception, without its details)
            _log.exception("request %s failed with an exception", request.id, extra={"request_id": request.id})
            if not request.status:
                await respond_error(request.send, ServerError(INTERNAL_ERROR))
        finally:
            if request.span is not None:
                request.span.end(request.status)
            request.log(scope)

    def _request_id(self, sent: bytes | None) -> str:
        """Return the client's X-Request-Id if it is valid, else a new id."""
        if sent is not None and _ID.fullmatch(sent):
            return sent.decode()
        return f"{self._id_prefix}-{next(self._ids):x}"

    def _authorise(self, path: str, headers: Mapping[bytes, bytes], now: float) -> str | None:
        """Authorise a request; return the name of its key, None on routes that need none."""
        admin = path == "/admin" or path.startswith("/admin/")
        if admin:
            self._check_browser_request(headers.get(b"origin"), headers.get(b"host", b""))
        if self._keys is None or _is_public(path):
            return None
        return self._keys.admit(headers.get(b"authorization"), "admin" if admin else "predict", now)

    def _check_browser_request(self, origin: bytes | None, host: bytes) -> None:
        """Reject cross-site requests, and DNS rebinding without keys; clients that send neither header pass.

        Raises:
            ForbiddenError: the Origin header is of another server, or the Host header is not trusted.
        """
        if self._keys is None and host and not _is_trusted_host(host.decode("latin-1"), self._host):
            raise ForbiddenError(
                f"the Host header {host[:80].decode('latin-1')!r} is rejected as possible DNS rebinding; reach the "
                "admin routes by localhost, an IP address or the bound host, or start the server with an API key file"
            )
        if origin is not None and origin.partition(b"://")[2].lower() != host.lower():
            raise ForbiddenError(
                f"the Origin header {origin[:80].decode('latin-1')!r} is of another server; cross-site requests to "
                "admin routes are rejected; send them from this server's own pages"
            )


def _is_trusted_host(host: str, bound: str | None) -> bool:
    """Return whether a Host header is safe from DNS rebinding: a loopback name, an IP address or the bound host."""
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


def _is_public(path: str) -> bool:
    """Return whether the route needs no key; such routes are polled, and not traced either."""
    return path in _PUBLIC or path.startswith(_PUBLIC_PREFIX)


class _Request:
    """State of one request.

    Attributes:
        id: id of the request, also sent as X-Request-Id.
        key: name of its API key; None without one.
        span: its span; None without tracing.
        status: status of the response; 0 before it starts.
        began: start, s of time.monotonic.
    """

    __slots__ = ("_send", "_traceparent", "began", "id", "key", "span", "status")

    def __init__(self, request_id: str, traceparent: bytes | None, send: Send) -> None:
        self.id = request_id
        self.key: str | None = None
        self.span: RequestSpan | None = None
        self.status = 0
        self.began = monotonic()
        self._traceparent = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if self._traceparent is not None and self._traceparent[1] == b"00" and self._traceparent[4]:
            self._traceparent = None  # version 00 has exactly four fields
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """Send an ASGI message with the headers that every response has; a large body is sent in chunks."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = (b"x-request-id", self.id.encode())
            message["headers"] = [*message.get("headers", ()), _NOSNIFF, request_id, *self._trace_headers()]
        elif len(message.get("body", b"")) > _CHUNK:
            return self._send_in_chunks(message)
        return self._send(message)

    async def _send_in_chunks(self, message: Message) -> None:
        """Send a body in chunks, each once the client has read most of the one before.

        The transport would otherwise copy, or encrypt, the whole body for each client that does not read.
        """
        body, more = message["body"], message.get("more_body", False)
        for end in range(_CHUNK, len(body) + _CHUNK, _CHUNK):
            chunk = body[end - _CHUNK : end]
            await self._send({**message, "body": chunk, "more_body": more or end < len(body)})
            await asyncio.sleep(0)  # serve other connections in between, also if this client reads fast

    def _trace_headers(self) -> Headers:
        if self.span is not None:
            traceparent = self.span.traceparent
            return [] if traceparent is None else [(b"traceparent", traceparent)]
        if self._traceparent is None:
            return []
        return [
            (b"traceparent", b"00-%b-%016x-%b" % (self._traceparent[2], getrandbits(64) or 1, self._traceparent[3]))
        ]

    def _trace_id(self) -> str | None:
        if self.span is not None:
            return self.span.trace_id
        return None if self._traceparent is None else self._traceparent[2].decode()

    def log(self, scope: Scope) -> None:
        """Log the request at debug level, and a response with status 500 at error level."""
        if self.status == 500:
            _log.error("request %s was answered with status 500", self.id, extra={"request_id": self.id})
        if not _log.isEnabledFor(logging.DEBUG):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status or 499,  # the client disconnected
            "ms": round(1e3 * (monotonic() - self.began), 3),
            "request_id": self.id,
            "trace_id": self._trace_id(),
            "key": self.key,
        }
        _log.debug("request", extra=fields)
