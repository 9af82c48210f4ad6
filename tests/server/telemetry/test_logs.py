"""Log lines as JSON and for the console, and the bounded queue in front of the writer."""

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from policies.types import BatchKey, Launch, Request
from server.telemetry.batch_record import BatchRecord
from server.telemetry.logs import LogFormat, LogLevel, configured_logging, flush_log, log_batch

LOG = logging.getLogger("batchwright.test")
LAUNCH = Launch([Request(index, 0.99, BatchKey("googlenet"), started=1.0) for index in range(8)], reason="full")
BATCH = BatchRecord("cpu", "smdp", LAUNCH, 0, True, LAUNCH.requests, 1.0, 1.0034567, 0.178, "measured")


class Log:
    """What was written to a pipe that a thread reads."""

    def __init__(self) -> None:
        self._read, self.file = os.pipe()
        self._buffer = io.BytesIO()
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        while data := os.read(self._read, 65536):
            self._buffer.write(data)

    def close(self) -> None:
        os.close(self.file)
        self._thread.join()
        os.close(self._read)

    @property
    def text(self) -> str:
        return self._buffer.getvalue().decode()

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]


@contextmanager
def logged(level: LogLevel, log_format: LogFormat) -> Iterator[Log]:
    log = Log()
    try:
        with configured_logging(level, log_format, log.file):
            yield log
    finally:
        log.close()


def test_a_line_is_one_json_object_with_its_fields() -> None:
    with logged("info", "json") as log:
        LOG.info("served %s\nin %d", "x", 3, extra={"request_id": "r1", "level": "forged", "odd": object()})
    (line,) = log.lines
    assert list(line)[:4] == ["timestamp", "level", "logger", "event"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "batchwright.test", "served x\nin 3")
    assert line["request_id"] == "r1"
    assert line["timestamp"].endswith("Z")


def test_an_exception_is_a_field() -> None:
    with logged("info", "json") as log:
        try:
            raise ValueError("why")
        except ValueError:
            LOG.exception("failed")
    (line,) = log.lines
    assert "ValueError: why" in line["exception"]
    assert "exc_info" not in line


def test_values_that_json_cannot_represent_are_still_written() -> None:
    with logged("info", "json") as log:
        LOG.info("odd", extra={"half": "\ud800", "large": 1 << 70, "nan": float("nan")})
        LOG.info("after")
    assert log.lines[0]["large"] == 1 << 70
    assert log.lines[-1]["event"] == "after"


def test_auto_is_json_without_a_terminal_and_console_lines_are_readable() -> None:
    with logged("info", "auto") as log:
        LOG.info("one")
    assert log.lines[0]["event"] == "one"
    with logged("info", "console") as log:
        LOG.info("one", extra={"path": "\x1b[31m/x\n"})
        secret = "key"  # noqa: F841
        try:
            raise ValueError
        except ValueError:
            LOG.exception("two")
    assert "one" in log.text
    assert "\x1b" not in log.text
    assert "Traceback" in log.text
    assert "secret" not in log.text.replace('secret = "key"', ""), "no local variables"


def test_lines_below_the_level_and_third_party_lines_below_info_are_not_written() -> None:
    with logged("debug", "json") as log:
        LOG.debug("own")
        logging.getLogger("PIL.PngImagePlugin").debug("third-party")
        logging.getLogger("third.party").info("third-party info")
    assert [line["event"] for line in log.lines] == ["own", "third-party info"]
    with logged("error", "json") as log:
        LOG.warning("no")
    with logged("info", "json") as batches:
        log_batch(BATCH, 3)
    assert log.text == batches.text == ""
    assert LOG.getEffectiveLevel() == logging.WARNING, "the levels are restored"


def test_a_batch_is_one_line_at_debug() -> None:
    with logged("debug", "json") as log:
        log_batch(BATCH, 3)
        log_batch(replace(BATCH, energy=None), 3)
    first, second = log.lines
    del first["timestamp"]
    assert first == {
        "level": "debug",
        "logger": "batchwright.batch",
        "event": "batch",
        "model": "googlenet",
        "device": "cpu",
        "policy": "smdp",
        "reason": "full",
        "batch_size": 8,
        "service_ms": 3.457,
        "waited_ms": 10.0,
        "queue_length": 3,
        "energy_mj": 178.0,
        "cpu_ms": None,
    }
    assert second["energy_mj"] is None


def test_a_pipe_that_is_not_read_drops_lines_without_blocking_and_their_number_is_logged() -> None:
    """The pipe holds 64 KiB and the queue 16 lines, so that 4000 lines of 1 kB would block for ever."""
    reading, writing = os.pipe()
    texts: list[bytes] = []

    def read() -> None:
        while data := os.read(reading, 65536):
            texts.append(data)

    reader = threading.Thread(target=read)
    with configured_logging("info", "json", writing, 16):
        for number in range(4000):
            LOG.info("%d %s", number, "x" * 1000)
        reader.start()
    os.close(writing)
    reader.join()
    os.close(reading)
    lines = [json.loads(line) for line in b"".join(texts).splitlines()]
    numbers = [int(line["event"].split()[0]) for line in lines if "dropped" not in line]
    assert sum(line.get("dropped", 0) for line in lines) == 4000 - len(numbers) > 3000
    assert numbers == sorted(numbers)


def test_a_closed_pipe_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with configured_logging("info", "json", writing):
        LOG.info("not read")
    os.close(writing)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_non_blocking_descriptor_loses_no_line(blocking: bool) -> None:
    log = Log()
    os.set_blocking(log.file, blocking)
    with configured_logging("info", "json", log.file):
        for _ in range(300):
            LOG.info("x" * 1000)
    log.close()
    assert len(log.lines) == 300


@pytest.mark.slow
def test_after_a_flush_all_lines_are_written_and_a_pipe_that_is_not_read_holds_it_for_a_limited_time() -> None:
    reading, writing = os.pipe()
    with configured_logging("info", "json", writing):
        for index in range(200):
            LOG.info("line %d", index)
        flush_log()
        assert os.read(reading, 10**6).count(b"\n") == 200
        LOG.info("x" * 2**20)
        flush_log(0.05)
        os.set_blocking(writing, False)
    os.close(reading)
    os.close(writing)
