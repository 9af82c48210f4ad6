"""One gRPC call as the request that the server's layers serve, and its response."""

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from starlette.types import Message, Scope

from server.api.grpc.http_request import HttpRequest
from server.errors import ServerError, TooLargeError
from server.transport.request import BodyLimit, Headers, RequestContext

# gRPC itself cancels a call at its deadline, and may do so before our own timer: it rounds times.
_AT_DEADLINE = 0.01  # s, at least
_AT_DEADLINE_SHARE = 0.02  # of the timeout


class GrpcContext(RequestContext):
    """A gRPC call, which is served as an HTTP request.

    Attributes:
        response_body: body of the HTTP response.
        response_headers: headers of the HTTP response by lower-case name, those that every response has included.
    """

    __slots__ = ("_body", "_gone", "_headers_of", "response_body", "response_headers")

    def __init__(
        self, path: str, headers: Mapping[bytes, bytes], headers_of: Callable[[RequestContext], Headers]
    ) -> None:
        """A call of the gRPC method with this path begins; `headers_of` returns the headers of every response."""
        super().__init__("POST", path, headers, monotonic())
        self._headers_of = headers_of
        self._body: bytes | ServerError | None = b""  # None once it has been read
        self._gone = asyncio.Event()
        self.response_body = b""
        self.response_headers: dict[bytes, bytes] = {}

    def become(self, request: HttpRequest) -> Scope:
        """Be this request from now on; return its ASGI scope, in which the context is `state["context"]`."""
        self.method, self.path, self._body = request.method, request.path, request.body
        self.headers = {**self.headers, **request.headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*self.headers.items()],
            "state": {"context": self},
        }

    def disconnect(self) -> None:
        """Cancel the call, since its client has cancelled it, or since its deadline has passed."""
        self._gone.set()
        remaining = self.began + self.timeout - monotonic()
        if remaining < max(_AT_DEADLINE, _AT_DEADLINE_SHARE * self.timeout):
            self._disconnected = True
            self._expire()
        else:
            super().disconnect()

    async def read_body(self, limit: BodyLimit, reserve: Callable[[int], None]) -> bytes:
        """Return the body, which has been received; an error in the message is raised here."""
        body, self._body = self._body or b"", None
        if isinstance(body, ServerError):
            raise body
        reserve(len(body))
        if len(body) > limit.max_bytes:
            raise TooLargeError(f"the call has {len(body)} bytes, the limit is {limit.max_bytes}; {limit.remedy}")
        return body

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Keep the response, which becomes a message, or an error with a gRPC status."""
        if self._disconnected:
            return
        self.status, self.response_body = status, body
        self.response_headers = dict([*headers, *self._headers_of(self)])

    async def receive(self) -> Message:
        """Receive the body by ASGI; after that wait for the disconnect."""
        if self._body is None:
            await self._gone.wait()
        if self._disconnected:
            return {"type": "http.disconnect"}
        body = await self.read_body(BodyLimit(2**62, ""), lambda _: None)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep a part of the response that is sent by ASGI."""
        if message["type"] == "http.response.start":
            await self.respond(message["status"], b"", message.get("headers", []))
        else:
            self.response_body += message.get("body", b"")
