"""LitServe with one worker on a GPU. POST /predict: {"image": pixels in base64}, since it parses bodies as JSON."""

import argparse
import base64
from typing import Any

import litserve
from starlette.requests import Request

from benchmarks.peer_servers.gpu_network import LARGEST, Network


class Classifier(litserve.LitAPI):
    """Classifies images."""

    def setup(self, device: Any) -> None:
        """Load the network in the worker's process."""
        self._network = Network()

    def decode_request(self, request: Request) -> bytes:
        """The pixels; the annotation makes LitServe parse the body as JSON."""
        return base64.b64decode(request["image"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Return the list."""
        return inputs

    def predict(self, inputs: list[bytes]) -> list[dict[str, int]]:
        """Classify a batch."""
        return self._network.run(inputs)

    def unbatch(self, output: list[dict[str, int]]) -> list[dict[str, int]]:
        """Return the list."""
        return output

    def encode_response(self, output: dict[str, int]) -> dict[str, int]:
        """Return the answer."""
        return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    api = Classifier(max_batch_size=LARGEST, batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)  # the network has its device
    server.run("127.0.0.1", parser.parse_args().port, generate_client_file=False, log_level="error", num_api_servers=1)
