"""Instants at which a thread wakes up precisely, for event loops whose timers are coarse."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def precise_instants(instants: Sequence[float], elapsed: Callable[[], float]) -> Iterator[asyncio.Semaphore]:
    """A semaphore of the running loop that is released at each instant, while the context is open.

    uvloop rounds timers to milliseconds, and so does asyncio's epoll: at thousands of requests a second those of one
    millisecond would be sent together. A thread sleeps with the precision of the kernel's timers, about 0.1 ms.

    Args:
        instants: sorted, s.
        elapsed: current time, s.
    """
    loop, due, stop = asyncio.get_running_loop(), asyncio.Semaphore(0), threading.Event()

    def release() -> None:
        for instant in instants:
            remaining = instant - elapsed()
            if stop.wait(remaining) if remaining > 0 else stop.is_set():
                return
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(due.release)

    thread = threading.Thread(target=release, name="precise-timer", daemon=True)
    thread.start()
    try:
        yield due
    finally:
        stop.set()
        thread.join()
