"""A tiny server that answers both protocols by a script: what to do with the first request, the second, ..."""

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
    """What the server is to do, and what came.

    `replies` are used up in order of arrival, each instead of a good answer; None stands for a good one. With a `key`
    nobody is served without it. `swaps` are the policies that were asked for; it knows all but those called "clever".
    """

    replies: list[Reply | None] = field(default_factory=list)
    models: Any = field(default_factory=lambda: [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}])
    metadata: Any = field(default_factory=lambda: METADATA)
    key: str | None = None
    policy: str = "greedy"
    swaps: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/admin/models/{model}/policy", self._policy)
        app.router.add_put("/admin/models/{model}/policy", self._swap)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_get("/v2/models/{model}", self._metadata)
        app.router.add_post("/v2/models/{model}/infer", self._infer)
        app.router.add_post("/predict", self._predict)
        app.router.add_post("/predict/{model}", self._predict)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        return await handler(request)

    async def _policy(self, _: web.Request) -> web.Response:
        return web.json_response({"name": "x", "spec": self.policy, "profile": "tiny on a stub"})

    async def _swap(self, request: web.Request) -> web.Response:
        wanted = (await request.json())["policy"]
        if wanted == "clever":
            return web.json_response({"error": "unknown policy 'clever'"}, status=400)
        self.policy = wanted
        self.swaps.append(wanted)
        return await self._policy(request)

    async def _index(self, _: web.Request) -> web.Response:
        return web.json_response(self.models) if self.models is not None else web.Response(status=404)

    async def _metadata(self, request: web.Request) -> web.Response:
        known = request.match_info["model"] == "tiny"
        return web.json_response(self.metadata) if known else web.Response(status=404)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        output = {"name": "logits", "shape": [1, 1], "datatype": "BYTES", "data": ["0.5:3:newt"]}
        return await self._answer(request, {"model_name": "tiny", "parameters": FACTS, "outputs": [output]})

    async def _predict(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, {"model": "tiny", "predictions": [], **FACTS})

    async def _answer(self, request: web.Request, good: dict[str, Any]) -> web.StreamResponse:
        reply = self.replies.pop(0) if self.replies else None
        self.calls.append((request.path, dict(request.headers), await request.read()))
        return (reply and await reply(request)) or web.Response(text=json.dumps(good), content_type="application/json")


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
    """Serve on a free port; the URL."""
    runner = web.AppRunner(stub.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)  # its last transports are told that they are closed on the loop's next round


@contextmanager
def serving_in_a_thread(stub: Stub) -> Iterator[str]:
    """The same for a test that runs a whole command."""
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
        with warnings.catch_warnings():  # connections that a client left open end with the loop, not in a later test
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
