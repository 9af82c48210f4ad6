"""One request of an ASGI server that the application is mounted in, such as a replica of Ray Serve."""

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from server.errors import TooLargeError
from server.transport.request import (
    BodyLimit,
    ClientDisconnectedError,
    Headers,
    RequestContext,
    check_length,
)

_T = TypeVar("_T")
_READ_AHEAD = 2**18  # bytes of a body that are reserved before its first part arrives


class AsgiContext(RequestContext):
    """A request that is received and answered by ASGI messages."""

    __slots__ = ("_receive", "_response_headers", "_send")

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        response_headers: Callable[[RequestContext], Headers] = lambda _: [],
    ) -> None:
        """Create the request, which begins now or as its state says; `response_headers` are those of every response."""
        began = scope.get("state", {}).get("began") or monotonic()
        super().__init__(scope["method"], scope["path"], dict(scope["headers"]), began)
        self._receive = receive
        self._send = send
        self._response_headers = response_headers

    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> bytes:
        """Receive the body in messages."""
        sent = self.headers.get(b"content-length", b"")
        if sent.isdigit():
            check_length(int(sent), limit)
        reserve(min(int(sent), _READ_AHEAD) if sent.isdigit() else _READ_AHEAD)
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            reserve(size)
            if size > limit.max_bytes:
                raise TooLargeError(f"the body is over {limit.max_bytes} bytes; {limit.remedy}")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def wait_for(self, future: "asyncio.Future[_T]", time_limit: float = inf) -> _T:
        """Wait for a future, and for a disconnect; call it only after the whole body was read."""
        watching = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            return await super().wait_for(future, time_limit)
        finally:
            watching.cancel()
            del future  # its exception refers to this frame

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnect()

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send the response by `send`."""
        await self._start(status, len(body), headers)
        self.release_memory()
        await self.send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, length: int, headers: Headers) -> None:
        headers = [*headers, (b"content-length", str(length).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, message: Message) -> None:
        """Send an ASGI message, with the headers that every response has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._response_headers(self)]
        await self._send(message)


def below_root(scope: Scope) -> Scope:
    """Return the scope with the ASGI `root_path`, the prefix of a proxy or a mounting app, removed from the path.

    The prefix is kept as `app_root_path`, which Starlette uses to build the server's own URLs.
    """
    root, path = scope.get("root_path", ""), scope["path"]
    if not root:
        return scope
    inside = path == root or path.startswith(f"{root.rstrip('/')}/")
    below = path[len(root.rstrip("/")) :] or "/" if inside else path
    return {**scope, "path": below, "root_path": "", "app_root_path": root}
