import asyncio
from collections.abc import Callable

import pytest

from server.backends import heap as heap_module
from server.backends.heap import Heap


def _trims(monkeypatch: pytest.MonkeyPatch, heap: Heap, served: Callable[[], int]) -> int:
    """How often 50 ms of looking every ms trim."""
    trims: list[int] = []
    monkeypatch.setattr(heap_module, "_of_libc", lambda name: trims.append if name == "malloc_trim" else None)

    async def watch() -> None:
        try:
            await asyncio.wait_for(heap.keep_trimmed(served, every=0.001), 0.05)
        except TimeoutError:
            return

    asyncio.run(watch())
    return len(trims)


def test_the_heap_is_trimmed_once_after_each_time_that_more_was_served(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([0, 0, 5, 5, 5, 9, 9])
    assert _trims(monkeypatch, Heap(), lambda: next(counts, 9)) == 2


def test_what_torch_on_the_cpu_keeps_is_never_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap()
    heap.keep_freed()
    counts = iter(range(1000))
    assert _trims(monkeypatch, heap, lambda: next(counts)) == 0


def test_this_machines_libc_is_asked_without_harm() -> None:
    trim = heap_module._of_libc("malloc_trim")
    assert trim is None or trim(0) in (0, 1)
