"""The baseline: FastAPI and a minimal greedy batcher, on an emulated device, with the same bodies as serve-model.

Its excess over the simulated response time is the cost of HTTP and the interpreter on this machine. POST /predict
decodes an image in a pool of one thread a core.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.peer_servers.decoded_image import decode
from benchmarks.peer_servers.emulated_batch import EmulatedBatches
from policies.profile import Profile, load_profile


async def serve(profile: Profile, waiting: list["asyncio.Future[int]"], arrived: asyncio.Event) -> None:
    """Launch all waiting requests, at most the largest batch, whenever the device is free."""
    batches = EmulatedBatches(profile.service_times)
    while True:
        await arrived.wait()
        batch, waiting[:] = waiting[: profile.max_batch_size], waiting[profile.max_batch_size :]
        if not waiting:
            arrived.clear()
        await asyncio.to_thread(batches.run, len(batch))
        for future in batch:
            future.set_result(len(batch))


def create(profile: Profile) -> FastAPI:
    """The application in front of that batcher."""
    waiting: list[asyncio.Future[int]] = []
    arrived = asyncio.Event()
    pool = ThreadPoolExecutor(os.cpu_count())

    async def batched() -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        arrived.set()
        return await future

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher = asyncio.create_task(serve(profile, waiting, arrived))
        yield
        batcher.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/v2/models/{model}/infer")
    async def infer(model: str, request: Request) -> dict[str, Any]:
        await request.body()
        return {"model_name": model, "parameters": {"batch_size": await batched()}, "outputs": []}

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, int]:
        await asyncio.get_running_loop().run_in_executor(pool, decode, await request.body())
        return {"batch_size": await batched()}

    @app.get("/v2/models/{model}")
    async def metadata(model: str) -> dict[str, Any]:
        image = {"name": "image", "datatype": "UINT8", "shape": [-1, 224, 224, 3]}
        logits = {"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}
        return {"name": model, "inputs": [image], "outputs": [logits]}

    return app


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--port", type=int, required=True)
    chosen = parser.parse_args()
    uvicorn.run(create(load_profile(chosen.profile)), port=chosen.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
