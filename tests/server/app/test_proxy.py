"""Requests that a gateway passes on, with a serving process that answers each with the same response."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from server.app.proxy import Proxy
from server.transport.memory_budget import MemoryBudget
from server.transport.request import Handler
from tests.support.inference_server import App, exchange, post, run, serving


@dataclass
class ProxyApp(App):
    """Passes all inference calls on."""

    proxy: Proxy | None = None

    def find(self, path: str) -> Handler | None:
        assert self.proxy is not None
        return partial(self.proxy.serve, target=path.encode(), headers=[])


def test_a_request_that_was_executed_is_not_rejected_for_the_memory_of_its_answer(tmp_path: Path) -> None:
    answer, executed = bytes(3000), []

    async def execute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        executed.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()

    async def scenario() -> None:
        path = tmp_path / "s"
        app = ProxyApp(budget=MemoryBudget(4096))  # of which one call may take half
        app.proxy = Proxy(path, app.budget, "http", "x")
        async with await asyncio.start_unix_server(execute, path), serving(app=app) as server:
            responses, _ = await exchange(await server.pair(), [post("/predict/m")], server.busy)
        assert [(one.status, one.body) for one in responses] == [(200, answer)]
        assert len(executed) == 1

    run(scenario())
