"""Power and energy measurement between two ticks of an energy counter, under a load that runs through both.

A GPU's energy counter steps about every 100 ms. A reading at an arbitrary instant is off by up to one step, a reading
just after a step is not, so every window begins and ends on a tick. Windows need not be aligned to batches: energy per
batch is steady power over batch rate, and the completion instants give the rate exactly, however few batches a window
has.

Each batch has two energies: the total, which is all that the device draws meanwhile, and the marginal energy above
idle. Idle power is measured with the CUDA context open (which alone draws tens of watts) and nothing running.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, sqrt
from threading import Event, Thread

import numpy as np

from profiler.conditions import Conditions, unknown_conditions
from server.energy.meters import EnergyMeter

_POLL_INTERVAL = 5e-4  # s
_TICK_TIMEOUT = 10.0  # s
_BATCH_TIMEOUT = 60.0  # s
TICK = 0.1  # s, approximate interval of the counter's steps, by which a window exceeds its length
_TOLERANCE = 0.05  # relative error of the power predicted at a partial load


class UnmeasuredError(Exception):
    """The meter has no reading, its counter does not change, or no batch completes."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a running load.

    Attributes:
        batches: number of completed batches.
        time: instant of the last completion, s; before the first, the instant at which the load began.
    """

    batches: int
    time: float


RunningLoad = Callable[[], LoadProgress]  # reads the progress of batches that run back to back on another thread


@dataclass(frozen=True, slots=True)
class Instruments:
    """Meter and clock of a measurement.

    Attributes:
        meter: the device's energy meter.
        clock: current time, s.
        sleep: sleeps for a number of seconds; the load keeps running.
        conditions: reads the device's clocks and why they are lowered; None where it has none to read.
    """

    meter: EnergyMeter
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    conditions: Callable[[], Conditions | None] = unknown_conditions


@dataclass(frozen=True, slots=True)
class Windows:
    """Measurement windows.

    Attributes:
        settle: time before the first window, s, in which clocks, temperature and averaging sensors settle.
        length: length of a window, s; it ends at the next tick.
        repeats: number of consecutive windows.
        min_batches: minimum number of batches completed in a window, which makes it longer for slow batches.
    """

    settle: float = 1.5
    length: float = 4.0
    repeats: int = 3
    min_batches: int = 4

    @property
    def duration(self) -> float:
        """Approximate duration, s."""
        return self.settle + self.repeats * (self.length + TICK)


@dataclass(frozen=True, slots=True)
class Tick:
    """A step of the counter: time in s, reading in J, the load's progress (None without a load), and conditions."""

    time: float
    joules: float
    progress: LoadProgress | None = None
    conditions: Conditions | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over repeats and its standard error, which is infinite for a single repeat."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class Steady:
    """Measurement of a load whose batches run back to back.

    Attributes:
        power: mean power, idle power included, W.
        rate: batch rate, 1/s.
        energy: total energy per batch, J.
        conditions: of the device at the edges of the windows, as far as it has any to read.
    """

    power: Mean
    rate: Mean
    energy: Mean
    conditions: tuple[Conditions, ...] = ()


@dataclass(frozen=True, slots=True)
class DutyCheck:
    """Measured power at a partial load, W, and the power predicted from idle power and marginal energies, W."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive when more power was measured than predicted."""
        return self.measured / self.predicted - 1.0

    @property
    def passed(self) -> bool:
        """Whether the error is at most 5 per cent; if not, power between batches differs from idle power."""
        return abs(self.error) <= _TOLERANCE


def tick(instruments: Instruments, load: RunningLoad | None = None) -> Tick:
    """Wait until the counter changes; a load, if given, keeps running.

    Raises:
        UnmeasuredError: the meter has no reading, or its counter does not change.
    """
    began, before = instruments.clock(), _joules(instruments)
    while (joules := _joules(instruments)) == before:
        if instruments.clock() - began > _TICK_TIMEOUT:
            raise UnmeasuredError(f"the meter ({instruments.meter.about}) did not change for {_TICK_TIMEOUT:g} s")
        instruments.sleep(_POLL_INTERVAL)
    now, progress = instruments.clock(), load and load()
    return Tick(now, joules, progress, instruments.conditions())


