"""mosec on an emulated device: POST /inference; SERVICE_TIMES in the environment is l(b), s, from b = 1, as JSON.

With DECODE in the environment, one worker a core decodes images before they are batched; that needs Pillow.
"""

import json
import os

from emulated_batch import EmulatedBatches
from mosec import Server, Worker

TIMES = json.loads(os.environ["SERVICE_TIMES"])


class Decoder(Worker):
    """Decodes one image."""

    def __init__(self) -> None:
        from decoded_image import decode

        self._decode = decode

    def deserialize(self, data: bytes) -> bytes:
        """Return the encoded image."""
        return data

    def forward(self, data: bytes) -> bytes:
        """Return the pixels."""
        return self._decode(data)


class Emulated(Worker):
    """A model that takes the service time of each batch."""

    def __init__(self) -> None:
        self._batches = EmulatedBatches(TIMES)

    def deserialize(self, data: bytes) -> bytes:
        """Return the body."""
        return data

    def forward(self, data: list[bytes]) -> list[dict[str, int]]:
        """Take l(b)."""
        self._batches.run(len(data))
        return [{"batch_size": len(data)}] * len(data)


if __name__ == "__main__":
    server = Server()
    if "DECODE" in os.environ:
        server.append_worker(Decoder, num=os.cpu_count() or 1)
    server.append_worker(Emulated, max_batch_size=len(TIMES), max_wait_time=1)  # ms; 0 means its default, 10
    server.run()
