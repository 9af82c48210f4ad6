"""What the benchmarks share: a server process of their own, its metrics, and where records go."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Server:
    """A running serve-model process."""

    url: str
    pid: int

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric: labels -> value."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def cpu_seconds(self) -> float:
        """User and system time the process has used so far, s."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*arguments: str, port: int = 18080, ready_within: float = 120.0) -> Iterator[Server]:
    """Run serve-model with these arguments; end it by SIGTERM."""
    command = [str(BIN / "serve-model"), *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(process, url, ready_within)
        yield Server(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _await_ready(process: "subprocess.Popen[str]", url: str, ready_within: float) -> None:
    end = time.monotonic() + ready_within
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=1)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    process.kill()
    sys.exit(f"the server did not become ready: {process.communicate()[1]}")


def run_json(command: str, *arguments: str) -> dict[str, Any]:
    """Run one of the project's commands with --json and read what it printed."""
    done = subprocess.run([str(BIN / command), *arguments, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} {' '.join(arguments)}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def median_of_histogram(samples: dict[str, float]) -> float | None:
    """The median of a Prometheus histogram's _bucket samples, interpolated within its bucket; None when empty."""
    buckets = sorted((float(re.findall(r'le="([^"]+)"', k)[0].replace("+Inf", "inf")), v) for k, v in samples.items())
    if not buckets or not buckets[-1][1]:
        return None
    half, low, below = buckets[-1][1] / 2, 0.0, 0.0
    for high, count in buckets:
        if count >= half:
            return low + (high - low) * (half - below) / (count - below)
        low, below = high, count
    return None


def save(name: str, record: Any) -> None:
    """Write a record as JSON under benchmarks/records/."""
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def load(name: str) -> Any:
    """A record made before; an empty dictionary when there is none."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}
