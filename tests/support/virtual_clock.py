"""An asyncio loop whose clock jumps to the next timer as soon as nobody is runnable: no test sleeps."""

import asyncio
import selectors
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def virtual_loop() -> asyncio.AbstractEventLoop:
    """A new loop; its time() starts at 0 and moves only by jumps. The caller closes it."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


def pause(seconds: float) -> None:
    """Let the running virtual loop's clock go on without it, as when the process is stopped."""
    asyncio.get_running_loop()._selector.now += seconds  # type: ignore[attr-defined]
