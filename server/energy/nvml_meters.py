"""Energy meters of one NVIDIA GPU: its total-energy counter, or its power integrated over time.

Energy that cannot be read is left out, so that both give a lower bound: across a reload of the driver, which resets the
counter, and while the power cannot be read.
"""

import logging
import time
from collections.abc import Callable
from threading import Event, Lock, Thread

from server.energy.nvml import Board, NvmlError

_log = logging.getLogger("batchwright.energy")

_SAMPLE_PERIOD = 0.05  # s between two power samples; most sensors update every 0.1 s
_POLL_PERIOD = 0.001  # s between two reads of the counter while its update period is measured
_UPDATE_PERIODS = 3  # measured to find the counter's update period
_COUNTER_TIMEOUT = 2.0  # s; an idle GPU consumes watts, so a counter that is constant for this long is broken

Clock = Callable[[], float]
Sleep = Callable[[float], object]
Wait = Callable[[float], bool]  # waits up to this time, s; True: stop


class CounterMeter:
    """Meter that reads the GPU's total-energy counter."""

    source = "nvml"
    scope = "board"
    about = "NVML's total-energy counter"

    def __init__(self, board: Board, start: int, resolution: float) -> None:
        """`start` is the counter's value to count from, mJ; `resolution` its update period, s."""
        self.resolution = resolution
        self._board = board
        self._last = start
        self._millijoules = 0
        self._faults = _Faults()
        self._lock = Lock()  # metrics are read on other threads

    def read(self) -> float | None:
        """Energy since the meter was created, J; None while it cannot be read."""
        with self._lock:
            try:
                now = self._board.energy()
            except NvmlError as error:
                self._faults.report(self.about, error)
                return None
            self._faults.clear()
            # A lower value means that the counter was reset at an unknown time: count from this value on.
            self._millijoules += max(0, now - self._last)
            self._last = now
            return self._millijoules / 1e3


class PowerMeter:
    """Meter that integrates power samples by the trapezoidal rule; `sample_periodically` has to run on a thread."""

    source = "nvml"
    scope = "board"
    resolution = _SAMPLE_PERIOD

    def __init__(self, board: Board, clock: Clock, about: str) -> None:
        """`clock` returns the time, s; `about` is the reason why the counter is not used."""
        self.about = about
        self._board = board
        self._clock = clock
        self._last: tuple[float, float] | None = None  # s, W
        self._joules = 0.0
        self._faults = _Faults()
        self._lock = Lock()

    def read(self) -> float | None:
        """Take a sample, and return the energy since the meter was created, J; None if the power cannot be read.

        The time between the samples before and after a failed one is not counted.
        """
        with self._lock:
            try:
                power = self._board.power() / 1e3
            except NvmlError as error:
                self._faults.report(self.about, error)
                self._last = None
                return None
            self._faults.clear()
            now = self._clock()
            before, power_before = self._last or (now, power)
            self._joules += (now - before) * (power + power_before) / 2
            self._last = now, power
            return self._joules

    def sample_periodically(self, wait: Wait) -> None:
        """Take samples at 20 Hz until `wait` returns True."""
        while not wait(_SAMPLE_PERIOD):
            self.read()


def sample_on_thread(meter: PowerMeter) -> None:
    """Sample the power on a daemon thread until the process exits."""
    Thread(target=meter.sample_periodically, args=(Event().wait,), name="power", daemon=True).start()


def nvml_meter(
    board: Board,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
    start_sampling: Callable[[PowerMeter], object] = sample_on_thread,
) -> CounterMeter | PowerMeter:
    """A meter that reads the counter if it works, else the power. Takes four updates of the counter, 0.4 s.

    Args:
        board: the GPU.
        clock: returns the time, s.
        sleep: sleeps for a time, s.
        start_sampling: starts the sampling of a power meter.

    Raises:
        OSError: the GPU is divided into MIG instances, or has neither a counter nor a power reading; with the reason.
    """
    if board.mig():
        raise OSError(
            "MIG is on: NVML has the energy of the whole GPU only, not of an instance; turn MIG off to measure"
        )
    try:
        resolution = update_period(board, clock, sleep)
        if resolution is not None:
            return CounterMeter(board, board.energy(), resolution)
        reason = f"it was constant for {_COUNTER_TIMEOUT:g} s"
    except NvmlError as error:
        reason = str(error)
    try:
        board.power()
    except NvmlError as error:
        raise OSError(f"NVML's total-energy counter: {reason}; its power: {error}") from error
    meter = PowerMeter(
        board, clock, f"NVML's power, integrated at {1 / _SAMPLE_PERIOD:g} Hz (the total-energy counter: {reason})"
    )
    start_sampling(meter)
    return meter


def update_period(board: Board, clock: Clock, sleep: Sleep) -> float | None:
    """The mean update period of the counter, s; None if it is constant for 2 s.

    Raises:
        NvmlError: the counter cannot be read.
    """
    updates: list[float] = []  # instants, s
    last, start = board.energy(), clock()
    while len(updates) <= _UPDATE_PERIODS:
        sleep(_POLL_PERIOD)
        energy, now = board.energy(), clock()
        if energy != last:
            updates.append(now)
            last = energy
        elif now - (updates[-1] if updates else start) > _COUNTER_TIMEOUT:
            return None
    return (updates[-1] - updates[0]) / _UPDATE_PERIODS


class _Faults:
    """Logs a failing sensor once, until it works again or fails with another error."""

    def __init__(self) -> None:
        self._reported: int | None = None

    def report(self, source: str, error: NvmlError) -> None:
        if error.code != self._reported:
            _log.warning("%s cannot be read: %s", source, error)
        self._reported = error.code

    def clear(self) -> None:
        self._reported = None
