"""How long the event loop keeps a trivial request waiting while a model runs on the CPU, and while it does not."""

import socket
import subprocess
import time
from typing import Any

import numpy as np

from benchmarks.serving import Server, command_line, save, serving

_PROBE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def _round_trips(server: Server, seconds: float) -> dict[str, float]:
    """Of a health check every 20 ms on one connection, ms."""
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
    record: dict[str, Any] = {}
    flags = ["--device", "cpu", "--weights", "random", "--policy", "greedy"]
    with serving("resnet18", *flags) as server:
        record["idle"] = _round_trips(server, 10)
        load = [*command_line("generate-load"), server.url, "--pixels", "--rate", "20", "--duration", "22", "--json"]
        with subprocess.Popen(load, stdout=subprocess.PIPE) as generator:
            time.sleep(2)
            record["serving"] = _round_trips(server, 18)
            generator.communicate()
    save("loop_lag", record)
    print(record)


if __name__ == "__main__":
    main()
