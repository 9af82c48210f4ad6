"""One event loop timer for the earliest of several instants."""

import asyncio
from collections.abc import Callable
from math import inf


class EarliestTimer:
    """Fires once at the earliest instant that was set, and then has to be set again."""

    def __init__(self, clock: Callable[[], float], on_fire: Callable[[], None]) -> None:
        """`clock` returns the current instant, s; `on_fire` is called on the event loop."""
        self._clock = clock
        self._on_fire = on_fire
        self._handle: asyncio.TimerHandle | None = None
        self._at = inf

    def set(self, at: float) -> None:
        """Fire at the instant `at`, s, or at the earlier one that is already set; inf has no effect."""
        if at >= self._at:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at = at
        self._handle = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._fire)

    def _fire(self) -> None:
        self._at = inf
        self._on_fire()
