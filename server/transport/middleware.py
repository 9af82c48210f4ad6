"""Middleware for every request: its id, authentication, browser protections, tracing and the access log."""

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

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import INTERNAL_ERROR, ForbiddenError, ServerError, UnauthorizedError
from server.transport.asgi_context import AsgiContext, below_root
from server.transport.auth import Key, Keys
from server.transport.http_call import HttpCall
from server.transport.request import Handler, Headers, RequestContext

if TYPE_CHECKING:
    from server.telemetry.tracing import Tracing

_log = logging.getLogger("batchwright.request")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# W3C Trace Context: version, trace id, parent id, flags; later versions may add fields
_TRACEPARENT = re.compile(rb"(?!ff)([\da-f]{2})-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-([\da-f]{2})(-.*)?")
GRPC_PREFIX = "/inference.GRPCInferenceService/"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
# Routes without a key: pages, health and metrics; the dashboard shows what /metrics exports, and signatures of models
_ASSETS = ("app.js", "charts.js", "form.js", "style.css", "plotly.js", "plotly.css")
_LIVE = ("/live", "/live/policy", "/live/form")
_HEALTH = (f"{GRPC_PREFIX}ServerLive", f"{GRPC_PREFIX}ServerReady", f"{HEALTH_PREFIX}Check")
_PAGES = ("/", "/docs", "/openapi.json", "/metrics", *(f"/assets/{file}" for file in _ASSETS))
_PUBLIC = frozenset((*_PAGES, *_LIVE, *_HEALTH))
_PUBLIC_PREFIX = "/v2/health/"
ADMIN_PREFIXES = ("/admin/", "/v2/repository/models/", f"{GRPC_PREFIX}RepositoryModel")
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_CLOSE = (b"connection", b"close")
_CHALLENGE: Headers = [(b"www-authenticate", b"Bearer")]


