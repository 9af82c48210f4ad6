"""The request middleware: ids, traces, keys, browser protections, errors and the log."""

import asyncio
import json
import logging
import re
from hashlib import sha256
from typing import Any, NamedTuple

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ServerError
from server.transport.asgi_context import AsgiContext
from server.transport.auth import Keys, parse_keys
from server.transport.middleware import RequestMiddleware

KEYS = f"""
user  predict  {sha256(b"u").hexdigest()}
root  admin    {sha256(b"r").hexdigest()}
slow  predict  {sha256(b"s").hexdigest()}  0.5
"""
TRACE = b"0af7651916cd43dd8448eb211c80319c"


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any
    scope: Scope


async def respond(scope: Scope, send: Send, body: bytes) -> None:
    await AsgiContext(scope, no_receive, send).respond(200, body, [(b"content-type", b"application/json")])


async def no_receive() -> Message:
    raise AssertionError("the body was read")


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(scope, send, b'"hello"')


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("secret")


def call(
    middleware: ASGIApp, path: str = "/predict", method: str = "POST", root: str = "", **headers: bytes
) -> Answered:
    sent: list[Message] = []
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": named, "state": {}, "root_path": root}

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(_await(middleware, scope, receive, send))
    start, body = sent
    headers_out = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answered(start["status"], headers_out, json.loads(body["body"]), scope)


