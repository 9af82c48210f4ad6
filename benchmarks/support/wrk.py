"""Requests a second of an HTTP server, by wrk (Debian's package of this name)."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def write_script(folder: Path, name: str, body: bytes, headers: Mapping[str, str] | None = None) -> Path:
    """Write the script that makes wrk send this body; return its path."""
    (folder / name).write_bytes(body)
    lines = "\n".join(f'wrk.headers["{key}"] = "{value}"' for key, value in (headers or {}).items())
    script = folder / f"{name}.lua"
    script.write_text(_SCRIPT.format(body=folder / name, headers=lines))
    return script


def run_wrk(url: str, script: Path, connections: int, duration: float) -> WrkRun:
    """Send calls on all connections for `duration` s, from one thread."""
    flags = ("-t1", f"-c{connections}", f"-d{round(duration)}s", "-s", str(script))
    line = [shutil.which("wrk") or "wrk", *flags, url]
    return parse(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> WrkRun:
    """Read wrk's output."""
    bad = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", text)))
    for errors in re.findall(r"Socket errors: (.*)", text):
        bad += sum(map(int, re.findall(r"\d+", errors)))
    rate, requests = re.findall(r"Requests/sec:\s+([\d.]+)", text)[0], re.findall(r"(\d+) requests in", text)[0]
    return WrkRun(float(rate), int(requests), bad)
