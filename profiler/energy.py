"""Measures power and energy from one tick of the meter's counter to another, while the load runs through both.

A GPU's counter steps every 100 ms or so: two readings at arbitrary instants are off by up to a step each, two readings
just after a step are not. So a window begins and ends on ticks. Nothing is gained by bracketing the batches instead:
their energy is the steady power over their rate, and the rate is told by the instants of completion, exactly, however
few batches fit into the window.

The energy of a batch is told twice: total, with all that the device draws meanwhile, and marginal, above idle. Idle
means with the load's context open (on a GPU that alone draws tens of watts) and nothing running.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, sqrt
from threading import Event, Thread

import numpy as np

from server.energy.meters import EnergyMeter

Clock = Callable[[], float]

_POLL = 5e-4  # s between two looks at the counter
_TICK_PATIENCE = 10.0  # s without a tick after which there is nothing to measure
_BATCH_PATIENCE = 60.0  # s without a batch


class UnmeasuredError(Exception):
    """The meter tells nothing, or no batch is completed; the message says which, and since when."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load has come.

    Attributes:
        batches: completed so far.
        time: when the last of them was, or before the first when the load began, s.
    """

    batches: int
    time: float


Load = Callable[[], Progress]  # asks a load that keeps running elsewhere, one batch right after another


@dataclass(frozen=True, slots=True)
class Instruments:
    """What measures.

    Attributes:
        meter: of the device.
        clock: tells s.
        sleep: for so many s, while the load keeps running.
    """

    meter: EnergyMeter
    clock: Clock
    sleep: Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Windows:
    """How long is measured.

    Attributes:
        settle: s before the first window: clocks, temperature and averaging sensors come to rest.
        length: of a window, s, and up to a tick more.
        repeats: windows, each beginning where the last one ends.
        min_batches: completed in a window at least, which makes it longer for slow ones.
    """

    settle: float = 1.5
    length: float = 4.0
    repeats: int = 3
    min_batches: int = 4


@dataclass(frozen=True, slots=True)
class Tick:
    """An instant at which the counter has just changed: s, J, and how far the load had come (None: there is none)."""

    time: float
    joules: float
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """Over repeats; the standard error is infinite from a single one."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class Steady:
    """A load that runs back to back.

    Attributes:
        power: W, idle included.
        rate: batches/s.
        energy: total, J a batch.
    """

    power: Mean
    rate: Mean
    energy: Mean


@dataclass(frozen=True, slots=True)
class DutyCheck:
    """Power at a part load, W, against what idle power and the batches' marginal energies add up to."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative; positive when more was drawn than predicted."""
        return self.measured / self.predicted - 1.0

    def holds(self, tolerance: float = 0.05) -> bool:
        """Whether the error is within the tolerance; if not, the device rests differently between batches."""
        return abs(self.error) <= tolerance


def tick(instruments: Instruments, load: Load | None = None) -> Tick:
    """Wait until the counter changes; the load, if there is one, runs on meanwhile.

    Raises:
        UnmeasuredError: the meter tells nothing, or stands still.
    """
    began, before = instruments.clock(), _joules(instruments)
    while (joules := _joules(instruments)) == before:
        if instruments.clock() - began > _TICK_PATIENCE:
            raise UnmeasuredError(f"the meter ({instruments.meter.about}) stood still for {_TICK_PATIENCE:g} s")
        instruments.sleep(_POLL)
    return Tick(instruments.clock(), joules, load and load())


def steady_power(instruments: Instruments, load: Load, windows: Windows) -> Steady:
    """Power, rate and energy of a load that is running already and runs on.

    Raises:
        UnmeasuredError: no ticks, or no batches.
    """
    ticks = _ticks(instruments, load, windows)
    powers = [_power(a, b) for a, b in pairwise(ticks)]
    rates = [_rate(a, b) for a, b in pairwise(ticks)]
    return Steady(mean(powers), mean(rates), mean([p / r for p, r in zip(powers, rates, strict=True)]))


