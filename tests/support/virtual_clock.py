"""An asyncio loop whose clock jumps to the next timer as soon as no task is runnable, so that tests do not sleep."""

import asyncio
import selectors
from typing import Any


class _JumpingSelector(selectors.PollSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0 if timeout is not None else None)  # None: only a thread can wake the loop
        if not ready and timeout:
            self.now += timeout
        return ready


def virtual_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop whose time() starts at 0 and advances only by jumps; the caller closes it."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


def pause(seconds: float) -> None:
    """Advance the clock of the running virtual loop without running its tasks, as when the process is stopped."""
    asyncio.get_running_loop()._selector.now += seconds  # type: ignore[attr-defined]
