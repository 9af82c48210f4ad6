"""Counters and histograms that each call counts on, without the locks and checks of prometheus_client's own.

Not thread-safe: the event loop counts and exports.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class CounterSeries(Collector):
    """A counter by labels."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        """`text` describes it; `labels` are the names of its labels."""
        self._description = name, text
        self._labels = labels
        self._counts: dict[Labels, float] = {}

    def add(self, labels: Labels, n: float = 1) -> None:
        """Add `n`; 0 exports the series."""
        self._counts[labels] = self._counts.get(labels, 0) + n

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Export all series."""
        family = CounterMetricFamily(*self._description, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class _Buckets:
    """Numbers of values in each bucket, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class HistogramSeries(Collector):
    """A histogram of values by labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Labels) -> None:
        """`bounds` are the upper bounds of the buckets but the last, ascending; `labels` the names of its labels."""
        self._description = name, text
        self._bounds = bounds
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._labels = labels
        self._series: dict[Labels, _Buckets] = {}

    def observe(self, labels: Labels, value: float, n: int = 1) -> None:
        """Add a value `n` times."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Buckets(len(self._names))
        series.counts[bisect_left(self._bounds, value)] += n
        series.total += n * value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Export all series."""
        family = HistogramMetricFamily(*self._description, labels=self._labels)
        for labels, series in self._series.items():
            buckets = [*zip(self._names, accumulate(series.counts), strict=True)]
            family.add_metric(labels, buckets, series.total)
        yield family
