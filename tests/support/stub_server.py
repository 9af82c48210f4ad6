"""A stub server for both protocols with scripted replies to the first request, the second, and so on."""

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FACTS = {"batch_size": 2, "waiting_ms": 1.5, "service_ms": 4.0, "energy_mj": 30.0, "energy_source": "literature"}
METADATA = {
    "name": "tiny",
    "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 4, 5, 3]}],
    "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reply = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Stub:
    """Behaviour of the stub server, and the calls it received.

    Attributes:
        replies: replies used in order of arrival; None, or none left, is a successful response.
        models: the repository index; None responds 404.
        metadata: metadata of the model "tiny".
        key: API key that calls must have; None for none.
        policy: the current policy; "clever" is the only one that is rejected.
        swaps: policies set by clients.
        calls: path, headers and body of each inference call.
    """

    replies: list[Reply | None] = field(default_factory=list)
    models: Any = field(default_factory=lambda: [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}])
    metadata: Any = field(default_factory=lambda: METADATA)
    key: str | None = None
    policy: str = "greedy"
    swaps: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/admin/models/{model}/policy", self._policy)
        app.router.add_put("/admin/models/{model}/policy", self._swap)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_get("/v2/models/{model}", self._metadata)
        app.router.add_post("/v2/models/{model}/infer", self._infer)
        app.router.add_post("/predict", self._predict)
        app.router.add_post("/predict/{model}", self._predict)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        return await handler(request)

    async def _policy(self, _: web.Request) -> web.Response:
        return web.json_response({"name": "x", "spec": self.policy, "profile": "tiny on a stub"})

    async def _swap(self, request: web.Request) -> web.Response:
        spec = (await request.json())["policy"]
        if spec == "clever":
            return web.json_response({"error": "unknown policy 'clever'"}, status=400)
        self.policy = spec
        self.swaps.append(spec)
        return await self._policy(request)

    async def _index(self, _: web.Request) -> web.Response:
        return web.json_response(self.models) if self.models is not None else web.Response(status=404)

    async def _metadata(self, request: web.Request) -> web.Response:
        known = request.match_info["model"] == "tiny"
        return web.json_response(self.metadata) if known else web.Response(status=404)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        output = {"name": "logits", "shape": [1, 1], "datatype": "BYTES", "data": ["0.5:3:newt"]}
        return await self._respond(request, {"model_name": "tiny", "parameters": FACTS, "outputs": [output]})

    async def _predict(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, {"model": "tiny", "predictions": [], **FACTS})

    async def _respond(self, request: web.Request, success: dict[str, Any]) -> web.StreamResponse:
        reply = self.replies.pop(0) if self.replies else None
        self.calls.append((request.path, dict(request.headers), await request.read()))
        response = await reply(request) if reply else None
        return response or web.Response(text=json.dumps(success), content_type="application/json")


async def busy(_: web.Request) -> web.Response:
    return web.json_response({"error": "the queue is full"}, status=503)


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def hold(until: asyncio.Event) -> Reply:
    async def reply(_: web.Request) -> None:
        await until.wait()

    return reply


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[str]:
    """Serve on a free port; yield the URL."""
    runner = web.AppRunner(stub.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)  # the last transports close in the event loop's next iteration


@contextmanager
def serving_in_a_thread(stub: Stub) -> Iterator[str]:
    """Serve on a thread, for a test that runs a whole command."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        async with serving(stub) as url:
            stop = asyncio.Event()
            started.set_result((url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    url, loop, stop = started.result(timeout=10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        with warnings.catch_warnings():  # collect connections left open by a client now, not in a later test
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
