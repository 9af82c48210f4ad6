"""Metrics of calls that a gateway has served: recorded there, counted by the serving process."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

_INTERVAL = 0.1  # s
Record = tuple[str, tuple[Any, ...]]  # name of a method of Metrics, or of its statistics, and its arguments


class _Recorder:
    _kind = ""

    def __init__(self, add: Callable[[Record], None]) -> None:
        self._add = add

    def _record(self, name: str, *arguments: Any) -> None:
        self._add((f"{self._kind}{name}", arguments))


class StatisticsRecorder(_Recorder):
    """Takes the place of `Statistics`."""

    _kind = "statistics."
    call_completed = partialmethod(_Recorder._record, "call_completed")
    call_failed = partialmethod(_Recorder._record, "call_failed")


class MetricsRecorder(_Recorder):
    """Takes the place of `Metrics` as far as inference calls use it, and sends what it has recorded ten times a second.

    Attributes:
        statistics: takes the place of `Metrics.statistics`.
    """

    outcome = partialmethod(_Recorder._record, "outcome")
    rejected = partialmethod(_Recorder._record, "rejected")
    call_completed = partialmethod(_Recorder._record, "call_completed")
    access_denied = partialmethod(_Recorder._record, "access_denied")

    def __init__(self, send: Callable[[object], None]) -> None:
        """`send` is called with a message for `replay`."""
        self._records: list[Record] = []
        super().__init__(self._append)
        self._send = send
        self.statistics = StatisticsRecorder(self._append)

    def _append(self, record: Record) -> None:
        if not self._records:
            asyncio.get_running_loop().call_later(_INTERVAL, self.flush)
        self._records.append(record)

    def flush(self) -> None:
        """Send what was recorded."""
        records, self._records = self._records, []
        if records:
            self._send(("metrics", records))


def replay(metrics: Any, records: Sequence[Record]) -> None:
    """Count in `metrics` what a recorder has recorded."""
    for name, arguments in records:
        owner, _, method = name.rpartition(".")
        getattr(getattr(metrics, owner) if owner else metrics, method)(*arguments)
