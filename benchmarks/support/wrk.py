"""Requests a second of an HTTP server, by wrk (Debian's package of this name)."""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.calls import HttpCall

_SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
{headers}
"""


@dataclass(frozen=True)
class WrkRun:
    """What one run of wrk counted.

    Attributes:
        requests_per_s: answers a second.
        requests: answers in all.
        not_200: how many of them had a status of 400 or more, and how many calls had no answer.
    """

    requests_per_s: float
    requests: int
    not_200: int


def is_installed() -> bool:
    """Whether wrk is installed."""
    return shutil.which("wrk") is not None


def run_wrk(call: HttpCall, connections: int, duration: float) -> WrkRun:
    """Make the call on all connections for `duration` s, from one thread."""
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder) / "body", Path(folder) / "script.lua"
        body.write_bytes(call.body)
        headers = "\n".join(f'wrk.headers["{key}"] = "{value}"' for key, value in call.headers.items())
        script.write_text(_SCRIPT.format(body=body, headers=headers))
        flags = ("-t1", f"-c{connections}", f"-d{round(duration)}s", "-s", str(script))
        line = [shutil.which("wrk") or "wrk", *flags, call.url]
        return parse(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> WrkRun:
    """Read wrk's output."""
    bad = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", text)))
    for errors in re.findall(r"Socket errors: (.*)", text):
        bad += sum(map(int, re.findall(r"\d+", errors)))
    rate, requests = re.findall(r"Requests/sec:\s+([\d.]+)", text)[0], re.findall(r"(\d+) requests in", text)[0]
    return WrkRun(float(rate), int(requests), bad)
