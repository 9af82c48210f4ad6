"""What stands for the GPU where `make gpu` is rehearsed: an energy counter that works as NVML's does."""

import time


class RehearsalMeter:
    """A counter that steps every 100 ms: 100 W, and 2 W for each percent of a processor that this process uses."""

    source = "nvml"
    scope = "board"
    resolution = 0.1
    about = "a synthetic counter for a rehearsal"

    def __init__(self) -> None:
        """Start at the present."""
        self._last = 0
        self._joules = 0.0
        self._used = 0.0

    def read(self) -> float | None:
        """Energy as of the last step, J."""
        step, used = int(time.monotonic() / self.resolution), time.process_time()
        if step != self._last:
            steps = step - self._last if self._last else 1
            self._joules += 100.0 * steps * self.resolution + 200.0 * (used - self._used)
            self._last, self._used = step, used
        return self._joules
