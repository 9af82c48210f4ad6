"""The gRPC server over applications that fail, and over a full queue and memory budget."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.grpc.server import GrpcServer
from server.api.inference import Inference
from server.errors import INTERNAL_ERROR
from server.transport.connection import Listener
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware
from tests.support.grpc_client import SERVICE, infer_request

Code: Any = grpc.StatusCode


def inference(waiting: int = 0, budget: int = 2**30) -> Any:
    """One that knows its queue and its memory budget, and counts rejections by their reason."""
    rejections: list[str] = []
    metrics: Any = SimpleNamespace(
        outcome=lambda *_: None,
        rejected=lambda _, reason, __: rejections.append(reason),
        statistics=SimpleNamespace(call_failed=lambda *_: None),
        rejections=rejections,
    )
    fleet: Any = SimpleNamespace(waiting=waiting, backlog=lambda: 1.0)
    models: Any = {"m": None}
    pool: Any = None
    return Inference(models, fleet, metrics, pool, 8, MemoryBudget(budget))


async def unreachable(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the call was served")


def responding(status: int, body: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


@asynccontextmanager
async def serving(app: ASGIApp, served: Any) -> AsyncIterator[grpc.aio.Channel]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    server = GrpcServer(RequestMiddleware(app), served, Listener(), address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop(0.0)


def outcome(app: ASGIApp, served: Any, make: Callable[[grpc.aio.Channel], Any]) -> tuple[Any, str, dict[str, Any]]:
    """Status, text and trailing metadata of a call."""

    async def run() -> tuple[Any, str, dict[str, Any]]:
        async with serving(app, served) as channel:
            made = make(channel)
            return await made.code(), await made.details(), dict(await made.trailing_metadata())

    return asyncio.run(run())


@pytest.mark.parametrize(("status", "body"), [(200, b"not JSON"), (200, b'{"name": 1}'), (404, b"not JSON")])
def test_a_response_that_cannot_be_translated_is_an_internal_error(status: int, body: bytes) -> None:
    app = responding(status, body)
    code, text, _ = outcome(app, inference(), lambda each: each.unary_unary(f"{SERVICE}ServerMetadata")(b""))
    assert (code, text) == (Code.INTERNAL, INTERNAL_ERROR)


def test_a_full_queue_rejects_a_call_before_its_message_is_received() -> None:
    full = inference(waiting=8)
    code, text, metadata = outcome(unreachable, full, lambda each: each.stream_unary(f"{SERVICE}ModelInfer")())
    assert (code, metadata["retry-after"]) == (Code.UNAVAILABLE, "1")
    assert "no room for 1 more: 8 of 8 places" in text
    assert full.metrics.rejections == ["queue_full"]


def test_a_message_needs_room_in_the_memory_budget_before_it_is_translated() -> None:
    message = infer_request("m", x=np.zeros((1, 3000), np.uint8))
    small = inference(budget=8000)
    small.budget.change(0, 3500)  # of another call
    code, text, _ = outcome(unreachable, small, lambda each: each.unary_unary(f"{SERVICE}ModelInfer")(message))
    assert (code, "the memory budget has no room" in text) == (Code.UNAVAILABLE, True), text
    assert small.metrics.rejections == ["bytes"]
    assert small.budget.reserved == 3500


def test_a_response_that_finds_its_client_gone_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving(unreachable, inference()):
            log = logging.getLogger("grpc._cython.cygrpc")
            log.error("ExecuteBatchError raised in core by servicer method [%s]", "/x")
            log.error("another error")

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name.startswith("grpc")] == ["another error"]


@pytest.mark.parametrize(
    ("service", "status", "body", "answer"),
    [
        (b"", 200, b'{"ready":true}', b"\x08\x01"),
        (b"", 503, b'{"ready":false}', b"\x08\x02"),
        (b"\n\x1einference.GRPCInferenceService", 200, b'{"ready":true}', b"\x08\x01"),
        (b"\n\x01m", 200, b'{"name":"m","ready":true}', b"\x08\x01"),
    ],
)
def test_the_standard_health_service_says_whether_the_server_or_a_model_is_ready(
    service: bytes, status: int, body: bytes, answer: bytes
) -> None:
    paths: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await responding(status, body)(scope, receive, send)

    async def run() -> bytes:
        async with serving(app, inference()) as channel:
            found: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(service)
            return found

    assert asyncio.run(run()) == answer
    assert paths == ["/v2/models/m/versions/1/ready" if service.endswith(b"m") else "/v2/health/ready"]


def test_the_health_of_an_unknown_model_is_not_found_and_watching_is_not_implemented() -> None:
    unknown = responding(404, b'{"error":"no model x"}')
    check = outcome(unknown, inference(), lambda each: each.unary_unary("/grpc.health.v1.Health/Check")(b"\n\x01x"))
    assert check[:2] == (Code.NOT_FOUND, "no model x")
    watch = outcome(unknown, inference(), lambda each: each.unary_unary("/grpc.health.v1.Health/Watch")(b""))
    assert watch[0] == Code.UNIMPLEMENTED
