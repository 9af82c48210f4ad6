"""FastAPI without batching, with a model of benchmarks/servers/real_models.py: POST /predict with its body."""

import argparse
from typing import Any

import fastapi
import uvicorn
from fastapi.concurrency import run_in_threadpool

from benchmarks.servers.real_models import MODELS, serve_alike


def main() -> None:
    """Serve one model; each call runs in a thread of Starlette's pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    chosen = parser.parse_args()
    model: Any = MODELS[chosen.model]()
    model.load("cpu")
    app = fastapi.FastAPI()

    def answer(body: bytes) -> Any:
        return model.render(serve_alike(model, [model.decode(body, "")])[0])

    @app.post("/predict")
    async def predict(request: fastapi.Request) -> Any:
        return await run_in_threadpool(answer, await request.body())

    uvicorn.run(app, host="127.0.0.1", port=chosen.port, log_level="error")


if __name__ == "__main__":
    main()
