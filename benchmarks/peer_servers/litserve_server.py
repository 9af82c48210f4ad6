"""LitServe on an emulated device: POST /predict; SERVICE_TIMES in the environment is l(b), s, from b = 1, as JSON."""

import argparse
import json
import os
import time
from typing import Any

import litserve
from starlette.requests import Request

TIMES = json.loads(os.environ["SERVICE_TIMES"])


class Emulated(litserve.LitAPI):
    """A model that takes the service time of each batch."""

    def setup(self, device: Any) -> None:
        """Load nothing."""

    def decode_request(self, request: Request) -> Any:
        """Return the encoded image; the annotation makes LitServe parse the body as JSON."""
        return request["image"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Return the list."""
        return inputs

    def predict(self, inputs: list[Any]) -> list[int]:
        """Sleep for l(b)."""
        time.sleep(TIMES[len(inputs) - 1])
        return [len(inputs)] * len(inputs)

    def unbatch(self, output: list[int]) -> list[int]:
        """Return the list."""
        return output

    def encode_response(self, output: int) -> dict[str, int]:
        """Return the same answer as the mosec server."""
        return {"batch_size": output}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--most-calls", type=int, help="connections, idle ones included, at which uvicorn answers 503")
    chosen = parser.parse_args()
    api = Emulated(max_batch_size=len(TIMES), batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=chosen.timeout)
    server.run(
        port=chosen.port,
        generate_client_file=False,
        log_level="error",
        num_api_servers=1,
        limit_concurrency=chosen.most_calls,
    )