async def _await(middleware: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await middleware(scope, receive, send)


def with_keys() -> RequestMiddleware:
    return RequestMiddleware(hello, Keys(parse_keys(KEYS, "f")))


def test_every_response_has_a_unique_id_or_the_clients() -> None:
    middleware = RequestMiddleware(hello)
    first, second = call(middleware), call(middleware)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.scope["state"]["context"].request_id == first.headers["x-request-id"]
    assert call(middleware, x_request_id=b"my-id_1.x").headers["x-request-id"] == "my-id_1.x"
    for invalid in (b"", b"a b", b"a\r\nb: c", b"x" * 129, b"\xff", b"a\n"):
        assert re.fullmatch(r"[\da-f]{12}-[\da-f]+", call(middleware, x_request_id=invalid).headers["x-request-id"])
    assert call(with_keys(), x_request_id=b"refused").headers["x-request-id"] == "refused"


def test_a_trace_is_continued_with_a_new_parent_id() -> None:
    middleware = RequestMiddleware(hello)
    answer = call(middleware, traceparent=b"00-%b-b7ad6b7169203331-01" % TRACE).headers["traceparent"]
    assert re.fullmatch(rf"00-{TRACE.decode()}-[\da-f]{{16}}-01", answer)
    assert "b7ad6b7169203331" not in answer
    assert "traceparent" in call(middleware, traceparent=b"01-%b-b7ad6b7169203331-01-more" % TRACE).headers
    assert "traceparent" not in call(middleware).headers


@pytest.mark.parametrize(
    "invalid",
    [
        b"",
        b"00-%b-b7ad6b7169203331" % TRACE,
        b"ff-%b-b7ad6b7169203331-01" % TRACE,
        b"00-%b-b7ad6b7169203331-01-more" % TRACE,
        b"00-%b-b7ad6b7169203331-01" % TRACE.upper(),
        b"00-%b-b7ad6b7169203331-01" % (b"0" * 32),
        b"00-%b-0000000000000000-01" % TRACE,
    ],
)
def test_an_invalid_traceparent_is_ignored(invalid: bytes) -> None:
    assert "traceparent" not in call(RequestMiddleware(hello), traceparent=invalid).headers


@pytest.mark.parametrize(
    ("path", "without", "user", "root"),
    [
        ("/predict", 401, 200, 403),
        ("/predict/m", 401, 200, 403),
        ("/v2", 401, 200, 403),
        ("/v2/models/m/infer", 401, 200, 403),
        ("/v2/healthy", 401, 200, 403),
        ("/nowhere", 401, 200, 403),
        ("//admin/models/m/policy", 401, 200, 403),
        ("/Admin/models/m/policy", 401, 200, 403),
        ("/v2/../admin/models/m/policy", 401, 200, 403),
        ("/administration", 401, 200, 403),
        ("/admin", 401, 403, 200),
        ("/admin/", 401, 403, 200),
        ("/admin/models/m/policy", 401, 403, 200),
        ("/admin/../predict", 401, 403, 200),
        ("/v2/health/live", 200, 200, 200),
        ("/v2/health/ready", 200, 200, 200),
        ("/assets/app.js", 200, 200, 200),
        ("/assets", 401, 200, 403),
        ("/metrics", 200, 200, 200),
        ("/metrics/", 401, 200, 403),
        ("/", 200, 200, 200),
        ("/docs", 200, 200, 200),
        ("/openapi.json", 200, 200, 200),
        ("", 401, 200, 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS", "ODD"])
def test_each_route_requires_its_scope(method: str, path: str, without: int, user: int, root: int) -> None:
    middleware = with_keys()
    assert call(middleware, path, method).status == without
    assert call(middleware, path, method, authorization=b"Bearer u").status == user
    assert call(middleware, path, method, authorization=b"Bearer r").status == root
    assert call(RequestMiddleware(hello), path, method).status == 200, "without keys every request is authorised"


def test_a_head_request_is_a_get_without_a_body_for_the_app() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["method"])
        await respond(scope, send, b'"hello"')

    keys = Keys(parse_keys(KEYS, "keys"))
    assert call(RequestMiddleware(app, keys), "/v2/health/live", "HEAD").status == 200
    assert call(RequestMiddleware(app, keys), "/v2/models/m", "HEAD").status == 401
    assert seen == ["GET"]


def test_rejections_have_the_headers_of_their_status() -> None:
    missing = call(with_keys())
    assert missing.headers["www-authenticate"] == "Bearer"
    assert set(missing.body) == {"error"}
    assert "www-authenticate" not in call(with_keys(), authorization=b"Bearer r").headers
    middleware = with_keys()
    assert call(middleware, authorization=b"Bearer s").status == 200
    limited = call(middleware, authorization=b"Bearer s")
    assert (limited.status, limited.headers["retry-after"]) == (429, "2")


def test_errors_are_rendered_as_the_route_says() -> None:
    keys = Keys(parse_keys(KEYS, "keys"))
    routes = {"/rerank": lambda error: b'{"code": %d}' % error.status}
    for app, status in ((hello, 401), (broken, 500)):
        middleware = RequestMiddleware(app, keys if status == 401 else None, error_renderer=routes.get)
        rendered = call(middleware, "/rerank")
        assert (rendered.status, rendered.body) == (status, {"code": status})
        assert set(call(middleware, "/predict").body) == {"error"}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"http://127.0.0.1:8000", 200),
        (b"HTTP://127.0.0.1:8000", 200),
        (b"http://127.0.0.1:9000", 403),
        (b"http://evil.example", 403),
        (b"null", 403),
        (b"", 403),
        (b"http://evil.example/127.0.0.1:8000", 403),
    ],
)
def test_cross_site_requests_to_admin_routes_are_rejected(origin: bytes, status: int) -> None:
    assert call(RequestMiddleware(hello), "/admin/x", host=b"127.0.0.1:8000", origin=origin).status == status
    keyed = call(with_keys(), "/admin/x", host=b"127.0.0.1:8000", origin=origin, authorization=b"Bearer r")
    assert keyed.status == status
    assert call(RequestMiddleware(hello), "/predict", host=b"127.0.0.1:8000", origin=origin).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in (b"localhost", b"LocalHost:8000", b"a.localhost:8000", b"127.0.0.1:8000")),
        *((name, 200) for name in (b"10.1.2.3", b"[::1]:8000", b"[::1]", b"box.lan:8000", b"BOX.lan")),
        *((name, 403) for name in (b"evil.example:8000", b"localhost.evil.example", b"notlocalhost", b"box.lan.evil")),
        *((name, 403) for name in (b"127.0.0.1.evil.example", b"[evil.example]:80", b"evil.example]", b"\xff", b":80")),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_dns_rebinding_to_admin_routes_is_rejected_without_keys(method: str, host: bytes, status: int) -> None:
    middleware = RequestMiddleware(hello, host="box.lan")
    same_origin = call(middleware, "/admin/x", method, host=host, origin=b"http://" + host)
    assert (same_origin.status, call(middleware, "/admin/x", method, host=host).status) == (status, status)
    assert call(middleware, "/predict", host=host).status == 200
    authorised = call(with_keys(), "/admin/x", method, host=host, authorization=b"Bearer r")
    assert authorised.status == 200, "with keys any host name is accepted"


