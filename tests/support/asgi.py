"""Requests by ASGI, for tests without a connection, and ASGI applications for those with one."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from starlette.types import Receive, Scope, Send

from server.transport.asgi_context import AsgiContext
from server.transport.request import Handler, Headers, RequestContext


class AsgiApp:
    """Serves each request of a connection by an ASGI application."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def handle(self, call: Any) -> None:
        await self.app(call.scope(), call.receive, call.send)

    def response_headers(self, context: RequestContext) -> Headers:
        return []


def call_scope(headers: Mapping[bytes, bytes] | None = None, age: float = 0.0, path: str = "/") -> Scope:
    """The scope of a POST request whose first byte arrived `age`, s, ago."""
    state = {"began": monotonic() - age}
    return {"type": "http", "method": "POST", "path": path, "headers": [*(headers or {}).items()], "state": state}


async def serve_asgi(
    find: Callable[[str], Handler | None], scope: Mapping[str, Any], receive: Receive, send: Send
) -> None:
    """Serve a request by the handler that `find` returns for its path."""
    handler = find(scope["path"])
    assert handler is not None
    await handler(AsgiContext(dict(scope), receive, send))
