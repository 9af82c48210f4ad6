"""How a live run stands, as one line on a terminal that is overwritten about twice a second."""

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

EVERY = 0.5  # s, from one line to the next
_RECENT = 1000  # answers over which the percentile is taken


class Progress:
    """Shows how far a run is, and nothing at all where nobody looks."""

    def __init__(self, schedule: Schedule, name: str, quiet: bool) -> None:
        """`name` stands in front of the line: the policy of several, or nothing."""
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
        """What has happened `elapsed` s after the start; asked more often than people can read, it does nothing."""
        then, sent = self._before
        if self.quiet or elapsed - then < EVERY:
            return
        rate = (log.sent - sent) / (elapsed - then)
        self._before = elapsed, log.sent
        line = Text(progress_line(self._schedule, elapsed, rate, log), no_wrap=True, overflow="ellipsis")
        self._live.update(Text(f"{self._name}  ") + line if self._name else line, refresh=True)


def progress_line(schedule: Schedule, elapsed: float, rate: float, log: RunLog) -> str:
    """The line: time (s), what was sent and how fast (1/s), what came back, and how soon of late.

    Args:
        schedule: what is to come.
        elapsed: since the start, s.
        rate: of sending, 1/s.
        log: what happened so far.
    """
    left = schedule.duration - elapsed
    rest = f"{left:.0f} s to go" if left > 0 else f"waiting for {log.sent - len(log.records):,} answers"
    recent = [r.finished - r.scheduled for r in log.records[-_RECENT:] if r.status == OK]
    tail = f" · p95 {1e3 * float(np.quantile(recent, 0.95)):,.4g} ms" if recent else ""
    told = f"{len(log.records) - log.errors:,} answered, {log.errors:,} errors"
    sent = f"{log.sent:,} of {len(schedule.instants):,} sent ({rate:,.0f}/s)"
    return f"{elapsed:.0f} s, {rest} · {sent} · {told}{tail}"
