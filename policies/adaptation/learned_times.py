"""Service times learned from the batches that a device serves, as a correction of a profile.

The ratio of an observed service time to the profile's is a function of the batch size b and, for padded inputs, of the
length of the batch's longest request: r(b, length). Its level is first the median of eight batches. Relative to that
it is a Gaussian process on a grid, the powers of two of b times at most eight of the profile's lengths, with bilinear
interpolation between its nodes. Its covariance is the sum of these parts: a common level, of standard deviation 0.2;
trends along log2 b and along the lengths, of 0.15 for each octave or length; functions of each, of 0.3, and one of
both, of 0.1, whose correlations decay over two octaves or lengths. So the level is known after a few batches of any
size, the shape follows where batches are, and its trend goes on beyond. Each batch is one Kalman update, of some ten
microseconds.

The noise of a service time is proportional to it. Its variance is estimated from the innovations (Mehra, "On the
identification of variances and adaptive Kalman filtering", IEEE Trans. Automatic Control 15, 1970, equation 9), with a
memory of 256 batches. An innovation counts up to five standard deviations, and up to twice the expected value, so that
one outlier changes little; the variance of the correction falls by the same part only, so that several change it.

The variance of the correction grows by that of a change of a tenth of the prior's standard deviations in 2,000
batches, so that old batches are forgotten slowly. A change of level is detected by a CUSUM (drift.py); `restart` then
takes the level from the batches since.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log, log2, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile

_LEVEL, _TREND, _SHAPE, _BOTH = 0.2, 0.15, 0.3, 0.1  # standard deviations of the parts of the ratio
_DECAY = 2.0  # octaves, or lengths, over which correlations decay
_FORGETTING = 0.1**2 / 2000  # of the prior's variance, by batch
_FIRST_NOISE, _LEAST_NOISE = 0.2, 1e-3  # relative standard deviation of a service time: before any batch, and least
_NOISE_MEMORY = 256  # batches
_MOST_INNOVATION = 5.0  # standard deviations
_CHANGE, _CONFIDENCE = 0.15, 3.0  # relative change of the level that is significant, and its standard errors
_SHAPE_CHANGE = 0.08  # relative change at one node
_SHARE, _FEWEST = 0.01, 5.0  # share and number of the recent batches with which a node counts
_LEAST_RATIO = 0.05
_MOST_LENGTHS = 8  # of the grid, since an update takes time in proportion to the square of its nodes
_FIRST_BATCHES = 8  # that determine the level

_Floats = NDArray[np.float64]


class ServedBatch(NamedTuple):
    """A batch: its size, its service time, s, and the length of its longest request, None without lengths."""

    size: int
    service_time: float
    length: float | None = None


class LearnedTimes:
    """The learned service times of a model on a device.

    Attributes:
        batches: number of batches since the beginning, or since the change after which it was restarted.
    """

    def __init__(self, profile: Profile) -> None:
        """Begin with a profile."""
        self._first = profile
        self.batches = 0
        largest = profile.max_batch_size
        sizes = [*(2**n for n in range(largest.bit_length()) if 2**n < largest), largest]
        self._octaves = np.log2(np.array(sizes, float))
        lengths = np.array(profile.lengths or (1,), float)
        chosen = np.linspace(0, len(lengths) - 1, min(len(lengths), _MOST_LENGTHS)).round().astype(np.intp)
        self._lengths = lengths[chosen]
        self._places: dict[int, tuple[NDArray[np.intp], _Floats]] = {}  # of batches without length, by size
        self._prior = self._covariance_of_nodes()
        self._ratios = np.ones(len(self._prior))
        self._covariance = self._prior.copy()
        self._used = self._ratios.copy()  # of the profile that is used
        self._weights = np.zeros(len(self._prior))  # of the batches at each node
        self._noise = _FIRST_NOISE**2
        self._first_batches: list[ServedBatch] | None = []

    def _covariance_of_nodes(self) -> _Floats:
        octaves, columns = self._octaves, np.arange(len(self._lengths), dtype=float)
        by_size, by_length = (np.exp(-np.abs(np.subtract.outer(x, x)) / _DECAY) for x in (octaves, columns))
        of_size, of_length = (
            _SHAPE**2 * similar + _TREND**2 * np.outer(x, x)
            for similar, x in ((by_size, octaves), (by_length, columns))
        )
        if len(columns) == 1:
            return np.asarray(_LEVEL**2 + of_size)
        same_size, same_length = np.ones_like(by_size), np.ones_like(by_length)
        apart = np.kron(of_size, same_length) + np.kron(same_size, of_length)
        return np.asarray(_LEVEL**2 + apart + _BOTH**2 * np.kron(by_size, by_length))

    @property
    def cv(self) -> float:
        """Coefficient of variation of the service times of batches of one size and length."""
        return sqrt(self._noise)

    def observe(self, batch: ServedBatch) -> float:
        """Learn from a batch; return its service time over that of the used profile."""
        nodes, parts = self._place(batch)
        ratio = self._ratio(batch)
        if self._first_batches is None:
            self._learn(nodes, parts, ratio)
        else:
            self._first_batches.append(batch)
            self.batches += 1
            if len(self._first_batches) == _FIRST_BATCHES:
                self.restart(self._first_batches)
        return ratio / float(parts @ self._used[nodes])

    def _learn(self, nodes: NDArray[np.intp], parts: _Floats, ratio: float) -> None:
        expected = self._expected(nodes, parts)
        gains = parts @ self._covariance[nodes]
        noise = self._noise * expected**2
        variance = float(parts @ gains[nodes]) + noise
        most = min(_MOST_INNOVATION * sqrt(variance), 2.0 * expected)
        innovation = min(max(ratio - expected, -most), most)
        counted = min(most / abs(ratio - expected), 1.0) if ratio != expected else 1.0
        self._ratios += gains * (innovation / variance)
        self._covariance -= gains[:, np.newaxis] * (gains * (counted / variance))
        self._covariance += (_FORGETTING * expected**2) * self._prior
        measured = innovation**2 * noise / variance / expected**2
        memory = min(self.batches + _FIRST_BATCHES, _NOISE_MEMORY)
        self._noise = max(self._noise + (measured - self._noise) / memory, _LEAST_NOISE**2)
        self._weights *= 1.0 - 1.0 / _NOISE_MEMORY
        self._weights[nodes] += parts
        self.batches += 1

    def _ratio(self, batch: ServedBatch) -> float:
        return batch.service_time / self._first.service_time(batch.size, batch.length)

    def _expected(self, nodes: NDArray[np.intp], parts: _Floats) -> float:
        return max(float(parts @ self._ratios[nodes]), _LEAST_RATIO)

    def _place(self, batch: ServedBatch) -> tuple[NDArray[np.intp], _Floats]:
        """The nodes around a batch, and their parts, which sum to 1; no node is named twice."""
        if batch.length is not None:
            return self._nodes(batch.size, batch.length)
        found = self._places.get(batch.size)
        if found is None:
            found = self._places[batch.size] = self._nodes(batch.size, 0.0)
        return found

    def _nodes(self, size: int, length: float) -> tuple[NDArray[np.intp], _Floats]:
        rows, columns = _between(self._octaves, log2(size)), _between(self._lengths, length)
        nodes = [row * len(self._lengths) + column for row in rows for column in columns]
        return np.array(nodes), np.outer([*rows.values()], [*columns.values()]).ravel()

    def restart(self, batches: Sequence[ServedBatch]) -> None:
        """Learn anew from the used profile and the latest batches, at least one, since the device has changed.

        The first of them do not count if they fit the former level better than the median of all. The others count up
        to five standard deviations from it, by their median absolute deviation.
        """
        self._first_batches = None
        self._ratios = self._used
        factors = [self._ratio(batch) / self._expected(*self._place(batch)) for batch in batches]
        level = float(np.median(factors))
        since = next(i for i, each in enumerate(factors) if abs(log(each / level)) <= abs(log(each)))
        deviation = _MOST_INNOVATION * 1.4826 * float(np.median(np.abs(np.array(factors) / level - 1.0)))
        most = max(deviation, _FIRST_NOISE)
        counted = np.clip(factors, level * (1.0 - most), level * (1.0 + most)) / np.array(factors)
        self._ratios = np.maximum(level * self._ratios, _LEAST_RATIO)
        self._covariance = level**2 * self._prior
        self._weights[:] = 0.0
        self.batches = 0
        for batch, part in zip(batches[since:], counted[since:].tolist(), strict=True):
            self._learn(*self._place(batch), part * self._ratio(batch))

    def change(self, least: float = _CHANGE) -> tuple[float, bool] | None:
        """Return by which factor the learned times differ from the used ones, if that is significant, else None.

        It is if the mean over the recent batches differs by more than `least` and three standard errors; then the
        factor is that of the mean. It also is if that of a node with a hundredth of them, and at least five, differs
        from the mean's by more than 8 per cent and three standard errors, as gains of batching are of that size; then
        the factor is that node's, and the second value is True.
        """
        total = float(self._weights.sum())
        if not total:
            return None
        weights = self._weights / total
        level = float(weights @ self._ratios / (weights @ self._used))
        error = sqrt(max(float(weights @ self._covariance @ weights), 0.0)) / float(weights @ self._used)
        if abs(level - 1.0) > max(least, _CONFIDENCE * error):
            return level, False
        factors = self._ratios / self._used
        errors = np.sqrt(np.maximum(np.diag(self._covariance), 0.0)) / self._used
        apart = np.abs(factors / level - 1.0)
        significant = apart > np.maximum(_SHAPE_CHANGE, _CONFIDENCE * errors)
        counted = np.flatnonzero(significant & (weights > _SHARE) & (self._weights > _FEWEST))
        if not len(counted):
            return None
        return float(factors[counted[np.argmax(apart[counted])]]), True

    def update(self) -> Profile:
        """Use the learned times from now on; return their profile."""
        self._used = np.maximum(self._ratios, _LEAST_RATIO)
        return self.known()

    def known(self) -> Profile:
        """Return the profile with the learned times."""
        ratios = np.maximum(self._ratios, _LEAST_RATIO).reshape(len(self._octaves), len(self._lengths))
        first, octaves = self._first, np.log2(np.arange(1, self._first.max_batch_size + 1))
        columns = np.array([np.interp(octaves, self._octaves, column) for column in ratios.T])  # by length and size
        if first.lengths is not None:
            by_size = [np.interp(first.lengths, self._lengths, row) for row in columns.T]
            columns = np.array(by_size).T
        times = np.maximum.accumulate(np.array(first.service_times) * columns[len(columns) // 2])
        factors = times / np.array(first.service_times)
        rows, stages = first.length_service_times, first.stage_service_times
        if rows is not None:
            by_length = np.maximum.accumulate(np.maximum.accumulate(np.array(rows) * columns.T, axis=0), axis=1)
            rows = tuple(map(tuple, by_length.tolist()))
        if stages is not None:
            stages = tuple(map(tuple, (np.array(stages) * factors[:, np.newaxis]).tolist()))
        return replace(
            first,
            service_times=tuple(times.tolist()),
            length_service_times=rows,
            stage_service_times=stages,
            cvs=(self.cv,) * first.max_batch_size,
        )


def _between(grid: _Floats, value: float) -> dict[int, float]:
    """The indices of the two nodes around a value, one in a grid of one, and their parts, which sum to 1."""
    last = len(grid) - 1
    if last == 0:
        return {0: 1.0}
    index = min(max(int(np.searchsorted(grid, value, side="right")) - 1, 0), last - 1)
    part = min(max(float((value - grid[index]) / (grid[index + 1] - grid[index])), 0.0), 1.0)
    return {index: 1.0 - part, index + 1: part}
