"""glibc's heap: kept for torch on the CPU, trimmed otherwise; nothing happens where there is no glibc."""

import asyncio
import ctypes
import os
from collections.abc import Callable

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT = 1 << 30  # B that may lie free before the system gets them back
_EVERY = 10.0  # s


class Heap:
    """What this process does with memory that lies free; there is one heap, hence one object: `heap`."""

    def __init__(self) -> None:
        self._kept = False

    def keep_freed(self) -> None:
        """From now on keep what a batch frees for the next batch, instead of faulting in every page again.

        Thresholds alone do not do: none goes over 32 MiB, and a layer of 32 pictures takes 100. One arena, since
        other arenas' heaps end at 64 MiB.
        """
        self._kept = True
        mallopt = _of_libc("mallopt")
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)

    async def keep_trimmed(self, served: Callable[[], int], every: float = _EVERY) -> None:
        """Give free pages back every ten seconds in which more was served, by that count, unless they are kept.

        Bodies and samples of 150 kB come and go by the thousand, and threads decode them: without this the heap
        grows for hours, full of holes. Larger blocks could have pages of their own, but faulting them in costs a
        quarter of all calls. Trimming takes some milliseconds of another thread, without the interpreter's lock.
        """
        trim = _of_libc("malloc_trim")
        if self._kept or trim is None:
            return
        before = served()
        while True:
            await asyncio.sleep(every)
            now = served()
            if now != before:
                before = now
                await asyncio.to_thread(trim, 0)


heap = Heap()


def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
