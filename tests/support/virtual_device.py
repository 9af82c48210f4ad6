"""A device of known power on a virtual clock, with an energy counter that steps every 100 ms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import floor

import numpy as np

from profiler.energy import Instruments, LoadProgress, RunningLoad
from profiler.energy_sweep import EnergyRig
from tests.support.recorded_board import VirtualTime

STEP = 0.1  # s

Curve = Callable[[int], float]


class VirtualDevice:
    """A device that is its own meter and source of load.

    Attributes:
        idle: idle power, W.
        resting: power in the gaps of a partial load, W.
        power: power in service by batch size, W.
        service_time: service time by batch size, s.
        handover: gap between two batches that run back to back, at idle power, s.
        visited: (batch size, share of time in service) of the loads that ran.
        cooling: time for which the device draws half of a load's excess over idle power after it, s.
        fails_at: instant from which the meter has no reading, s.
    """

    source = "nvml"
    resolution = STEP
    scope = "board"
    about = "a counter of known power"

    def __init__(self, power: Curve, service_time: Curve, idle: float = 100.0) -> None:
        self.time = VirtualTime()
        self.idle = self.resting = idle
        self.power = power
        self.service_time = service_time
        self.handover = 0.0
        self.visited: list[tuple[int, float]] = []
        self.cooling = 0.0
        self.fails_at = float("inf")
        self._segments = [(0.0, 0.0, idle)]  # begin (s), energy until then (J), power since then (W)

    def read(self) -> float | None:
        if self.time.now >= self.fails_at:
            return None
        seen = STEP * floor(self.time.now / STEP + 1e-9)
        began, joules, watts = next(segment for segment in reversed(self._segments) if segment[0] <= seen)
        return joules + watts * (seen - began)

    @contextmanager
    def load(self, batch_size: int, share: float = 1.0, /) -> Iterator[RunningLoad]:
        self.visited.append((batch_size, share))
        seconds, began = self.service_time(batch_size), self.time.now
        period = seconds + self.handover if share == 1.0 else seconds / share
        between = self.idle if share == 1.0 else self.resting
        self.draw(between + (self.power(batch_size) - between) * seconds / period)

        def progress() -> LoadProgress:
            batches = floor((self.time.now - began) / period)
            return LoadProgress(batches, began + batches * period)

        yield progress
        self.rest()

    def rest(self) -> None:
        """End a load."""
        if self.cooling:
            self._segments.append(self._segment((self._segments[-1][2] + self.idle) / 2))
            self._segments.append(self._segment(self.idle, self.time.now + self.cooling))
        else:
            self.draw(self.idle)

    def draw(self, watts: float) -> None:
        """Draw this power from now on."""
        while self._segments[-1][0] > self.time.now:
            self._segments.pop()  # the device had not yet cooled
        self._segments.append(self._segment(watts))

    def _segment(self, watts: float, at: float | None = None) -> tuple[float, float, float]:
        begin = self.time.now if at is None else at
        began, joules, before = self._segments[-1]
        return begin, joules + before * (begin - began), watts

    def rig(self, seed: int = 0) -> EnergyRig:
        return EnergyRig(Instruments(self, self.time, self.time.sleep), self.load, np.random.default_rng(seed))
