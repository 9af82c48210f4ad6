"""mosec on an emulated device: POST /inference; SERVICE_TIMES in the environment is l(b), s, from b = 1, as JSON."""

import json
import os
import time

from mosec import Server, Worker

TIMES = json.loads(os.environ["SERVICE_TIMES"])


class Emulated(Worker):
    """A model that takes the service time of each batch."""

    def deserialize(self, data: bytes) -> bytes:
        """Return the encoded image."""
        return data

    def forward(self, data: list[bytes]) -> list[dict[str, int]]:
        """Sleep for l(b)."""
        time.sleep(TIMES[len(data) - 1])
        return [{"batch_size": len(data)}] * len(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Emulated, max_batch_size=len(TIMES), max_wait_time=1)  # ms; 0 means its default, 10
    server.run()
