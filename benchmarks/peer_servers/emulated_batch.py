"""The device that the compared servers run, and a log of its batches; needs the standard library only."""

import os
import time
from collections.abc import Sequence

_WAKE_UP = 3e-4  # s; about the delay of a sleeping thread's wake-up


class BatchLog:
    """Appends start, end and size of each batch to the file BATCH_LOG of the environment; without it, does nothing.

    Start and end are of the system's monotonic clock, s. A batch is written after the start of the next one, so that
    writing is no part of the time between them; the last batch is never written. The file stays open, since opening it
    takes longer than all the rest.
    """

    def __init__(self) -> None:
        path = os.environ.get("BATCH_LOG")
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._line = b""

    def started(self) -> float:
        """Return the present, the start of a batch."""
        now = time.monotonic()
        if self._file is not None:
            os.write(self._file, self._line)
        return now

    def ended(self, start: float, size: int) -> None:
        """Note that the batch which started then has ended now."""
        self._line = f"{start} {time.monotonic()} {size}\n".encode()


class EmulatedBatches:
    """Takes the service time of each batch, as precisely as our emulated device does."""

    def __init__(self, service_times: Sequence[float]) -> None:
        """`service_times` is l(b), s, from b = 1."""
        self._times = service_times
        self._log = BatchLog()

    def run(self, size: int) -> None:
        """Return after l(size)."""
        start = self._log.started()
        end = start + self._times[size - 1]
        while (left := end - time.monotonic()) > 0:
            time.sleep(max(0.0, left - _WAKE_UP))
        self._log.ended(start, size)
