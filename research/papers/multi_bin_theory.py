"""Multi-bin batching in formulas (Guldogan, Kunde, Lee and Pedarsani): what K bins give when sizes are drawn alike.

One server, batches of exactly B, each as long as its longest request; K bins; Poisson arrivals.

    l, l_min, l_max   size: service time of a request alone, s; its range where it is uniform (low, high)
    mu                rate of exponential sizes, 1/s: 1 / mean
    l_i, q_i          the edge above bin i, s; P(l > l_i)
    k, B              number of bins (bins); size of a batch (batch_size)
    lambda            arrival rate, 1/s (arrival_rate)
    t_service,k       service time of a batch, s (batch_time)
    c_max             the limit of the throughput for many bins, 1/s (capacity)
    H_B, L_m          harmonic number; equation 29's recursion

Misprints: (8), (10), (11) swap the weights of l_{i-1} and l_i, which (17) has right: the longest of B is near the upper
edge. (60) sums log L_{k-1-j} where its own edges (28) have log L_{k-j}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, expm1, floor, inf, log

from scipy.integrate import quad

from policies.sizing.bins import least_response_time
from policies.types import SpecError


@dataclass(frozen=True, slots=True)
class Uniform:
    """Sizes uniform on [low, high], s (assumption 3.2)."""

    low: float
    high: float

    @property
    def mean(self) -> float:
        """E[l], s."""
        return (self.low + self.high) / 2.0

    def edges(self, bins: int) -> tuple[float, ...]:
        """Equation 3: equal probability is best here."""
        return tuple(self.low + i / bins * (self.high - self.low) for i in range(1, bins))

    def batch_time(self, bins: int, batch_size: int) -> float:
        """E[t_service,k] with those edges (the denominator of equation 4), s."""
        return self.mean + self._excess(batch_size) / bins

    def throughput(self, bins: int, batch_size: int) -> float:
        """Equation 4, 1/s."""
        return batch_size / self.batch_time(bins, batch_size)

    def capacity(self, batch_size: int) -> float:
        """c_max of equation 5, 1/s."""
        return batch_size / self.mean

    def bins_for(self, throughput: float, batch_size: int) -> int:
        """The least number of bins that gives this throughput, c_max - epsilon (theorem 4.3, equation 6).

        Raises:
            SpecError: it is not positive, or not below c_max.
        """
        capacity = self.capacity(batch_size)
        if not 0.0 < throughput < capacity:
            raise SpecError(
                f"a throughput of {throughput:g} per second takes no number of bins: give one above 0 and below "
                f"{capacity:g}, the limit for batches of {batch_size}, or larger batches"
            )
        bound = throughput * self._excess(batch_size) / ((capacity - throughput) * self.mean)
        bins = max(1, floor(bound))  # asked again, for rounding must not add a bin to what k bins give exactly
        return bins if self.throughput(bins, batch_size) >= throughput else bins + 1

    def response_time(self, bins: int, batch_size: int, arrival_rate: float) -> float:
        """Equation 7: the least there can be, and what there is at low load, s."""
        return least_response_time(self.batch_time(bins, batch_size), bins, batch_size, arrival_rate)

    def _excess(self, batch_size: int) -> float:
        """By how much a batch of one bin takes longer than a request in the mean, s."""
        return (batch_size * self.high + self.low) / (batch_size + 1.0) - self.mean


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential sizes of this mean, 1 / mu, s (assumption A.1)."""

    mean: float

    def edges(self, bins: int, batch_size: int) -> tuple[float, ...]:
        """Equation 28: the edges that make the bound of equation 27 least."""
        edges, edge = [], 0.0
        for step in reversed(self._steps(bins, batch_size)):
            edge += self.mean * log(step)
            edges.append(edge)
        return tuple(edges)

    def batch_time(self, edges: Sequence[float], batch_size: int) -> float:
        """E[t_service,k], exactly: for each bin the integral of P(max of B > t), s."""
        times = (self._longest(low, high, batch_size) for low, high in pairwise((0.0, *edges, inf)))
        shares = (self._share(low, high) for low, high in pairwise((0.0, *edges, inf)))
        return sum(share * time for share, time in zip(shares, times, strict=True))

    def batch_time_bound(self, edges: Sequence[float], batch_size: int) -> float:
        """The upper bound of equation 27: every bin but the last takes as long as its upper edge, s."""
        shares = [self._share(low, high) for low, high in pairwise((0.0, *edges, inf))]
        last = (edges[-1] if edges else 0.0) + self.mean * harmonic(batch_size)
        return sum(share * time for share, time in zip(shares, (*edges, last), strict=True))

    def throughput_bound(self, bins: int, batch_size: int) -> float:
        """Equation 60 with L_{k-j}: what K bins with the edges of equation 28 give at least, 1/s."""
        return batch_size / self.batch_time_bound(self.edges(bins, batch_size), batch_size)

    def capacity(self, batch_size: int) -> float:
        """c_max (remark 4.1), 1/s."""
        return batch_size / self.mean

    def _steps(self, bins: int, batch_size: int) -> list[float]:
        """L_1 .. L_{k-1} (equation 29)."""
        steps = [harmonic(batch_size)]
        while len(steps) < bins - 1:
            steps.append(1.0 + log(steps[-1]))
        return steps[: bins - 1]

    def _share(self, low: float, high: float) -> float:
        return exp(-low / self.mean) - exp(-high / self.mean)

    def _longest(self, low: float, high: float, batch_size: int) -> float:
        """E[max of B | bin], s."""
        if high == inf:
            return low + self.mean * harmonic(batch_size)
        whole = expm1(-(high - low) / self.mean)

        def longer(t: float) -> float:
            return 1.0 - float(expm1(-t / self.mean) / whole) ** batch_size

        return low + float(quad(longer, 0.0, high - low)[0])


def harmonic(number: int) -> float:
    """H_B = 1 + 1/2 + ... + 1/B: the mean of the longest of B exponential sizes of mean 1."""
    return sum(1.0 / i for i in range(1, number + 1))
