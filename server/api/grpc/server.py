"""The gRPC server of a process. Needs the extra "grpc".

A call passes the same layers as an HTTP request: authentication before its message is received, then the HTTP route
that serves it, with the same admission control, memory budget, metrics, traces and log. Its deadline is the timeout of
the HTTP call, and its cancellation the disconnect of an HTTP client.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C library would write lines of its own to stderr

import grpc
import orjson

from policies.types import SpecError
from server.api.grpc.context import GrpcContext
from server.api.grpc.http_request import HttpRequest
from server.api.grpc.infer import read_infer, split_message, write_infer
from server.api.grpc.routes import HEALTH_ROUTES, ROUTES, Route
from server.api.inference import MAX_BODY_BYTES, Inference
from server.errors import INTERNAL_ERROR, BadInputError, RejectedError, ServerError, render_error
from server.transport.connection import Listener
from server.transport.connection_limits import max_connections
from server.transport.middleware import GRPC_PREFIX, HEALTH_PREFIX, RequestMiddleware

_log = logging.getLogger("batchwright.grpc")
_GRPC_LOGGER = "grpc._cython.cygrpc"
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
_MAX_RECEIVING = 256  # messages; the memory budget counts each only once it is received
_NO_COMPRESSION = 1  # the set of algorithms with the first alone; decompression has no limit on the size
_KEEPALIVE, _KEEPALIVE_TIMEOUT = 60_000, 20_000  # ms between the pings of a connection, and until its answer
_MAX_DETAILS = 1000  # characters of an error; HTTP/2 limits the size of headers
_MAX_TIMEOUT = 1e6  # s; a deadline after more is none
_ROOM_FOR_FIELDS = 2**20  # bytes of a message beside its tensors
_LONG_FIELDS = 2**16  # bytes; translating more takes milliseconds
_LONG_MESSAGE = 2**20  # bytes; copying more tensors takes milliseconds, too
Address = tuple[str, int]
# receives the message of a call, and makes its HTTP request
_Read = Callable[[GrpcContext, Any], Awaitable[HttpRequest]]
# makes the response from body and headers of the HTTP response
_Write = Callable[[bytes, Mapping[bytes, bytes]], bytes]


def _is_no_lost_response(record: logging.LogRecord) -> bool:
    """Whether a log record of gRPC is not about a response to a client that has left, for it an error."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


class GrpcServer:
    """Serves inference.GRPCInferenceService by the HTTP application of the process.

    Attributes:
        address: host and port.
    """

    def __init__(
        self,
        requests: RequestMiddleware,
        inference: Inference,
        listener: Listener,
        address: Address,
    ) -> None:
        """Create the server.

        Args:
            requests: authenticates, traces and logs each call, which its application serves.
            inference: serves the inference calls of that application, whose queue and memory budget have to have room.
            listener: that of HTTP, for the certificate and the time limits.
            address: host and port to listen on.
        """
        self._requests = requests
        self._app = requests.app
        self._inference = inference
        self._tls = listener.tls
        self._limits = listener.limits
        host, port = address
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._receiving = asyncio.Semaphore(_MAX_RECEIVING)
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
            ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
            ("grpc.max_connection_idle_ms", _milliseconds(self._limits.keep_alive)),
            ("grpc.server_handshake_timeout_ms", _milliseconds(self._limits.headers)),
            ("grpc.keepalive_time_ms", _KEEPALIVE),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT),
            ("grpc.max_allowed_incoming_connections", max_connections()),
            ("grpc.server.max_pending_requests", _MAX_CALLS),  # beyond, calls of a burst are CANCELLED
            ("grpc.server.max_pending_requests_hard_limit", _MAX_CALLS),
            ("grpc.so_reuseport", 0),
        ]
        logging.getLogger(_GRPC_LOGGER).addFilter(_is_no_lost_response)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        for prefix, routes in ((GRPC_PREFIX, ROUTES), (HEALTH_PREFIX, HEALTH_ROUTES)):
            methods = {
                name: self._method(f"{prefix}{name}", partial(self._read, route), route.write)
                for name, route in routes.items()
            }
            if prefix == GRPC_PREFIX:
                methods["ModelInfer"] = self._method(f"{prefix}ModelInfer", self._read_infer, write_infer)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(prefix.strip("/"), methods),))
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

    def _method(self, path: str, read: _Read, write: _Write) -> grpc.RpcMethodHandler:
        """A method; to the library its request is a stream, so that it is called before the message is received."""
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, path, read, write))

    async def _serve(self, path: str, read: _Read, write: _Write, _: Any, call: Any) -> bytes:
        """Serve a call: `read` makes the HTTP request of its message, `write` the message of the HTTP response."""
        context = GrpcContext(path, _headers(call), self._requests.response_headers)
        serving = self._requests.serve(context, self._answer, context, read, call)
        task = asyncio.get_running_loop().create_task(serving)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            context.disconnect()  # the task then ends by itself
            raise
        status, headers = context.status, context.response_headers
        call.set_trailing_metadata([(n.decode(), headers[n].decode("latin-1")) for n in _RETURNED if n in headers])
        try:
            error = None if status == 200 else _error(context.response_body)
            response = b"" if error is not None else write(context.response_body, headers)
        except Exception:  # noqa: BLE001  (answered without its details)
            _log.exception("the response to request %s cannot be translated", context.request_id)
            status, error, response = 500, INTERNAL_ERROR, b""
        if error is not None:
            await call.abort(_STATUS.get(status, grpc.StatusCode.INTERNAL), error[:_MAX_DETAILS])
        return response

    async def _answer(self, context: GrpcContext, read: _Read, call: Any) -> None:
        """Serve a call that is authorised."""
        try:
            scope = context.become(await read(context, call))
        except TimeoutError:
            await context.respond(
                408, render_error(f"the message took over {self._limits.body:g} s; send it faster"), []
            )
        except ServerError as error:
            await context.respond_error(error)
        else:
            await self._app(scope, context.receive, context.send)

    async def _receive(self, call: Any) -> bytes:
        """The message of a call.

        Raises:
            BadInputError: there is none.
            TimeoutError: it took too long.
        """
        async with asyncio.timeout(self._limits.body), self._receiving:
            message: Any = await call.read()
        if message is grpc.aio.EOF:
            raise BadInputError("the call has no message; send one")
        received: bytes = message
        return received

    async def _read(self, route: Route, _: GrpcContext, call: Any) -> HttpRequest:
        """The HTTP request of a call without tensors."""
        return route.read(await self._receive(call) if route.takes_message else b"")

    async def _read_infer(self, context: GrpcContext, call: Any) -> HttpRequest:
        """The HTTP request of an inference call; a long one is translated off the event loop."""
        try:
            self._inference.check_queue(1)
            with self._inference.budget.reservation() as memory:  # the HTTP route has its own
                message = await self._receive(call)
                memory.grow(len(message))
                fields, raw = split_message(message)
                if len(fields) <= _LONG_FIELDS and len(message) <= _LONG_MESSAGE:
                    return read_infer(fields, raw)
                async with self._translating:
                    return await asyncio.to_thread(read_infer, fields, raw)
        except RejectedError as error:
            self._inference.count_failed(None, error, context)
            raise


def _milliseconds(seconds: float) -> int:
    return max(1, round(1e3 * seconds))


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
