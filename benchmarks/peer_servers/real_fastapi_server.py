"""FastAPI with a model of benchmarks/servers/real_models.py: POST /predict with its body.

Without batching each call runs in a thread of the pool. With it, a thread serves what waits, in order of arrival.
"""

import argparse
import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import Any

import fastapi
import uvicorn
from fastapi.concurrency import run_in_threadpool

from benchmarks.servers.real_models import MODELS, serve_alike


def main() -> None:
    """Serve one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    chosen = parser.parse_args()
    model: Any = MODELS[chosen.model]()
    model.load("cpu")
    app = fastapi.FastAPI()

    def answer(body: bytes) -> Any:
        return model.render(serve_alike(model, [model.decode(body, "")])[0])

    waiting: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()

    def serve_waiting() -> None:
        while True:
            batch = [waiting.get()]
            while len(batch) < chosen.batch and not waiting.empty():
                batch.append(waiting.get())
            for (_, future), output in zip(batch, serve_alike(model, [sample for sample, _ in batch]), strict=True):
                future.set_result(output)

    @app.post("/predict")
    async def predict(request: fastapi.Request) -> Any:
        body = await request.body()
        if chosen.batch == 1:
            return await run_in_threadpool(answer, body)
        future: Future[Any] = Future()
        waiting.put((await run_in_threadpool(model.decode, body, ""), future))
        return model.render(await asyncio.wrap_future(future))

    threading.Thread(target=serve_waiting, daemon=True).start()

    uvicorn.run(app, host="127.0.0.1", port=chosen.port, log_level="error")


if __name__ == "__main__":
    main()
