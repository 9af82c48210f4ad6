"""A minimal FastAPI batcher on a GPU, which launches all queued requests when it is free. POST /predict: pixels."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.peer_servers.gpu_network import LARGEST, Network


def create() -> FastAPI:
    """The application, whose network runs in a thread."""
    waiting: list[tuple[bytes, asyncio.Future[dict[str, int]]]] = []
    arrived, pool = asyncio.Event(), ThreadPoolExecutor(1)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        network = await loop.run_in_executor(pool, Network)
        while True:
            await arrived.wait()
            batch, waiting[:] = waiting[:LARGEST], waiting[LARGEST:]
            if not waiting:
                arrived.clear()
            try:
                answers = await loop.run_in_executor(pool, network.run, [image for image, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    future.set_result(answer)
            except Exception as error:  # noqa: BLE001  (each call of the batch is answered 500)
                for _, future in batch:
                    future.set_exception(error)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher = asyncio.create_task(serve())
        yield
        batcher.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, int]:
        future: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        waiting.append((await request.body(), future))
        arrived.set()
        return await future

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(create(), port=parser.parse_args().port, log_level="error", access_log=False)
