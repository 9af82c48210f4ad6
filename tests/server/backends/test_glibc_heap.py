"""Trimming and keeping of glibc's heap."""

import asyncio
from collections.abc import Callable

import pytest

from server.backends import glibc_heap
from server.backends.glibc_heap import Heap


def _count_trims(monkeypatch: pytest.MonkeyPatch, heap: Heap, requests: Callable[[], int]) -> int:
    """The number of trims in 50 ms with an interval of 1 ms."""
    trims: list[int] = []
    monkeypatch.setattr(glibc_heap, "_libc_function", lambda name: trims.append if name == "malloc_trim" else None)

    async def watch() -> None:
        try:
            await asyncio.wait_for(heap.trim_periodically(requests, interval=0.001), 0.05)
        except TimeoutError:
            return

    asyncio.run(watch())
    return len(trims)


def test_the_heap_is_trimmed_once_after_each_interval_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([0, 0, 5, 5, 5, 9, 9])
    assert _count_trims(monkeypatch, Heap(), lambda: next(counts, 9)) == 2


def test_a_heap_that_keeps_freed_memory_is_never_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap()
    heap.keep_freed()
    counts = iter(range(1000))
    assert _count_trims(monkeypatch, heap, lambda: next(counts)) == 0


def test_malloc_trim_of_this_machine_can_be_called() -> None:
    trim = glibc_heap._libc_function("malloc_trim")
    assert trim is None or trim(0) in (0, 1)