def idle_power(instruments: Instruments, windows: Windows) -> Mean:
    """Power of a device at rest, W; let it settle for 20 s or more after a load.

    Raises:
        UnmeasuredError: no ticks.
    """
    ticks = _ticks(instruments, None, windows)
    return mean([_power(a, b) for a, b in pairwise(ticks)])


def mean(values: Sequence[float]) -> Mean:
    """Of repeats; also pools the windows of several passes."""
    error = float(np.std(values, ddof=1)) / sqrt(len(values)) if len(values) > 1 else inf
    return Mean(float(np.mean(values)), error)


def marginal(total: Mean, idle: Mean, service_time: float) -> Mean:
    """Energy of a batch above idle, J, never below 0: total - idle power x service time (s)."""
    error = hypot(total.standard_error, service_time * idle.standard_error)
    return Mean(max(0.0, total.value - idle.value * service_time), error)


def duty_cycle(idle: float, busy: float, load: float, measured: float) -> DutyCheck:
    """Compare the power at a part load with P_idle + rho (P_busy - P_idle).

    Args:
        idle: P_idle, W.
        busy: P_busy, back to back at the same batch size, W.
        load: rho, the share of time in service.
        measured: W, with gaps between batches that are jittered, lest they beat with the sensor.
    """
    return DutyCheck(idle + load * (busy - idle), measured)


@contextmanager
def feeding(run: Callable[[], object], clock: Clock) -> Iterator[Load]:
    """Run batches back to back on a thread while the context is open; `run` returns when its batch is complete.

    What `run` raises, the load raises when it is asked next.
    """
    feeder = _Feeder(run, clock)
    thread = Thread(target=feeder.feed, name="feeder", daemon=True)
    thread.start()
    try:
        yield feeder.progress
    finally:
        feeder.stop.set()
        thread.join()


class _Feeder:
    def __init__(self, run: Callable[[], object], clock: Clock) -> None:
        self.stop = Event()
        self._run = run
        self._clock = clock
        self._progress = Progress(0, clock())
        self._failure: BaseException | None = None

    def feed(self) -> None:
        try:
            while not self.stop.is_set():
                self._run()
                self._progress = Progress(self._progress.batches + 1, self._clock())
        except BaseException as error:  # noqa: BLE001 - another thread raises it
            self._failure = error

    def progress(self) -> Progress:
        if self._failure is not None:
            raise self._failure
        return self._progress


def _ticks(instruments: Instruments, load: Load | None, windows: Windows) -> list[Tick]:
    """The edges of the windows."""
    instruments.sleep(windows.settle)
    ticks = [tick(instruments, load)]
    for _ in range(windows.repeats):
        instruments.sleep(windows.length)
        if load is not None:
            _await_batches(instruments, load, ticks[-1], windows.min_batches)
        ticks.append(tick(instruments, load))
    return ticks


def _await_batches(instruments: Instruments, load: Load, begin: Tick, least: int) -> None:
    start = begin.progress.batches if begin.progress else 0
    while (seen := load()).batches - start < least:
        if instruments.clock() - max(seen.time, begin.time) > _BATCH_PATIENCE:
            raise UnmeasuredError(f"no batch was completed for {_BATCH_PATIENCE:g} s")
        instruments.sleep(_POLL)


def _power(begin: Tick, end: Tick) -> float:
    return (end.joules - begin.joules) / (end.time - begin.time)


def _rate(begin: Tick, end: Tick) -> float:
    """Batches/s by the instants of completion: whole batches, so that none is cut by a window's edge."""
    if begin.progress is None or end.progress is None:
        raise UnmeasuredError("without a load there is no rate")
    return (end.progress.batches - begin.progress.batches) / (end.progress.time - begin.progress.time)


def _joules(instruments: Instruments) -> float:
    joules = instruments.meter.read()
    if joules is None:
        raise UnmeasuredError(f"the meter tells nothing: {instruments.meter.about}")
    return joules
