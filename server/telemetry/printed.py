"""What the code of models prints: lines in the log, at a bounded rate."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from time import monotonic

_log = logging.getLogger("batchwright.printed")
_RATE = 100.0  # lines/s
_BURST = 200.0  # lines
_REPORT_EVERY = 1.0  # s
_logging = threading.local()  # whether a thread is logging what it printed
_MAX_LINE = 1000  # characters; the rest of a line is dropped


class PrintedLines(io.TextIOBase):
    """A text stream whose lines are logged, at most 100 lines/s; the number of lines dropped is logged later."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._line = threading.local()  # the unfinished line of each thread
        self._tokens, self._at = _BURST, clock()
        self._dropped, self._reported_at = 0, clock()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that `text` completes; what a log handler prints meanwhile is dropped."""
        if getattr(_logging, "active", False):
            return len(text)
        *lines, rest = text.split("\n")
        if lines:
            lines[0] = getattr(self._line, "start", "") + lines[0]
            self._line.start = ""
            _logging.active = True
            try:
                for line in lines:
                    self._log_line(line)
            finally:
                _logging.active = False
        self._line.start = (getattr(self._line, "start", "") + rest)[:_MAX_LINE]
        return len(text)

    def _log_line(self, line: str) -> None:
        with self._lock:
            now = self._clock()
            self._tokens, self._at = min(_BURST, self._tokens + _RATE * (now - self._at)), now
            if self._tokens < 1.0:
                self._dropped += 1
                return
            self._tokens -= 1.0
            dropped = 0
            if now >= self._reported_at + _REPORT_EVERY:
                dropped, self._dropped, self._reported_at = self._dropped, 0, now
        if dropped:
            _log.warning("%d printed lines were dropped: over %g lines/s", dropped, _RATE)
        if line.strip():
            _log.info("%s", line[:_MAX_LINE])


@contextmanager
def printed_to_log() -> Iterator[None]:
    """Log what is printed to sys.stdout and sys.stderr within the context."""
    sys.stdout.flush()
    with redirect_stdout(PrintedLines()), redirect_stderr(PrintedLines()):
        yield
