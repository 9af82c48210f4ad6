"""What the benchmarks share: a server process of their own, its metrics, and where records go."""

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

RECORDS = Path(__file__).parent / "records"
_MODULES = {
    "serve-model": "server.cli",
    "generate-load": "loadgen.cli",
    "profile-model": "profiler.cli",
    "solve-policy": "policies.cli",
}


@dataclass(frozen=True)
class Server:
    """A running serve-model process."""

    url: str
    process: "subprocess.Popen[bytes]"

    def samples(self, name: str) -> list[Sample]:
        """Read the samples of one metric."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples if sample.name == name]

    def metric(self, name: str) -> dict[str, float]:
        """Read the values of one metric by their labels as text, such as '{model="m"}'; "" without labels."""
        return {_label_text(sample): sample.value for sample in self.samples(name)}

    def cpu_seconds(self) -> float:
        """User and system time the process has used so far, s."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(
    *command: str, ready_within: float = 120.0, tls: ssl.SSLContext | None = None, files: int | None = None
) -> Iterator[Server]:
    """Run a server's command line on a free port until it is ready; send it SIGTERM at the end.

    Args:
        command: the command line, without --port.
        ready_within: start-up time after which the run fails, s.
        tls: client context for a server that speaks TLS; None: plain HTTP.
        files: limit of the server's open files; None: this process's own.
    """
    port = free_port()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"

    def limit_files() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stderr=log, preexec_fn=limit_files)  # noqa: PLW1509
        try:
            _await_ready(process, url, ready_within, log, tls)
            yield Server(url, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def serving(*arguments: str, ready_within: float = 120.0) -> AbstractContextManager[Server]:
    """Run serve-model with these arguments."""
    return running(*command_line("serve-model"), *arguments, ready_within=ready_within)


def bare(profile: str) -> AbstractContextManager[Server]:
    """Run the yardstick, benchmarks/bare.py, on a profile."""
    return running(sys.executable, "-m", "benchmarks.bare", "--profile", profile)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(
    process: "subprocess.Popen[bytes]", url: str, ready_within: float, log: IO[str], tls: ssl.SSLContext | None
) -> None:
    end = time.monotonic() + ready_within
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v2/health/ready", timeout=1, context=tls)
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
        else:
            return
    process.kill()
    log.seek(0)
    raise RuntimeError(f"the server did not become ready: {log.read()}")


def command_line(command: str) -> list[str]:
    """How to run one of the project's commands, installed or not."""
    return [sys.executable, "-m", _MODULES[command]]


def run_json(command: str, *arguments: str, within: float | None = None) -> Any:
    """Run one of the project's commands with --json, at most `within` s, and read what it printed.

    Raises:
        RuntimeError: it failed.
    """
    line = [*command_line(command), *arguments, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=within)
    if done.returncode:
        raise RuntimeError(f"{command} {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def _label_text(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{{{labels}}}" if labels else ""


def median_of_histogram(samples: Iterable[Sample]) -> float | None:
    """The median of a Prometheus histogram's _bucket samples, interpolated within its bucket; None when empty."""
    buckets = sorted((float(sample.labels["le"]), sample.value) for sample in samples)
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
