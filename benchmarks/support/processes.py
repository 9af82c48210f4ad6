"""Memory, open files and threads of a server's processes, read from /proc."""

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class ResourceUsage:
    """Sums over all processes of a tree.

    Attributes:
        rss_mb: resident memory, MB.
        files: open files.
        threads: number of threads.
    """

    rss_mb: float
    files: int
    threads: int


def process_tree(pid: int) -> list[int]:
    """The ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process ended after the glob
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def resource_usage(pid: int) -> ResourceUsage:
    """What a process and its descendants use now; a process that ends meanwhile counts as 0."""
    rss, files, threads = 0.0, 0, 0
    for each in process_tree(pid):
        try:
            text = Path(f"/proc/{each}/status").read_text()
            files += sum(1 for _ in Path(f"/proc/{each}/fd").iterdir())
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        rss += int(fields.get("VmRSS", "0 kB").split()[0]) / 1024
        threads += int(fields.get("Threads", "0"))
    return ResourceUsage(round(rss, 1), files, threads)


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
