"""LitServe with a model of benchmarks/servers/real_models.py. POST /predict: {"body": in base64}, as it parses JSON."""

import argparse
import base64
from typing import Any

import litserve
from starlette.requests import Request

from benchmarks.servers.real_models import MODELS, serve_alike


class Served(litserve.LitAPI):
    """One model; LitServe decodes, runs and renders in its worker process."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._name, self._batches = name, settings["max_batch_size"] > 1

    def setup(self, device: Any) -> None:
        """Load the model in the worker's process."""
        self._model: Any = MODELS[self._name]()
        self._model.load("cpu")

    def decode_request(self, request: Request) -> Any:
        """The decoded body; the annotation makes LitServe parse JSON."""
        return self._model.decode(base64.b64decode(request["body"]), "")

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Return the list."""
        return inputs

    def predict(self, inputs: Any) -> Any:
        """Run a batch, or one sample where LitServe does not batch."""
        return serve_alike(self._model, inputs) if self._batches else serve_alike(self._model, [inputs])[0]

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Return the list."""
        return output

    def encode_response(self, output: Any) -> Any:
        """Return the rendered answer."""
        return self._model.render(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--wait", type=float, default=0.0, help="batch_timeout, s")
    chosen = parser.parse_args()
    api = Served(chosen.model, max_batch_size=chosen.batch, batch_timeout=chosen.wait)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120)
    server.run("127.0.0.1", chosen.port, generate_client_file=False, log_level="error", num_api_servers=1)
