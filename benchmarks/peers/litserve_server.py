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
    """Takes each batch its service time."""

    def setup(self, device: Any) -> None:
        """Nothing to load."""

    def decode_request(self, request: Request) -> Any:
        """Leave the picture as it is; the annotation makes LitServe parse the body as JSON."""
        return request["image"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Stay a list."""
        return inputs

    def predict(self, inputs: list[Any]) -> list[int]:
        """Sleep for l(b)."""
        time.sleep(TIMES[len(inputs) - 1])
        return [len(inputs)] * len(inputs)

    def unbatch(self, output: list[int]) -> list[int]:
        """One each."""
        return output

    def encode_response(self, output: int) -> dict[str, int]:
        """As mosec's."""
        return {"batch_size": output}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    chosen = parser.parse_args()
    api = Emulated(max_batch_size=len(TIMES), batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=chosen.timeout)
    server.run(port=chosen.port, generate_client_file=False, log_level="error", num_api_servers=1)
