"""A gRPC call as a request: its body and its end."""

import asyncio

from server.api.grpc.context import GrpcContext
from server.api.grpc.http_request import HttpRequest


def test_the_body_is_received_once_and_then_the_disconnect() -> None:
    async def scenario() -> None:
        context = GrpcContext("/method", {}, lambda _: [])
        context.become(HttpRequest("POST", "/path", body=b"body"))
        assert await context.receive() == {"type": "http.request", "body": b"body", "more_body": False}
        waits = asyncio.ensure_future(context.receive())
        await asyncio.sleep(0)
        assert not waits.done()
        context.disconnect()
        assert await waits == {"type": "http.disconnect"}
        assert await context.receive() == {"type": "http.disconnect"}

    asyncio.run(scenario())