class RequestMiddleware:
    """Middleware for each request: its id, authorisation before the app handles it, its span and its log line.

    Authorisation uses the decoded path below the ASGI `root_path`, and precedes reading the body. The app receives the
    same path without the prefix, so that routing and authorisation cannot differ.

    Admin routes are protected against cross-site requests: an Origin header has to be the server's own. Without API
    keys they are also protected against DNS rebinding, which makes the page of a foreign domain same-origin for a
    browser: the Host header has to be a loopback name, an IP address or the bound host.

    Attributes:
        app: serves by ASGI what has no handler of its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None = None,
        tracing: "Tracing | None" = None,
        host: str | None = None,
        on_rejected: Callable[[int], object] = lambda _: None,
        shutting_down: Callable[[], bool] = lambda: False,
        find_inference: Callable[[str], Handler | None] = lambda _: None,
        error_renderer: Callable[[str], Callable[[ServerError], bytes] | None] = lambda _: None,
    ) -> None:
        """Wrap an app.

        Args:
            app: serves by ASGI what has no handler of its own.
            keys: the API keys; None authorises every request.
            tracing: creates the spans; None traces nothing.
            host: the host name that the server is bound to; admin requests without keys may use it as Host header.
            on_rejected: called with the status of each request that is rejected here.
            shutting_down: whether the server stops: every response then closes its connection, so that clients
                reconnect to another server.
            find_inference: finds the handler of POST requests with this path; None where the app serves them.
            error_renderer: renders the errors of requests with this path; None: {"error": ...}.
        """
        self.app = app
        self._find_inference = find_inference
        self._error_renderer = error_renderer
        self._keys = keys
        self._tracing = tracing
        self._host = host
        self._on_rejected = on_rejected
        self._shutting_down = shutting_down
        self._ids = count()
        self._id_prefix = secrets.token_hex(6)  # differs between runs

    async def handle(self, call: HttpCall) -> None:
        """Serve one request: an inference call by its handler, any other by ASGI."""
        handler = self._find_inference(call.path) if call.method == "POST" else None
        await self.serve(call, handler or self._serve_asgi, call)

    async def _serve_asgi(self, call: HttpCall) -> None:
        await self.app(call.scope(), call.receive, call.send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of an ASGI server that this is mounted in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = below_root(scope)
        if scope["method"] == "HEAD":  # a GET whose body the server leaves out
            scope = {**scope, "method": "GET"}
        context = AsgiContext(scope, receive, send, self.response_headers)
        scope.setdefault("state", {})["context"] = context
        await self.serve(context, self.app, scope, receive, context.send)

    async def serve(self, context: RequestContext, handler: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Serve one request by a handler, or answer it with an error."""
        context.request_id = self._request_id(context.headers.get(b"x-request-id"))
        if self._tracing is not None and not _is_public(context.path):
            context.span = self._tracing.request(context.method, context.path, context.headers, context.request_id)
        try:
            key = self._authorise(context.path, context.headers)
            if key is not None:
                context.key, context.least_level = key.name, key.max_level
            await handler(*arguments)
        except ServerError as error:
            self._on_rejected(error.status)
            challenge = _CHALLENGE if isinstance(error, UnauthorizedError) else None
            await context.respond_error(error, challenge, self._error_renderer(context.path))
        except (Exception, asyncio.CancelledError, SystemExit):  # noqa: BLE001  (answered without its details)
            name = context.request_id
            _log.exception("request %s failed with an exception", name, extra={"request_id": name})
            if not context.status:
                await context.respond_error(ServerError(INTERNAL_ERROR), render=self._error_renderer(context.path))
        finally:
            if context.span is not None:
                context.span.end(context.status, monotonic() - context.ended())
            _log_request(context)

    def response_headers(self, context: RequestContext) -> Headers:
        """Return the headers that every response has."""
        headers = [_NOSNIFF, (b"x-request-id", context.request_id.encode())]
        if self._shutting_down():
            headers.append(_CLOSE)
        if context.span is not None or b"traceparent" in context.headers:
            headers += _trace_headers(context)
        return headers

    def _request_id(self, sent: bytes | None) -> str:
        """Return the client's X-Request-Id if it is valid, else a new id."""
        if sent is not None and _ID.fullmatch(sent):
            return sent.decode()
        return f"{self._id_prefix}-{next(self._ids):x}"

    def _authorise(self, path: str, headers: Mapping[bytes, bytes]) -> Key | None:
        """Authorise a request; return its key, None on routes that need none."""
        admin = path.startswith(ADMIN_PREFIXES) or path == "/admin"
        if admin:
            self._check_browser_request(headers.get(b"origin"), headers.get(b"host", b""))
        if self._keys is None or _is_public(path):
            return None
        return self._keys.admit(headers.get(b"authorization"), "admin" if admin else "predict", monotonic())

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


def _trace_context(context: RequestContext) -> tuple[bytes, bytes] | None:
    """Trace id and flags of the request's traceparent header; None without a valid one."""
    sent = context.headers.get(b"traceparent")
    match = None if sent is None else _TRACEPARENT.fullmatch(sent)
    if match is None or (match[1] == b"00" and match[4]):  # version 00 has exactly four fields
        return None
    return match[2], match[3]


def _trace_headers(context: RequestContext) -> Headers:
    if context.span is not None:
        traceparent = context.span.traceparent
        return [] if traceparent is None else [(b"traceparent", traceparent)]
    sent = _trace_context(context)
    if sent is None:
        return []
    return [(b"traceparent", b"00-%b-%016x-%b" % (sent[0], getrandbits(64) or 1, sent[1]))]


def _log_request(context: RequestContext) -> None:
    """Log the request at debug level, and a response with status 500 at error level."""
    name = context.request_id
    if context.status == 500:
        _log.error("request %s was answered with status 500", name, extra={"request_id": name})
    if not _log.isEnabledFor(logging.DEBUG):
        return
    sent = _trace_context(context)
    fields: dict[str, Any] = {
        "method": context.method,
        "path": context.path,
        "status": context.status or 499,  # the client disconnected
        "ms": round(1e3 * (context.ended() - context.began), 3),
        "request_id": name,
        "trace_id": context.span.trace_id if context.span is not None else sent and sent[0].decode(),
        "key": context.key,
    }
    _log.debug("request", extra=fields)
