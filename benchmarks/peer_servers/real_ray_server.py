"""Ray Serve with a model of benchmarks/servers/real_models.py: POST /predict with its body."""

import argparse
import asyncio
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.servers.real_models import MODELS, serve_alike


def deployment(name: str, batch: int, wait: float) -> Any:
    """The application; `wait` in s."""

    @serve.deployment(max_ongoing_requests=10_000)
    class Served:
        def __init__(self) -> None:
            self._model: Any = MODELS[name]()
            self._model.load("cpu")

        @serve.batch(max_batch_size=batch, batch_wait_timeout_s=wait)  # type: ignore[misc, unused-ignore]
        async def _run(self, bodies: list[bytes]) -> list[Any]:
            return await asyncio.to_thread(self._answers, bodies)

        def _answers(self, bodies: list[bytes]) -> list[Any]:
            samples = [self._model.decode(body, "") for body in bodies]
            return [self._model.render(output) for output in serve_alike(self._model, samples)]

        async def __call__(self, request: Request) -> Any:
            return await self._run(await request.body())

    return Served.bind()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--wait", type=float, default=0.01, help="s")
    chosen = parser.parse_args()
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen.port})
    serve.run(deployment(chosen.model, chosen.batch, chosen.wait), route_prefix="/predict")
    threading.Event().wait()


if __name__ == "__main__":
    main()
