"""Arrival rate by kind, measured from the arrivals themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, expm1, floor
from typing import Protocol

from policies.types import Kind


class Monitor(Protocol):
    """Watches arrivals; answers with a rate for each kind it has a measurement of."""

    def arrive(self, kind: Kind, at: float) -> None:
        """One request of `kind` arrived at instant `at` (s, never decreasing)."""
        ...

    def rates(self, now: float) -> Mapping[Kind, float]:
        """Arrival rate of each kind, 1/s, as known at `now` (s)."""
        ...

    def mean_rates(self, now: float) -> Mapping[Kind, float]:
        """The rates in the mean over a long time, 1/s; empty where that is not measured."""
        ...


@dataclass(slots=True)
class _Trail:
    """Arrivals of one kind; weights are sums of exp(-(last - arrival) / time constant)."""

    first: float  # instant, s
    last: float  # instant, s
    weight: float = 0.0  # of those before the last
    long_weight: float = 0.0  # of those after the first, by the long time constant


class ForgettingMonitor:
    """Counts arrivals with exponentially fading weight, so that the rate decays while nobody comes.

    An arrival of age x counts exp(-x / T) / T, the newest one not yet: who decides at an arrival asks how many more to
    expect, and for Poisson arrivals those before it tell without bias. A lone arrival after a silence measures 0, one
    with a recent past measures that past. A stream that has just begun measures low for a few T.

    The mean rate is counted likewise with a second, much longer time constant, from the first arrival on: early it is
    the plain mean so far. It tells a burst from a rate that stays.
    """

    def __init__(self, time_constant: float, long: float = 60.0) -> None:
        """`time_constant` T: the span over which the rate is believed to be steady; `long`, that of the mean; s.

        A minute outlasts bursts, and lets the mean follow traffic that changes by the hour; at least 100 T keeps the
        two apart on slow devices.
        """
        self._time_constant = time_constant
        self._long = max(long, 100.0 * time_constant)
        self._trails: dict[Kind, _Trail] = {}

    def arrive(self, kind: Kind, at: float) -> None:
        """Fade what was counted so far and count one more."""
        trail = self._trails.get(kind)
        if trail is None:
            self._trails[kind] = _Trail(at, at)
            return
        elapsed = trail.last - at
        trail.weight = (trail.weight + 1.0) * exp(elapsed / self._time_constant)
        trail.long_weight = trail.long_weight * exp(elapsed / self._long) + 1.0
        trail.last = at

    def rates(self, now: float) -> Mapping[Kind, float]:
        """The faded counts as rates, 1/s."""
        span = self._time_constant
        return {kind: t.weight * exp((t.last - now) / span) / span for kind, t in self._trails.items()}

    def mean_rates(self, now: float) -> Mapping[Kind, float]:
        """The slowly faded counts over what all time since the first arrival would count, 1/s."""
        return {kind: self._mean(trail, now) for kind, trail in self._trails.items()}

    def _mean(self, trail: _Trail, now: float) -> float:
        # Two arrivals at one instant are no infinite rate: the mean is over one short time constant at least.
        since = max(now - trail.first, self._time_constant)
        return trail.long_weight * exp((trail.last - now) / self._long) / (-expm1(-since / self._long) * self._long)

    def knowing(self, before: "ForgettingMonitor") -> "ForgettingMonitor":
        """With these time constants, and the rates that `before` measured at each kind's last arrival."""
        monitor = ForgettingMonitor(self._time_constant, self._long)
        for kind, known in before._trails.items():
            trail = replace(known, weight=known.weight * self._time_constant / before._time_constant, long_weight=1.0)
            trail.long_weight = before._mean(known, known.last) / self._mean(trail, trail.last)
            monitor._trails[kind] = trail
        return monitor


class TumblingMonitor:
    """The count of the last whole second of the clock, as BatchMonitor counts (Algorithm 1); none in the first."""

    def __init__(self, window: float = 1.0) -> None:
        """`window` in s: windows end at the clock's multiples of it."""
        self._window = window
        self._counts: dict[Kind, tuple[int, int, int]] = {}  # (window, arrivals in it, arrivals in the one before)
        self._first: int | None = None

    def arrive(self, kind: Kind, at: float) -> None:
        """Count one request in the window that `at` falls into."""
        index = floor(at / self._window)
        self._first = index if self._first is None else self._first
        current, count, before = self._counts.get(kind, (index, 0, 0))
        if index > current:
            current, count, before = index, 0, count if index == current + 1 else 0
        self._counts[kind] = (current, count + 1, before)

    def rates(self, now: float) -> Mapping[Kind, float]:
        """Arrivals in the last complete window over its length, 1/s; empty while the first window runs."""
        index = floor(now / self._window)
        if self._first is None or index == self._first:
            return {}
        return {kind: self._last_complete(entry, index) / self._window for kind, entry in self._counts.items()}

    def mean_rates(self, now: float) -> Mapping[Kind, float]:
        """Not measured: Algorithm 1 knows one second only."""
        return {}

    @staticmethod
    def _last_complete(entry: tuple[int, int, int], index: int) -> int:
        current, count, before = entry
        if index == current:
            return before
        return count if index == current + 1 else 0


class PerModelMonitor:
    """A monitor for each model: their policies may want different ones."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        """`monitors` by model name."""
        self._monitors = monitors

    def arrive(self, kind: Kind, at: float) -> None:
        """Pass the arrival to its model's monitor."""
        self._monitors[kind.model].arrive(kind, at)

    def rates(self, now: float) -> Mapping[Kind, float]:
        """All models' rates, 1/s."""
        return {kind: rate for monitor in self._monitors.values() for kind, rate in monitor.rates(now).items()}

    def mean_rates(self, now: float) -> Mapping[Kind, float]:
        """All models' mean rates, 1/s."""
        return {kind: rate for monitor in self._monitors.values() for kind, rate in monitor.mean_rates(now).items()}


class NoMonitor:
    """Measures nothing: for a policy that is to act as for one known rate."""

    def arrive(self, kind: Kind, at: float) -> None:
        """Nothing to do."""

    def rates(self, now: float) -> Mapping[Kind, float]:
        """No rate is known."""
        return {}

    def mean_rates(self, now: float) -> Mapping[Kind, float]:
        """No rate is known."""
        return {}


def successor(before: Monitor, wanted: Monitor) -> Monitor:
    """Measures as `wanted` does, and knows what `before` does where both count in the same way."""
    if isinstance(before, ForgettingMonitor) and isinstance(wanted, ForgettingMonitor):
        return wanted.knowing(before)
    return before if type(before) is type(wanted) else wanted
