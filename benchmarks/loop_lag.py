"""Round-trip times of a health check while a model runs on the CPU, and while the server is idle.

The difference shows how long batches delay the event loop.
"""

import socket
import time
from typing import Any

import numpy as np

from benchmarks.support.harness import Server, argument_parser, save_record, serving, start_load

_PROBE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def _round_trips(server: Server, seconds: float) -> dict[str, float]:
    """Percentiles of the round-trip time of a health check every 20 ms on one connection, ms."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    times = []
    end = time.monotonic() + seconds
    with socket.create_connection((host, int(port))) as connection:
        while time.monotonic() < end:
            began = time.monotonic()
            connection.sendall(_PROBE)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            times.append(1e3 * (time.monotonic() - began))
            time.sleep(0.02)
    return {f"p{share}_ms": round(float(np.percentile(times, share)), 3) for share in (50, 99)}


def main() -> None:
    """Print and record both."""
    argument_parser(__doc__).parse_args()
    record: dict[str, Any] = {}
    with serving("resnet18", "--device", "cpu", "--weights", "random", "--policy", "greedy") as server:
        record["idle"] = _round_trips(server, 10)
        with start_load(server.url, "--pixels", "--rate", "20", "--duration", "22") as load:
            time.sleep(2)
            record["serving"] = _round_trips(server, 18)
            load.communicate()
    save_record("loop_lag", record)
    print(record)


if __name__ == "__main__":
    main()
