"""Memory, open files, threads and CPU time of a server's processes, and servers of peers as processes."""

import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

from benchmarks.support.calls import HttpCall
from benchmarks.support.harness import answers, wait_until


@dataclass(frozen=True)
class ResourceUsage:
    """Sums over all processes of a tree.

    Attributes:
        rss_mb: resident memory, MB.
        files: open files.
        threads: number of threads.
        private_mb: resident memory without what may be shared with other processes, such as slots and libraries, MB.
    """

    rss_mb: float
    files: int
    threads: int
    private_mb: float


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def resource_usage(pid: int) -> ResourceUsage:
    """What a process and its descendants use now; a process that ends meanwhile counts as 0."""
    rss = private = files = threads = 0
    with suppress(psutil.NoSuchProcess):
        for process in process_tree(pid):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_info()
                rss += memory.rss
                private += memory.rss - memory.shared
                files += process.num_fds()
                threads += process.num_threads()
    return ResourceUsage(round(rss / 2**20, 1), files, threads, round(private / 2**20, 1))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants so far, s; those that ended do not count."""
    seconds = 0.0
    for process in process_tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


class PeakMemory:
    """Samples the memory of a process tree in a thread while the `with` block runs.

    Attributes:
        peak: the largest sample, MB.
    """

    def __init__(self, pid: int, interval: float = 0.25) -> None:
        """Sample the tree of `pid` every `interval`, s."""
        self.peak = 0.0
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, resource_usage(self._pid).rss_mb)


@contextmanager
def running_peer(
    command: Sequence[str], call: HttpCall, environment: Mapping[str, str], ready_within: float = 60.0
) -> Iterator[int]:
    """Run a peer's server in a session of its own until the block ends; then kill all its processes.

    Args:
        command: its command line.
        call: the server is ready when it answers this call.
        environment: variables added to this process's own.
        ready_within: s.

    Yields:
        The process's id.

    Raises:
        RuntimeError: the server ended before it was ready.
        TimeoutError: it is not ready in time.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | dict(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    request = urllib.request.Request(call.url, call.body, dict(call.headers))
    try:
        wait_until(lambda: process.poll() is not None or answers(request, timeout=5.0), ready_within)
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode} before it was ready")
        yield process.pid
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in process_tree(process.pid):  # some servers give their workers a session of their own
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
