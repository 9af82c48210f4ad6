"""Monitors: estimators of the arrival rate by kind, from the arrivals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, expm1, sqrt
from typing import Protocol

from policies.profile import Profile
from policies.types import BatchKey

_MAX_KINDS = 256  # measured at once; the shapes of inputs are not bounded
_SHARES_OVER = 2048  # arrivals over which the shares of levels are averaged


class Monitor(Protocol):
    """Estimates the arrival rate of each kind from its arrivals."""

    def arrive(self, kind: BatchKey, at: float) -> None:
        """Record an arrival of `kind` at instant `at` (s, never decreasing)."""
        ...

    def rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the arrival rate of each kind, 1/s, estimated at `now` (s); kinds without an estimate are absent."""
        ...

    def mean_rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the long-run mean rates, 1/s; empty where they are not measured."""
        ...


@dataclass(slots=True)
class _ArrivalCounts:
    """Weighted arrival counts of one kind: sums of exp(-(last - arrival) / time constant).

    Attributes:
        first: instant of the first arrival, s.
        last: instant of the last arrival, s.
        short: count of the arrivals before the last.
        long: count of the arrivals after the first, by the long time constant.
    """

    first: float
    last: float
    short: float = 0.0
    long: float = 0.0


class ForgettingMonitor:
    """Estimates rates with exponential forgetting, so that the estimate decays without arrivals.

    An arrival of age x has the weight exp(-x / T) / T. The newest arrival is not counted: for Poisson arrivals, the
    arrivals before it give an unbiased estimate at an arrival instant. A single arrival after a long gap gives 0. The
    estimate of a new stream is too low for a few T.

    The mean rate uses a second, much longer time constant, from the first arrival on; at first it is the plain mean. It
    distinguishes a burst from a lasting change of the rate.
    """

    def __init__(self, time_constant: float, long: float = 60.0) -> None:
        """Set the time constants of the rate, T, and of the mean rate, `long`, s; the latter is at least 100 T.

        A minute is longer than bursts and shorter than hourly changes of traffic. 100 T keeps the time constants apart
        on slow devices.
        """
        self._time_constant = time_constant
        self._long = max(long, 100.0 * time_constant)
        self._counts: dict[BatchKey, _ArrivalCounts] = {}

    def arrive(self, kind: BatchKey, at: float) -> None:
        """Decay the counts and add the arrival."""
        counts = self._counts.get(kind)
        if counts is None:
            if len(self._counts) >= _MAX_KINDS:
                del self._counts[min(self._counts, key=lambda known: self._counts[known].last)]
            self._counts[kind] = _ArrivalCounts(at, at)
            return
        elapsed = counts.last - at
        counts.short = (counts.short + 1.0) * exp(elapsed / self._time_constant)
        counts.long = counts.long * exp(elapsed / self._long) + 1.0
        counts.last = at

    def rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the short-term rates, 1/s."""
        span = self._time_constant
        return {kind: c.short * exp((c.last - now) / span) / span for kind, c in self._counts.items()}

    def mean_rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the long-term counts divided by the weight of the time since the first arrival, 1/s."""
        return {kind: self._mean(counts, now) for kind, counts in self._counts.items()}

    def _mean(self, counts: _ArrivalCounts, now: float) -> float:
        # averaged over at least one short time constant, or two arrivals at one instant would give an infinite rate
        since = max(now - counts.first, self._time_constant)
        return counts.long * exp((counts.last - now) / self._long) / (-expm1(-since / self._long) * self._long)

    def with_rates_of(self, before: "ForgettingMonitor") -> "ForgettingMonitor":
        """Return a monitor with these time constants and the rates of `before` at each kind's last arrival."""
        monitor = ForgettingMonitor(self._time_constant, self._long)
        for kind, known in before._counts.items():
            counts = replace(known, short=known.short * self._time_constant / before._time_constant, long=1.0)
            counts.long = before._mean(known, known.last) / self._mean(counts, counts.last)
            monitor._counts[kind] = counts
        return monitor


class LevelShares:
    """The share of each priority level in the latest arrivals of one model.

    Attributes:
        shares: of the levels, the first level first; 0 before the first arrival.
        arrivals: number of arrivals.
    """

    def __init__(self, levels: int) -> None:
        self.shares = (0.0,) * levels
        self.arrivals = 0

    @property
    def standard_error(self) -> float:
        """Of the share of the first level, if levels are independent."""
        first = self.shares[0]
        return sqrt(first * (1.0 - first) / max(min(self.arrivals, _SHARES_OVER), 1))

    def arrive(self, level: int) -> None:
        """Count an arrival of this level, 1 or more."""
        self.arrivals += 1
        part = 1.0 / min(self.arrivals, _SHARES_OVER)
        self.shares = tuple(share + part * ((number == level) - share) for number, share in enumerate(self.shares, 1))


class PerModelMonitor:
    """Delegates to one monitor per model, since the models' policies may use different ones."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        """`monitors` by model name."""
        self._monitors = monitors

    def arrive(self, kind: BatchKey, at: float) -> None:
        """Record the arrival in its model's monitor."""
        self._monitors[kind.model].arrive(kind, at)

    def rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the rates of all models, 1/s."""
        return {kind: rate for monitor in self._monitors.values() for kind, rate in monitor.rates(now).items()}

    def mean_rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return the mean rates of all models, 1/s."""
        return {kind: rate for monitor in self._monitors.values() for kind, rate in monitor.mean_rates(now).items()}


class NoMonitor:
    """Measures nothing, for a single table, which is used at any rate."""

    def arrive(self, kind: BatchKey, at: float) -> None:
        """Ignore the arrival."""

    def rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return no rates."""
        return {}

    def mean_rates(self, now: float) -> Mapping[BatchKey, float]:
        """Return no rates."""
        return {}


def inherit_rates(before: Monitor, wanted: Monitor) -> Monitor:
    """Return a monitor like `wanted` that starts from the rates of `before`, if both estimate in the same way."""
    if isinstance(before, ForgettingMonitor) and isinstance(wanted, ForgettingMonitor):
        return wanted.with_rates_of(before)
    return before if type(before) is type(wanted) else wanted


def rate_time_constant(profile: Profile) -> float:
    """Return the time constant of the measurement of the arrival rate, s.

    It is twice the longest service time, because the state of the queue depends on the arrivals during a few services.
    It is at least the time to serve 64 requests at the highest throughput, which is longer if the largest batch is
    below 32. An estimate from fewer arrivals is noisy, which increases response times at a steady rate.
    """
    return max(2 * profile.service_times[-1], 64 / profile.capacity)
