"""Servers whose log is read."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import harness
from benchmarks.support.harness import Server


@dataclass(frozen=True)
class LoggedServer(Server):
    """A server whose log can be read."""

    log_file: Path

    @property
    def log(self) -> list[dict[str, Any]]:
        """The complete lines of the log so far."""
        lines = self.log_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def logged(self, text: str) -> list[dict[str, Any]]:
        """The lines with this text."""
        return [line for line in self.log if text in line["event"]]


@contextmanager
def logged_server(folder: Path, *arguments: str, module: str = "server.cli") -> Iterator[LoggedServer]:
    """Run serve-model, or another module with its arguments, on a free port until it is ready; end it by SIGTERM."""
    file = folder / "log"
    with file.open("w") as log:
        process = harness.start_process([sys.executable, "-m", module, *arguments, "--port", "0"], log.fileno())
    try:
        started = LoggedServer("", process, file)
        until(lambda: process.poll() is not None or started.logged("ready on"))
        assert process.poll() is None, file.read_text()
        url = started.logged("ready on")[0]["event"].split()[2].rstrip(",")
        yield LoggedServer(url, process, file)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


def until(condition: Callable[[], Any]) -> None:
    """Poll a condition until it is true, bounded by the time limit of the test."""
    while not condition():
        time.sleep(0.02)
