"""The same trivial batcher behind three HTTP servers: every POST is one request, answered with the size of its batch.

`python -m benchmarks.servers.trivial_batcher --http uvicorn` or `received-in-place` runs two of them. The third is
granian with `--interface rsgi benchmarks.servers.trivial_batcher:rsgi`. With `--profile` the
batches of received-in-place take the time of an emulated device.
"""

import argparse
import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.peer_servers.emulated_batch import EmulatedBatches
from benchmarks.servers.received_in_place import ReceivedInPlace

MAX_BATCH_SIZE = 32
Answer = Callable[[int], None]


class Batcher:
    """A thread that takes all waiting requests, at most MAX_BATCH_SIZE, and runs them in no time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service_times: Sequence[float] | None = None) -> None:
        """Answer on this event loop; `service_times` is l(b), s, up to the largest batch, from b = 1."""
        self._loop, self._times = loop, service_times
        self._waiting: deque[tuple[Any, Answer]] = deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, body: bytes | memoryview, answer: Answer) -> None:
        """Queue a body; `answer` is called with the size of its batch."""
        with self._arrived:
            self._waiting.append((body, answer))
            if len(self._waiting) == 1:
                self._arrived.notify()

    async def result(self, body: bytes) -> int:
        """Queue a body, and wait for the size of its batch."""
        future: asyncio.Future[int] = self._loop.create_future()
        self.submit(body, lambda size: None if future.done() else future.set_result(size))
        return await future

    def _run(self) -> None:
        batches = None if self._times is None else EmulatedBatches(self._times)
        most = MAX_BATCH_SIZE if self._times is None else len(self._times)
        while True:
            with self._arrived:
                while not self._waiting:
                    self._arrived.wait()
                batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            if batches is not None:
                batches.run(len(batch))
            self._loop.call_soon_threadsafe(_answer, batch)


def _answer(batch: list[tuple[Any, Answer]]) -> None:
    for _, answer in batch:
        answer(len(batch))


class AsgiApplication:
    """The batcher as an ASGI application."""

    def __init__(self) -> None:
        self._batcher: Batcher | None = None

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer one HTTP request."""
        if self._batcher is None:
            self._batcher = Batcher(asyncio.get_running_loop())
        message = await receive()
        chunks = [message["body"]]
        while message["more_body"]:
            message = await receive()
            chunks.append(message["body"])
        content = b'{"batch_size":%d}' % await self._batcher.result(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class RsgiApplication:
    """The batcher as an RSGI application, granian's own interface."""

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._batcher = Batcher(loop)

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        content = b'{"batch_size":%d}' % await self._batcher.result(await protocol())
        protocol.response_bytes(200, [("content-type", "application/json")], content)


rsgi = RsgiApplication()


def main() -> None:
    """Serve until the process is ended."""
    import uvicorn

    from policies.profile import load_profile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", choices=("uvicorn", "received-in-place"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--profile", help="of the device that received-in-place emulates (default: batches take no time)"
    )
    chosen = parser.parse_args()
    times = None if chosen.profile is None else load_profile(chosen.profile).service_times
    ReceivedInPlace.start_batcher = lambda loop: Batcher(loop, times)
    http: Any = "httptools" if chosen.http == "uvicorn" else ReceivedInPlace
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_level": "error", "date_header": False}
    uvicorn.run(AsgiApplication(), http=http, loop="uvloop", port=chosen.port, server_header=False, **options)


if __name__ == "__main__":
    main()
