"""Progress of a live run: one line on the terminal, updated about twice a second."""

import sys
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen.client import RunLog
from loadgen.report import OK
from loadgen.schedule import Schedule

INTERVAL = 0.5  # s between two updates
_RECENT = 1000  # number of responses for the percentile


class Progress:
    """Shows the progress of a run, and nothing if stderr is no terminal."""

    def __init__(self, schedule: Schedule, name: str, quiet: bool) -> None:
        """`name` is the prefix of the line: the policy of a comparison, or ""."""
        self._schedule, self._name = schedule, name
        self.quiet = quiet or not sys.stderr.isatty()
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._before = (0.0, 0)

    def __enter__(self) -> Self:
        if not self.quiet:
            self._live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if not self.quiet:
            self._live.stop()

    def show(self, elapsed: float, log: RunLog) -> None:
        """Show the progress `elapsed` s after the start, at most once per INTERVAL."""
        then, sent = self._before
        if self.quiet or elapsed - then < INTERVAL:
            return
        rate = (log.sent - sent) / (elapsed - then)
        self._before = elapsed, log.sent
        line = Text(progress_line(self._schedule, elapsed, rate, log), no_wrap=True, overflow="ellipsis")
        self._live.update(Text(f"{self._name}  ") + line if self._name else line, refresh=True)


def progress_line(schedule: Schedule, elapsed: float, rate: float, log: RunLog) -> str:
    """Format the progress: elapsed and remaining time, requests sent, responses, and recent 95th percentile.

    Args:
        schedule: schedule of the run.
        elapsed: time since the start, s.
        rate: current rate of sending, 1/s.
        log: log of the run.
    """
    left = schedule.duration - elapsed
    rest = f"{left:.0f} s to go" if left > 0 else f"waiting for {log.sent - len(log.records):,} responses"
    recent = [r.finished - r.scheduled for r in log.records[-_RECENT:] if r.status == OK]
    tail = f" · p95 {1e3 * float(np.quantile(recent, 0.95)):,.4g} ms" if recent else ""
    done = f"{len(log.records) - log.errors:,} answered, {log.errors:,} errors"
    sent = f"{log.sent:,} of {len(schedule.instants):,} sent ({rate:,.0f}/s)"
    return f"{elapsed:.0f} s, {rest} · {sent} · {done}{tail}"
