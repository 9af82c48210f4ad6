"""Meters of one NVIDIA GPU: its total-energy counter, or else its power, integrated.

Both give a lower bound where something cannot be seen: what was drawn across a reload of the driver (the counter
starts anew) or while the power could not be read is left out, not guessed.
"""

import logging
import time
from collections.abc import Callable
from threading import Event, Lock, Thread

from server.energy.nvml import Board, NvmlError

_log = logging.getLogger("batchwright.energy")

_PERIOD = 0.05  # s between two samples of the power: twice for each update of most sensors
_POLL = 0.001  # s between two looks at the counter when its steps are timed
_STEPS = 3
_PATIENCE = 2.0  # s; a GPU draws watts even at rest, so a counter that stands still for so long is broken

Clock = Callable[[], float]
Sleep = Callable[[float], object]
Wait = Callable[[float], bool]  # up to so many seconds; True: stop


class CounterMeter:
    """The GPU's own count of energy."""

    source = "nvml"
    scope = "board"
    about = "NVML's total-energy counter"

    def __init__(self, board: Board, began: int, resolution: float) -> None:
        """`began` is the counter's value from which to count, mJ; `resolution` the time between its steps, s."""
        self.resolution = resolution
        self._board = board
        self._last = began
        self._millijoules = 0
        self._faults = _Faults()
        self._lock = Lock()  # the scraper of metrics reads it, too

    def read(self) -> float | None:
        """Energy since the meter was made, J; None while the GPU refuses."""
        with self._lock:
            try:
                now = self._board.energy()
            except NvmlError as error:
                self._faults.tell(self.about, error)
                return None
            self._faults.clear()
            # Falling, it began anew: nothing says at what value, so the next step counts from here.
            self._millijoules += max(0, now - self._last)
            self._last = now
            return self._millijoules / 1e3


class PowerMeter:
    """The GPU's power, integrated by trapezoids over samples: call `sample` often, or `follow` on a thread."""

    source = "nvml"
    scope = "board"
    resolution = _PERIOD

    def __init__(self, board: Board, clock: Clock, about: str) -> None:
        """`clock` tells s; `about` says why it is not the counter that is read."""
        self.about = about
        self._board = board
        self._clock = clock
        self._last: tuple[float, float] | None = None  # s, W
        self._joules = 0.0
        self._faults = _Faults()
        self._lock = Lock()

    def read(self) -> float | None:
        """Energy since the meter was made, J; None while the GPU refuses."""
        return self.sample()

    def sample(self) -> float | None:
        """Count what was drawn since the last sample; a sample that fails leaves a gap that is not counted."""
        with self._lock:
            try:
                power = self._board.power() / 1e3
            except NvmlError as error:
                self._faults.tell(self.about, error)
                self._last = None
                return None
            self._faults.clear()
            now = self._clock()
            before, power_before = self._last or (now, power)
            self._joules += (now - before) * (power + power_before) / 2
            self._last = now, power
            return self._joules

    def follow(self, wait: Wait) -> None:
        """Sample at 20 Hz until `wait` says to stop."""
        while not wait(_PERIOD):
            self.sample()


def on_a_thread(meter: PowerMeter) -> None:
    """Follow the power for as long as the process lives."""
    Thread(target=meter.follow, args=(Event().wait,), name="power", daemon=True).start()


def nvml_meter(
    board: Board,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
    follow: Callable[[PowerMeter], object] = on_a_thread,
) -> CounterMeter | PowerMeter:
    """The counter if it counts; else the power. Takes four of the counter's steps, 0.4 s.

    Args:
        board: the GPU.
        clock: tells s.
        sleep: for so many s.
        follow: sees to it that the power is sampled from now on.

    Raises:
        OSError: the GPU is divided (MIG), or tells neither; the message says why.
    """
    if board.mig():
        raise OSError("MIG is on: NVML meters the whole GPU, and no instance's share of it can be told")
    try:
        resolution = step_period(board, clock, sleep)
        if resolution is not None:
            return CounterMeter(board, board.energy(), resolution)
        why = f"it stood still for {_PATIENCE:g} s"
    except NvmlError as error:
        why = str(error)
    try:
        board.power()
    except NvmlError as error:
        raise OSError(f"NVML's total-energy counter: {why}; its power: {error}") from error
    meter = PowerMeter(
        board, clock, f"NVML's power, integrated at {1 / _PERIOD:g} Hz (the total-energy counter: {why})"
    )
    follow(meter)
    return meter


def step_period(board: Board, clock: Clock, sleep: Sleep) -> float | None:
    """The mean time between steps of the counter, s; None if it stands still.

    Raises:
        NvmlError: the counter cannot be read.
    """
    steps: list[float] = []
    last, began = board.energy(), clock()
    while len(steps) <= _STEPS:
        sleep(_POLL)
        energy, now = board.energy(), clock()
        if energy != last:
            steps.append(now)
            last = energy
        elif now - (steps[-1] if steps else began) > _PATIENCE:
            return None
    return (steps[-1] - steps[0]) / _STEPS


class _Faults:
    """Says in the log that a sensor fails: once, until it works again or fails otherwise."""

    def __init__(self) -> None:
        self._told: int | None = None

    def tell(self, what: str, error: NvmlError) -> None:
        if error.code != self._told:
            _log.warning("%s cannot be read: %s", what, error)
        self._told = error.code

    def clear(self) -> None:
        self._told = None
