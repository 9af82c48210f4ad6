"""mosec with a model of benchmarks/servers/real_models.py: POST /inference with its body.

One worker a core decodes, one runs the batches. Their processes import this file again: the model's name is in the
environment.
"""

import argparse
import os
import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.servers.real_models import MODELS, serve_alike


class Decoder(Worker):
    """Decodes one body."""

    def __init__(self) -> None:
        self._model: Any = MODELS[os.environ["MODEL"]]()

    def deserialize(self, data: bytes) -> bytes:
        """Return the body."""
        return data

    def forward(self, data: bytes) -> Any:
        """Return the inputs."""
        return self._model.decode(data, "")


class Inference(Worker):
    """Runs batches, and renders the answers."""

    def __init__(self) -> None:
        self._model: Any = MODELS[os.environ["MODEL"]]()
        self._model.load("cpu")

    def forward(self, data: Any) -> Any:
        """Return the answers of a batch, or that of one sample, which mosec gives alone where it does not batch."""
        if not isinstance(data, list):
            return self.forward([data])[0]
        return [self._model.render(output) for output in serve_alike(self._model, data)]


def main() -> None:
    """Serve one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--wait", type=int, default=10, help="max_wait_time, ms; 0 means 10")
    chosen = parser.parse_args()
    os.environ["MODEL"] = chosen.model
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", chosen.port, "--timeout", "600000", "--capacity", "10000"]
    server = Server()
    server.append_worker(Decoder, num=os.cpu_count() or 1)
    server.append_worker(Inference, max_batch_size=chosen.batch, max_wait_time=chosen.wait, timeout=120)
    server.run()


if __name__ == "__main__":
    main()
