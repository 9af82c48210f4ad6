"""Settings of glibc's malloc: freed memory is kept in workers, else trimmed. Without glibc a no-op."""

import asyncio
import ctypes
import os
from collections.abc import Callable

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT = 1 << 30  # free bytes that are not returned to the system
_TRIM_INTERVAL = 10.0  # s


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch, which otherwise faults in every page again; before threads are started.

    Thresholds alone do not suffice: their maximum is 32 MiB, and a layer of 32 images takes 100. There is one arena,
    since the heaps of other arenas end at 64 MiB.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


async def trim_periodically(
    requests: Callable[[], int], release: Callable[[], None], interval: float = _TRIM_INTERVAL
) -> None:
    """Trim the heap, and release other free memory, after each interval, s, in which the count of requests has grown.

    Bodies and samples are allocated by the thousand and decoded in threads, so that the heap fragments and grows for
    hours without this. Memory mapping such blocks instead costs a quarter of the throughput. Trimming takes some
    milliseconds in another thread, without the interpreter's lock.
    """
    trim = _libc_function("malloc_trim")
    before = -1  # the start has left free memory, too
    while True:
        await asyncio.sleep(interval)
        now = requests()
        if now != before:
            before = now
            await asyncio.to_thread(release)
            if trim is not None:
                await asyncio.to_thread(trim, 0)


def _libc_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
