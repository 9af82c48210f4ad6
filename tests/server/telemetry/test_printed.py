"""Printed lines: logged, at a bounded rate."""

import logging
import sys
import threading

import pytest

from server.telemetry.printed import PrintedLines, printed_to_log


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "batchwright.printed"]


def test_what_is_printed_is_logged_by_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), printed_to_log():
        print("one", "two")  # noqa: T201
        print("three\n\nfour", end="")  # noqa: T201
        print(" and five", file=sys.stdout)  # noqa: T201
        print("six", file=sys.stderr)  # noqa: T201
    assert messages(caplog) == ["one two", "three", "four and five", "six"]


def test_unfinished_lines_of_threads_are_not_mixed(caplog: pytest.LogCaptureFixture) -> None:
    stream = PrintedLines()
    stream.write("main ")
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=stream.write, args=("thread\n",))
        thread.start()
        thread.join()
        stream.write("goes on\n")
    assert messages(caplog) == ["thread", "main goes on"]


def test_a_flood_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    stream = PrintedLines(lambda: now)
    with caplog.at_level(logging.INFO):
        for index in range(10_000):
            stream.write(f"{index}\n")
        assert len(messages(caplog)) == 200
        now = 1.0
        stream.write("x" * 10**6 + "\n")
    assert messages(caplog)[200] == "9800 printed lines were dropped: over 100 lines/s"
    assert messages(caplog)[201] == "x" * 1000


def test_a_log_handler_that_prints_does_not_recurse(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), printed_to_log():
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        try:
            print("once")  # noqa: T201
        finally:
            logging.getLogger().removeHandler(handler)
    assert messages(caplog) == ["once"]
