"""Trimming of glibc's heap."""

import asyncio
from contextlib import suppress

import pytest

from server.backends import glibc_heap
from server.backends.glibc_heap import trim_periodically


def _count_trims(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> int:
    """The number of trims; the count of requests is read once after each interval."""
    trims, releases = list[int](), list[int]()
    monkeypatch.setattr(glibc_heap, "_libc_function", lambda name: trims.append if name == "malloc_trim" else None)
    remaining = iter(counts)

    def requests() -> int:
        for count in remaining:
            return count
        raise EOFError

    with suppress(EOFError):
        asyncio.run(trim_periodically(requests, lambda: releases.append(0), interval=0.0))
    assert releases == trims
    return len(trims)


def test_the_heap_is_trimmed_after_the_start_and_once_after_each_interval_with_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _count_trims(monkeypatch, [0, 0, 5, 5, 5, 9, 9]) == 3


def test_malloc_trim_of_this_machine_can_be_called() -> None:
    trim = glibc_heap._libc_function("malloc_trim")
    assert trim is None or trim(0) in (0, 1)
