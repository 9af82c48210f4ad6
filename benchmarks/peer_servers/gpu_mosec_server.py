"""mosec with one worker on a GPU. POST /inference: pixels."""

import sys
from pathlib import Path

import mosec.runtime
from mosec import Server, Worker

from benchmarks.peer_servers.gpu_network import LARGEST, Network


class Classifier(Worker):
    """Classifies images."""

    def __init__(self) -> None:
        """Load the network in the worker's process."""
        self._network = Network()

    def deserialize(self, data: bytes) -> bytes:
        """Return the pixels."""
        return data

    def forward(self, data: list[bytes]) -> list[dict[str, int]]:
        """Classify a batch."""
        return self._network.run(data)


if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", *sys.argv[1:], "--timeout", "60000"]  # ms
    beside = Path(mosec.__file__).parents[1] / "bin" / "mosec"
    if beside.is_file():  # where wheels were unpacked into a folder, in which mosec does not look for its program
        mosec.runtime.get_mosec_path = lambda: beside
    server = Server()
    server.append_worker(Classifier, max_batch_size=LARGEST, max_wait_time=1)  # ms; 0 means its default, 10
    server.run()
