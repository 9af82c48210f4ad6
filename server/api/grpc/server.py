"""The gRPC server of a process. Needs the extra "grpc".

A call passes the same layers as an HTTP request: authentication before its message is received, then the HTTP route
that serves it, with the same admission control, memory budget, metrics, traces and log. Its deadline is the timeout of
the HTTP call, and its cancellation the disconnect of an HTTP client.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C library would write lines of its own to stderr

import grpc
import orjson
from starlette.types import ASGIApp

from policies.types import SpecError
from server.api.grpc.context import GrpcContext
from server.api.grpc.http_request import HttpRequest
from server.api.grpc.infer import read_infer, split_message, write_infer
from server.api.grpc.routes import ROUTES
from server.api.inference import MAX_BODY_BYTES
from server.errors import INTERNAL_ERROR, BadInputError, ServerError, render_error
from server.transport.connection import Listener
from server.transport.connection_limits import max_connections
from server.transport.middleware import GRPC_PREFIX, RequestMiddleware

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_METADATA = frozenset(("authorization", "x-request-id", "traceparent", "tracestate"))
_RETURNED = frozenset((b"retry-after", b"traceparent", b"www-authenticate", b"x-request-id"))
_MAX_CALLS = 8192  # that are open at once
_MAX_DETAILS = 1000  # characters of an error; HTTP/2 limits the size of headers
_MAX_TIMEOUT = 1e6  # s; a deadline after more is none
_ROOM_FOR_FIELDS = 2**20  # bytes of a message beside its tensors
_LONG = 2**16  # bytes; translating more takes milliseconds
Address = tuple[str, int]
_Read = Callable[[bytes], Awaitable[HttpRequest]]  # makes the HTTP request of a call from its message
_Write = Callable[
    [bytes, Mapping[bytes, bytes]], bytes
]  # makes the response from body and headers of the HTTP response


class GrpcServer:
    """Serves inference.GRPCInferenceService by the HTTP application of the process.

    Attributes:
        address: host and port.
    """

    def __init__(
        self, requests: RequestMiddleware, app: ASGIApp, listener: Listener, address: Address, shares_port: bool = False
    ) -> None:
        """Create the server.

        Args:
            requests: authenticates, traces and logs each call.
            app: serves HTTP requests without all that.
            listener: that of HTTP, for the certificate and the time limits.
            address: host and port to listen on.
            shares_port: whether other processes listen on the same port.
        """
        self._requests = requests
        self._app = app
        self._tls = listener.tls
        self._body_timeout = listener.limits.body
        host, port = address
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._shares_port = shares_port
        self._translating = asyncio.Semaphore(1)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Accept calls from now on.

        Raises:
            SpecError: the address cannot be bound.
        """
        options = [
            ("grpc.max_receive_message_length", MAX_BODY_BYTES + _ROOM_FOR_FIELDS),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", max_connections()),
            ("grpc.server.max_pending_requests", _MAX_CALLS),  # beyond, calls of a burst are CANCELLED
            ("grpc.server.max_pending_requests_hard_limit", _MAX_CALLS),
            ("grpc.so_reuseport", int(self._shares_port)),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        methods = {name: self._method(name, route.read, route.write) for name, route in ROUTES.items()}
        methods["ModelInfer"] = self._method("ModelInfer", self._read_infer, write_infer)
        service = GRPC_PREFIX.strip("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        try:
            if self._tls is None:
                server.add_insecure_port(self.address)
            else:
                credentials = grpc.dynamic_ssl_server_credentials(self._certificate(), self._certificate)
                server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise SpecError(f"cannot listen on {self.address} for gRPC; choose another --grpc-port") from error
        await server.start()
        self._server = server

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and cancel those that are still open after `grace`, s."""
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None

    def _certificate(self) -> grpc.ServerCertificateConfiguration:
        """The certificate for a new connection, which may have been loaded again."""
        assert self._tls is not None
        return grpc.ssl_server_certificate_configuration([self._tls.pem])

    def _method(self, name: str, read: _Read, write: _Write) -> grpc.RpcMethodHandler:
        """A method; to the library its request is a stream, so that it is called before the message is received."""
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, f"{GRPC_PREFIX}{name}", read, write))

    async def _serve(self, path: str, read: _Read, write: _Write, _: Any, call: Any) -> bytes:
        """Serve a call: `read` makes the HTTP request of its message, `write` the message of the HTTP response."""
        context = GrpcContext(path, _headers(call), self._requests.response_headers)
        serving = self._requests.serve(context, self._answer, context, read, call.read)
        task = asyncio.get_running_loop().create_task(serving)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            context.disconnect()  # the task then ends by itself
            raise
        body, headers = context.response_body, context.response_headers
        call.set_trailing_metadata([(n.decode(), headers[n].decode("latin-1")) for n in _RETURNED if n in headers])
        error = None if context.status == 200 else _error(body)
        if error is not None:
            await call.abort(_STATUS.get(context.status, grpc.StatusCode.INTERNAL), error[:_MAX_DETAILS])
        return write(body, headers)

    async def _answer(self, context: GrpcContext, read: _Read, receive: Callable[[], Awaitable[Any]]) -> None:
        """Serve a call that is authorised."""
        try:
            async with asyncio.timeout(self._body_timeout):
                message = await receive()
            if message is grpc.aio.EOF:
                raise BadInputError("the call has no message; send one")
            scope = context.become(await read(message))
        except TimeoutError:
            await context.respond(
                408, render_error(f"the message took over {self._body_timeout:g} s; send it faster"), []
            )
        except ServerError as error:
            await context.respond_error(error)
        else:
            del message
            await self._app(scope, context.receive, context.send)

    async def _read_infer(self, message: bytes) -> HttpRequest:
        """The HTTP request of an inference call; a long one is translated off the event loop."""
        fields, raw = split_message(message)
        if len(fields) <= _LONG:
            return read_infer(fields, raw)
        async with self._translating:
            return await asyncio.to_thread(read_infer, fields, raw)


def _headers(call: Any) -> dict[bytes, bytes]:
    """The HTTP headers of a call, from its metadata and its deadline."""
    sent = {
        key.encode(): value.encode("latin-1", "replace")
        for key, value in call.invocation_metadata()
        if key in _METADATA
    }
    remaining = call.time_remaining()
    if remaining is not None and remaining < _MAX_TIMEOUT:
        sent[b"x-timeout-ms"] = b"%.3f" % max(0.001, 1e3 * remaining)
    return sent


def _error(body: bytes) -> str | None:
    """The error in the body of an HTTP response; None in that of a server, or a model, that is not ready."""
    document = orjson.loads(body) if body else {"error": INTERNAL_ERROR}
    return document.get("error") if isinstance(document, dict) else None
