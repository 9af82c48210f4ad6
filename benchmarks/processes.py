"""What a server's processes hold, read from /proc: memory, open files, threads."""

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Held:
    """By all processes of a tree together: resident memory, MB; open files; threads."""

    rss_mb: float
    files: int
    threads: int


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended just now
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def held(pid: int) -> Held:
    """What the process and its descendants hold now; those that end meanwhile hold nothing."""
    rss, files, threads = 0.0, 0, 0
    for one in family(pid):
        try:
            text = Path(f"/proc/{one}/status").read_text()
            files += sum(1 for _ in Path(f"/proc/{one}/fd").iterdir())
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        rss += int(fields.get("VmRSS", "0 kB").split()[0]) / 1024
        threads += int(fields.get("Threads", "0"))
    return Held(round(rss, 1), files, threads)


class Watch:
    """Looks every `interval` s, in a thread, while the `with` block runs; `peak` is the largest memory seen, MB."""

    def __init__(self, pid: int, interval: float = 0.25) -> None:
        self.peak = 0.0
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, held(self._pid).rss_mb)
