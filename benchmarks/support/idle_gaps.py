"""Idle time of a device between batches while requests waited, from a log of batches and the client's instants."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

MARGIN = 0.01  # s; a request that was sent this long ago has reached the server's queue


class LoggedBatch(NamedTuple):
    """Start and end of a batch, s of the monotonic clock, and its size."""

    start: float
    end: float
    size: int


def read_batches(path: Path, since: float) -> list[LoggedBatch]:
    """The batches that benchmarks.peer_servers.emulated_batch logged and that started at `since` or later."""
    lines = path.read_text().splitlines() if path.is_file() else []
    batches = [LoggedBatch(float(start), float(end), int(size)) for start, end, size in map(str.split, lines)]
    return [batch for batch in batches if batch.start >= since]


def idle_gaps(batches: Sequence[LoggedBatch], sent: Sequence[float], margin: float = MARGIN) -> list[float]:
    """Times from the end of a batch to the start of the next one, where a request waited at that end, s.

    One waited if more requests had been sent `margin` before than were in all batches so far.

    Args:
        batches: all batches of the run, in order.
        sent: instants at which the run's requests were sent, sorted, s of the same clock; each is in one batch.
        margin: time in which a sent request reaches the queue, s.
    """
    gaps, served = [], 0
    for batch, following in pairwise(batches):
        served += batch.size
        if bisect_right(sent, batch.end - margin) > served:
            gaps.append(following.start - batch.end)
    return gaps
