"""One timer for the earliest of many instants."""

import asyncio
from collections.abc import Callable
from math import inf


class Alarm:
    """Calls back once at the earliest instant it was set to; then it has to be set again."""

    def __init__(self, clock: Callable[[], float], ring: Callable[[], None]) -> None:
        """`clock` is what the instants are on, s; `ring` is called on the event loop."""
        self._clock = clock
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at = inf

    def set(self, at: float) -> None:
        """Ring at `at`, unless that is to happen earlier anyway; inf asks for nothing."""
        if at >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._at = inf
        self._ring()