def steady_power(instruments: Instruments, load: RunningLoad, windows: Windows) -> Steady:
    """Measure power, rate and energy per batch of a load that is already running.

    Raises:
        UnmeasuredError: the counter does not change, or no batch completes.
    """
    ticks = _ticks(instruments, load, windows)
    powers = [_power(a, b) for a, b in pairwise(ticks)]
    rates = [_rate(a, b) for a, b in pairwise(ticks)]
    energies = [p / r for p, r in zip(powers, rates, strict=True)]
    conditions = tuple(tick.conditions for tick in ticks if tick.conditions is not None)
    return Steady(mean(powers), mean(rates), mean(energies), conditions)


def idle_power(instruments: Instruments, windows: Windows) -> Mean:
    """Measure the power of an idle device, W; after a load it needs 20 s or more to settle.

    Raises:
        UnmeasuredError: the counter does not change.
    """
    ticks = _ticks(instruments, None, windows)
    return mean([_power(a, b) for a, b in pairwise(ticks)])


def mean(values: Sequence[float]) -> Mean:
    """Mean of repeats with its standard error."""
    error = float(np.std(values, ddof=1)) / sqrt(len(values)) if len(values) > 1 else inf
    return Mean(float(np.mean(values)), error)


def marginal(total: Mean, idle: Mean, service_time: float) -> Mean:
    """Marginal energy of a batch, J: total - idle power x service time (s), at least 0."""
    error = hypot(total.standard_error, service_time * idle.standard_error)
    return Mean(max(0.0, total.value - idle.value * service_time), error)


def duty_cycle(idle: float, busy: float, load: float, measured: float) -> DutyCheck:
    """Compare the power at a partial load with P_idle + rho (P_busy - P_idle).

    Args:
        idle: P_idle, W.
        busy: P_busy, of batches of the same size back to back, W.
        load: rho, the share of time in service.
        measured: measured power, W.
    """
    return DutyCheck(idle + load * (busy - idle), measured)


@contextmanager
def feed_batches(run: Callable[[Callable[[], bool]], object], clock: Callable[[], float]) -> Iterator[RunningLoad]:
    """Run batches back to back on a thread while the context is open.

    Args:
        run: runs batches, calls its argument after each, and returns once that returns False. An exception is raised by
            the next read of the progress.
        clock: current time, s.
    """
    loop = _BatchLoop(run, clock)
    thread = Thread(target=loop.feed, name="feeder", daemon=True)
    thread.start()
    try:
        yield loop.progress
    finally:
        loop.stop.set()
        thread.join()


class _BatchLoop:
    def __init__(self, run: Callable[[Callable[[], bool]], object], clock: Callable[[], float]) -> None:
        self.stop = Event()
        self._run = run
        self._clock = clock
        self._progress = LoadProgress(0, clock())
        self._failure: BaseException | None = None

    def feed(self) -> None:
        try:
            self._run(self._count)
        except BaseException as error:  # noqa: BLE001 - raised on the measuring thread
            self._failure = error

    def _count(self) -> bool:
        self._progress = LoadProgress(self._progress.batches + 1, self._clock())
        return not self.stop.is_set()

    def progress(self) -> LoadProgress:
        if self._failure is not None:
            raise self._failure
        return self._progress


def _ticks(instruments: Instruments, load: RunningLoad | None, windows: Windows) -> list[Tick]:
    """Measure the edges of the windows."""
    instruments.sleep(windows.settle)
    ticks = [tick(instruments, load)]
    for _ in range(windows.repeats):
        instruments.sleep(windows.length)
        if load is not None:
            _await_batches(instruments, load, ticks[-1], windows.min_batches)
        ticks.append(tick(instruments, load))
    return ticks


def _await_batches(instruments: Instruments, load: RunningLoad, begin: Tick, min_batches: int) -> None:
    start = begin.progress.batches if begin.progress else 0
    while (seen := load()).batches - start < min_batches:
        if instruments.clock() - max(seen.time, begin.time) > _BATCH_TIMEOUT:
            raise UnmeasuredError(f"no batch was completed for {_BATCH_TIMEOUT:g} s")
        instruments.sleep(_POLL_INTERVAL)


def _power(begin: Tick, end: Tick) -> float:
    return (end.joules - begin.joules) / (end.time - begin.time)


def _rate(begin: Tick, end: Tick) -> float:
    """Batch rate, 1/s, between two completions, so that no batch is cut by the edge of a window."""
    if begin.progress is None or end.progress is None:
        raise UnmeasuredError("there is no batch rate without a load")
    return (end.progress.batches - begin.progress.batches) / (end.progress.time - begin.progress.time)


def _joules(instruments: Instruments) -> float:
    joules = instruments.meter.read()
    if joules is None:
        raise UnmeasuredError(f"the meter has no reading: {instruments.meter.about}")
    return joules
