"""Structured logs: one JSON object a line, or readable lines on a terminal, written by a thread of their own.

Whoever logs only puts a record into a bounded queue. A reader of stderr that has stopped reading therefore costs
lines, which are counted, and never holds up the event loop.
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
from typing import Any, Literal, TypedDict, Unpack

import orjson
import structlog
from structlog.stdlib import ExtraAdder, ProcessorFormatter
from structlog.types import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Form = Literal["auto", "console", "json"]

_STDERR = 2
_PLACES = 8192  # lines that may wait for the reader of stderr: seconds of work for a terminal, 10 MB of memory
_FLUSHED_WITHIN = 2.0  # s at exit; a reader that takes longer loses the rest
_OURS = ("batchwright", "policies", "profiler", "server")  # others' debug lines tell of every chunk of every picture
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY

_log = logging.getLogger("batchwright.logs")
_batches = logging.getLogger("batchwright.batch")


class BatchFacts(TypedDict):
    """What is told of a batch.

    Attributes:
        model: its name.
        device: the device's name.
        policy: the policy's name.
        reason: why it was launched then.
        batch_size: how many were served together.
        service: time on the device, s.
        waited: waiting time of the oldest of them, s.
        queue_length: how many wait now.
        energy: of the batch by the profile, J; None where unknown.
    """

    model: str
    device: str
    policy: str
    reason: str
    batch_size: int
    service: float
    waited: float
    queue_length: int
    energy: float | None


def log_batch(**facts: Unpack[BatchFacts]) -> None:
    """One line a batch, at info."""
    if not _batches.isEnabledFor(logging.INFO):
        return
    energy = facts["energy"]
    fields = {
        "model": facts["model"],
        "device": facts["device"],
        "policy": facts["policy"],
        "reason": facts["reason"],
        "batch_size": facts["batch_size"],
        "service_ms": round(1e3 * facts["service"], 3),
        "waited_ms": round(1e3 * facts["waited"], 3),
        "queue_length": facts["queue_length"],
        "energy_mj": None if energy is None else round(1e3 * energy, 3),
    }
    # as _batches.info would, but nobody needs the line of code, and looking for it takes a third of the time
    record = _batches.makeRecord(_batches.name, logging.INFO, "", 0, "batch", (), None, None, fields)
    _batches.handle(record)


@contextmanager
def logging_to(
    level: Level = "info", form: Form = "auto", file: int = _STDERR, places: int = _PLACES
) -> Iterator[None]:
    """Everything that is logged inside goes to the file, in order; what waits at the end is still written.

    Args:
        level: the least that is logged; of other people's packages no less than info.
        form: auto means console on a terminal, else json.
        file: descriptor that is written to.
        places: lines that may wait to be written.
    """
    console = os.isatty(file) if form == "auto" else form == "console"
    lines = _Lines(file)
    lines.setFormatter(_formatter(console))
    inbox = _Inbox(Queue(places))
    listener = _Listener(inbox, lines)
    with _installed(inbox, getattr(logging, level.upper())):
        listener.start()
        try:
            yield
        finally:
            listener.stop()


@contextmanager
def _installed(handler: logging.Handler, level: int) -> Iterator[None]:
    root = logging.getLogger()
    levels = {root: max(level, logging.INFO)} | {logging.getLogger(name): level for name in _OURS}
    before = {logger: logger.level for logger in levels}
    logging.captureWarnings(True)
    root.addHandler(handler)
    for logger, wanted in levels.items():
        logger.setLevel(wanted)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.captureWarnings(False)
        for logger, old in before.items():
            logger.setLevel(old)


class _Inbox(QueueHandler):
    """Takes records from any thread without waiting.

    Attributes:
        dropped: how many found no place, ever.
    """

    queue: Queue[Any]

    def __init__(self, backlog: Queue[Any]) -> None:
        super().__init__(backlog)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Arguments may change later, so the text is made now; the rest is the thread's work."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1  # under the handler's lock


class _Listener(QueueListener):
    """The thread that writes; it says how many lines are missing as soon as it has caught up."""

    _sentinel: None  # what ends the thread
    _thread: threading.Thread | None

    def __init__(self, inbox: _Inbox, lines: logging.Handler) -> None:
        super().__init__(inbox.queue, lines)
        self._inbox = inbox
        self._told = 0

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        if self._inbox.dropped > self._told and self._inbox.queue.qsize() <= 1:  # at the end that one is the sentinel
            missing, self._told = self._inbox.dropped - self._told, self._inbox.dropped
            text = f"{missing} log lines were dropped: stderr was not read fast enough"
            args = (_log.name, logging.WARNING, "", 0, text, (), None, None, {"dropped": missing})
            super().handle(_log.makeRecord(*args))

    def stop(self) -> None:
        """Write what waits, but wait for no reader who has gone to sleep: the thread is a daemon."""
        with suppress(Full):
            self._inbox.queue.put(self._sentinel, timeout=_FLUSHED_WITHIN)
        if self._thread is not None:
            self._thread.join(_FLUSHED_WITHIN)
            self._thread = None


class _Lines(logging.Handler):
    """Writes lines to a descriptor, past Python's buffers: their lock would be held at exit while a reader sleeps."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001  (a field that cannot be written must not end the thread)
            data = f"{record.name}: a line that cannot be formatted: {record.msg!r}\n".encode(errors="replace")
        with suppress(OSError):  # nobody reads any more; the server goes on
            self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except BlockingIOError:  # somebody made the descriptor non-blocking
                select.select([], [self._file], [])


def _formatter(console: bool) -> logging.Formatter:
    renderer = structlog.dev.ConsoleRenderer(
        colors=False,
        sort_keys=False,
        exception_formatter=structlog.dev.plain_traceback,  # the fancy one shows local variables, keys among them
    )
    last: list[Processor] = [ProcessorFormatter.remove_processors_meta]
    if console:
        last += [_printable, renderer]
    else:
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    return ProcessorFormatter(foreign_pre_chain=[ExtraAdder(), _head], processors=last)


def _head(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """When, how grave, who and what come first, whatever fields there are."""
    record: logging.LogRecord = event["_record"]
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    head = {"timestamp": when.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
    head["event"] = event.pop("event")
    return {**head, **{key: value for key, value in event.items() if key not in (*head, "message", "asctime")}}


def _printable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """What clients send may be among the fields: nothing of it steers a terminal."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = value.encode("unicode_escape").decode("ascii")
    return event


def _json(event: Any, default: Callable[[Any], Any] = repr, **_: Any) -> str:
    try:
        return orjson.dumps(event, default=repr, option=_JSON_OPTIONS).decode()
    except TypeError:  # half a surrogate pair, or a number of more than 64 bits
        return json.dumps(event, default=repr)