def test_the_error_for_dns_rebinding_names_the_host_and_the_remedy() -> None:
    error = call(RequestMiddleware(hello), "/admin/x", host=b"evil.example:8000").body["error"]
    assert "evil.example:8000" in error
    assert "API key file" in error
    assert call(RequestMiddleware(hello), "/admin/x", host=b"").status == 200, (
        "a request without a host is not from a browser"
    )


def test_rejected_requests_are_reported_by_status() -> None:
    statuses: list[int] = []
    middleware = RequestMiddleware(hello, Keys(parse_keys(KEYS, "f")), on_rejected=statuses.append)
    for authorization in (b"", b"Bearer r", b"Bearer s", b"Bearer s", b"Bearer u"):
        call(middleware, authorization=authorization)
    assert statuses == [401, 403, 429]


def test_an_exception_is_answered_500_without_details_and_logged_with_the_id(caplog: pytest.LogCaptureFixture) -> None:
    answer = call(RequestMiddleware(broken), x_request_id=b"this-one")
    assert answer.status == 500
    assert "secret" not in str(answer.body)
    assert "this-one" in caplog.text
    assert "secret" in caplog.text


def test_a_server_error_of_the_app_is_answered_with_its_message() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ServerError("no luck")

    assert call(RequestMiddleware(fails)).body == {"error": "no luck"}


def test_each_request_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    middleware = with_keys()
    with caplog.at_level(logging.INFO, "batchwright.request"):
        call(middleware)
        assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "batchwright.request"):
        call(middleware, authorization=b"Bearer u", traceparent=b"00-%b-b7ad6b7169203331-01" % TRACE, x_request_id=b"i")
    [line] = caplog.records
    fields = {"method": "POST", "path": "/predict", "status": 200, "request_id": "i", "key": "user"}
    assert {name: getattr(line, name) for name in fields} == fields
    assert line.trace_id == TRACE.decode()  # type: ignore[attr-defined]
    assert 0 <= line.ms < 1000  # type: ignore[attr-defined]


def test_lifespan_messages_pass_through() -> None:
    async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
        scope["seen"] = True

    scope: Scope = {"type": "lifespan"}
    asyncio.run(_await(RequestMiddleware(lifespan), scope, None, None))  # type: ignore[arg-type]
    assert scope["seen"]


USER, ROOT_KEY = b"Bearer u", b"Bearer r"


@pytest.mark.parametrize("root", ["", "/svc", "/svc/", "/v2/health", "/a/b", "/admin"])
@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/admin/models/m/policy", (401, 403, 200)),
        ("/predict", (401, 200, 403)),
        ("/v2/models/m/infer", (401, 200, 403)),
        ("/v2/health/live", (200, 200, 200)),
        ("/metrics", (200, 200, 200)),
    ],
)
def test_authorisation_uses_the_path_below_the_prefix(root: str, path: str, statuses: tuple[int, int, int]) -> None:
    statuses_by_key = [
        call(with_keys(), root.rstrip("/") + path, "PUT", root, host=b"localhost", **headers).status
        for headers in ({}, {"authorization": USER}, {"authorization": ROOT_KEY})
    ]
    assert tuple(statuses_by_key) == statuses


def test_the_app_receives_the_path_that_was_authorised() -> None:
    scopes: list[Scope] = []

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await respond(scope, send, b"1")

    middleware = RequestMiddleware(recording)
    for path, root in (("/svc/predict", "/svc"), ("/svcpredict", "/svc"), ("/svc", "/svc"), ("/predict", "/svc")):
        call(middleware, path, root=root)
    assert [scope["path"] for scope in scopes] == ["/predict", "/svcpredict", "/", "/predict"]
    assert {scope["root_path"] for scope in scopes} == {""}, "the prefix is removed only once"
    assert {scope["app_root_path"] for scope in scopes} == {"/svc"}
