"""Token buckets that several processes share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateways.shared_buckets import SharedBuckets, create_table
from server.transport.auth import _TokenBucket

ROOT = Path(__file__).parents[3]
TAKE = """
import sys
from server.gateways.shared_buckets import SharedBuckets
bucket = SharedBuckets(int(sys.argv[1])).bucket("key", 50000.0)
print("ready", flush=True)
sys.stdin.readline()
print(sum(bucket.take(5.0) == 0.0 for _ in range(40000)))
"""
LOCK = """
import fcntl, os, signal, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("locked", flush=True)
signal.pause()
"""


def start(program: str, table: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, str(table)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, pass_fds=[table], stdin=pipe, stdout=pipe, text=True)


@given(st.floats(0.1, 1000.0), st.lists(st.floats(0.0, 3.0), max_size=50))
def test_a_shared_bucket_limits_as_one_of_a_single_process(rate: float, gaps: list[float]) -> None:
    table = create_table()
    try:
        one, shared, now = _TokenBucket(rate), SharedBuckets(table).bucket("key", rate), 100.0
        for gap in gaps:
            now += gap
            waits = one.take(now), shared.take(now)
            assert waits[0] == pytest.approx(waits[1], abs=1e-6)
    finally:
        os.close(table)


def test_two_processes_together_take_no_more_than_the_bucket_has() -> None:
    table = create_table()
    processes = [start(TAKE, table) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # both take at the same time
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    taken = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(taken) == 50_000
    assert min(taken) >= 10_000
    assert SharedBuckets(table).bucket("key", 50_000.0).take(5.0) > 0.0
    os.close(table)


def test_the_lock_of_a_process_that_dies_is_removed() -> None:
    table = create_table()
    bucket = SharedBuckets(table).bucket("key", 1.0)
    with start(LOCK, table) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        process.kill()
    assert bucket.take(5.0) == 0.0
    os.close(table)


def test_an_entry_keeps_its_bucket_and_another_rate_gets_a_new_one() -> None:
    table = create_table()
    buckets = SharedBuckets(table)
    assert buckets.bucket("key", 1.0).take(5.0) == 0.0
    assert SharedBuckets(table).bucket("key", 1.0).take(5.0) == pytest.approx(1.0)
    assert buckets.bucket("key", 2.0).take(5.0) == 0.0
    assert buckets.bucket("other", 1.0).take(5.0) == 0.0
    os.close(table)


def test_a_clock_that_is_read_late_gives_no_tokens() -> None:
    table = create_table()
    bucket = SharedBuckets(table).bucket("key", 1.0)
    assert bucket.take(10.0) == 0.0
    assert bucket.take(9.0) == pytest.approx(1.0)
    assert bucket.take(10.5) == pytest.approx(0.5)
    os.close(table)
