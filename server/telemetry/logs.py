"""Structured logs: one JSON object per line, or readable lines on a terminal, written by a separate thread.

Logging only puts a record into a bounded queue. If stderr is not read, lines are dropped and counted, and the event
loop is not blocked.
"""

import json
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from time import monotonic, sleep
from typing import Any, Literal

import orjson
import structlog
from structlog.stdlib import ExtraAdder, ProcessorFormatter
from structlog.types import EventDict, Processor, WrappedLogger

from server.telemetry.batch_record import BatchRecord

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

_STDERR = 2
_CAPACITY = 8192  # lines in the queue: seconds of work for a terminal, 10 MB of memory
_FLUSH_TIMEOUT = 2.0  # s at exit, after which the lines left are dropped
_FLUSH_STEP = 0.002  # s
_OWN_LOGGERS = ("batchwright", "policies", "profiler", "server")  # Pillow logs a debug line for each chunk of an image
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY

_log = logging.getLogger("batchwright.logs")
_options: list[tuple[LogLevel, LogFormat]] = []  # of the contexts of `configured_logging` that are open
_batches = logging.getLogger("batchwright.batch")


def log_batch(batch: BatchRecord, queue_length: int) -> None:
    """Log a completed batch at level debug; `queue_length` is the number of requests that wait then."""
    if not _batches.isEnabledFor(logging.DEBUG):
        return
    fields = batch.facts() | {"queue_length": queue_length}
    # _batches.debug would also look up the calling line of code, which takes a third of its time
    record = _batches.makeRecord(_batches.name, logging.DEBUG, "", 0, "batch", (), None, None, fields)
    _batches.handle(record)


@contextmanager
def configured_logging(
    level: LogLevel = "info", log_format: LogFormat = "auto", descriptor: int = _STDERR, capacity: int = _CAPACITY
) -> Iterator[None]:
    """Write all log records of the context to a file descriptor, in order; queued records are flushed at the end.

    Args:
        level: lowest level that is logged; of third-party packages at least info.
        log_format: auto means console on a terminal, else json.
        descriptor: file descriptor to write to.
        capacity: maximum number of lines in the queue.
    """
    console = os.isatty(descriptor) if log_format == "auto" else log_format == "console"
    writer = _DescriptorHandler(descriptor)
    writer.setFormatter(_formatter(console))
    handler = _BoundedQueueHandler(Queue(capacity))
    listener = _Listener(handler, writer)
    with _installed(handler, getattr(logging, level.upper())):
        listener.start()
        _options.append((level, log_format))
        try:
            yield
        finally:
            _options.pop()
            listener.stop()


def log_options() -> tuple[LogLevel, LogFormat]:
    """Level and format of the log, for another process; those of a command line that logs nothing but warnings."""
    return _options[-1] if _options else ("warning", "console")


def flush_log(timeout: float = _FLUSH_TIMEOUT) -> None:
    """Wait until all records of `configured_logging` so far are written, at most `timeout`, s."""
    end = monotonic() + timeout
    for handler in logging.getLogger().handlers:
        while isinstance(handler, _BoundedQueueHandler) and handler.queue.unfinished_tasks and monotonic() < end:
            sleep(_FLUSH_STEP)


@contextmanager
def _installed(handler: logging.Handler, level: int) -> Iterator[None]:
    root = logging.getLogger()
    levels = {root: max(level, logging.INFO)} | {logging.getLogger(name): level for name in _OWN_LOGGERS}
    before = {logger: logger.level for logger in levels}
    logging.captureWarnings(True)
    root.addHandler(handler)
    for logger, new in levels.items():
        logger.setLevel(new)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.captureWarnings(False)
        for logger, old in before.items():
            logger.setLevel(old)


class _BoundedQueueHandler(QueueHandler):
    """Queues records of any thread without blocking.

    Attributes:
        dropped: records that did not fit the queue since the start.
    """

    queue: Queue[Any]

    def __init__(self, records: Queue[Any]) -> None:
        super().__init__(records)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now, since its arguments may change; the listener's thread does the rest."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1  # under the handler's lock


class _Listener(QueueListener):
    """The thread that writes; logs the number of dropped lines once the queue is empty again."""

    _sentinel: None  # queued to end the thread
    _thread: threading.Thread | None

    def __init__(self, handler: _BoundedQueueHandler, writer: logging.Handler) -> None:
        super().__init__(handler.queue, writer)
        self._handler = handler
        self._reported = 0

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        # the one record left may be the sentinel
        if self._handler.dropped > self._reported and self._handler.queue.qsize() <= 1:
            dropped, self._reported = self._handler.dropped - self._reported, self._handler.dropped
            text = f"{dropped} log lines were dropped: stderr was not read fast enough"
            args = (_log.name, logging.WARNING, "", 0, text, (), None, None, {"dropped": dropped})
            super().handle(_log.makeRecord(*args))

    def stop(self) -> None:
        """Flush the queue, for a limited time: the thread is a daemon and may be blocked on a full pipe."""
        with suppress(Full):
            self._handler.queue.put(self._sentinel, timeout=_FLUSH_TIMEOUT)
        if self._thread is not None:
            self._thread.join(_FLUSH_TIMEOUT)
            self._thread = None


class _DescriptorHandler(logging.Handler):
    """Writes lines to a file descriptor without Python's buffers: a blocked write would keep their lock at exit."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001  (a field that cannot be formatted must not end the thread)
            data = f"{record.name}: a line that cannot be formatted: {record.msg!r}\n".encode(errors="replace")
        with suppress(OSError):  # the reader closed the pipe
            self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process with this descriptor made it non-blocking
                select.select([], [self._descriptor], [])


def _formatter(console: bool) -> logging.Formatter:
    renderer = structlog.dev.ConsoleRenderer(
        colors=False,
        sort_keys=False,
        exception_formatter=structlog.dev.plain_traceback,  # the default prints local variables, API keys among them
    )
    processors: list[Processor] = [ProcessorFormatter.remove_processors_meta]
    if console:
        processors += [_escape_unprintable, renderer]
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_dump_json)]
    return ProcessorFormatter(foreign_pre_chain=[ExtraAdder(), _order_fields], processors=processors)


def _order_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Put timestamp, level, logger and event first; extra fields of these names are dropped."""
    record: logging.LogRecord = event["_record"]
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    head = {"timestamp": time.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
    head["event"] = event.pop("event")
    return {**head, **{key: value for key, value in event.items() if key not in (*head, "message", "asctime")}}


def _escape_unprintable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape control characters in fields, which clients may have sent, so that they do not reach the terminal."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = value.encode("unicode_escape").decode("ascii")
    return event


def _dump_json(event: Any, default: Callable[[Any], Any] = repr, **_: Any) -> str:
    try:
        return orjson.dumps(event, default=repr, option=_JSON_OPTIONS).decode()
    except TypeError:  # an unpaired surrogate, or an integer over 64 bits
        return json.dumps(event, default=repr)
