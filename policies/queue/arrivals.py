"""Arrival processes: sorted instants in [0, duration), s, drawn from a Generator that the caller gives."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.types import SpecError

Instants = NDArray[np.float64]


def poisson(rate: float, duration: float, rng: np.random.Generator) -> Instants:
    """Independent exponential gaps of mean 1 / rate."""
    instants = np.empty(0)
    last = 0.0
    while last < duration:
        expected = rate * (duration - last)
        gaps = rng.exponential(1.0 / rate, int(expected + 4 * expected**0.5) + 8)
        instants = np.concatenate([instants, last + np.cumsum(gaps)])
        last = float(instants[-1])
    return instants[instants < duration]


def constant(rate: float, duration: float) -> Instants:
    """Equal gaps of 1 / rate, the first arrival at 0."""
    return np.arange(0, max(1, round(rate * duration))) / rate


def backlog(rate: float, duration: float) -> Instants:
    """All rate x duration requests at instant 0."""
    return np.zeros(max(1, round(rate * duration)))


def mmpp(rates: Sequence[float], phase_lengths: Sequence[float], duration: float, rng: np.random.Generator) -> Instants:
    """A Markov-modulated Poisson process: phases in turn, exponential lengths (means in s), a rate (1/s) in each."""
    lengths: list[float] = []
    end = 0.0
    while end < duration:
        lengths.append(float(rng.exponential(phase_lengths[len(lengths) % len(phase_lengths)])))
        end += lengths[-1]
    cycle = [rates[i % len(rates)] for i in range(len(lengths))]
    return steps(cycle, lengths, duration, rng)


def steps(rates: Sequence[float], lengths: Sequence[float], duration: float, rng: np.random.Generator) -> Instants:
    """Poisson arrivals whose rate (1/s) changes after each length (s); the last rate holds on."""
    parts, start = [np.empty(0)], 0.0
    for i, rate in enumerate(rates):
        end = duration if i == len(rates) - 1 else min(duration, start + lengths[i])
        if rate > 0 and end > start:
            parts.append(start + poisson(rate, end - start, rng))
        start = max(start, end)
    return np.concatenate(parts)


def ramp(first: float, last: float, duration: float, rng: np.random.Generator) -> Instants:
    """Poisson arrivals whose rate (1/s) goes in a straight line from `first` at 0 to `last` at the end.

    By a change of time: the arrivals of a process of rate 1, taken back through the expected number of arrivals until
    t, m(t) = first t + slope t^2 / 2. Its inverse is written so that nothing cancels as the slope goes to 0.
    """
    slope = (last - first) / duration
    expected = poisson(1.0, (first + last) / 2 * duration, rng)
    root = np.sqrt(np.maximum(first**2 + 2 * slope * expected, 0.0))  # rounding may fall below 0 where last is 0
    instants: Instants = np.maximum.accumulate(2 * expected / (first + root))  # rounding may swap close neighbours
    return instants[instants < duration]


def trace(path: str, rate: float | None, duration: float | None) -> Instants:
    """The TIMESTAMP column of a CSV file, from 0; rescaled in time to the mean `rate` (1/s), cut at `duration` (s).

    Raises:
        SpecError: there is no such file, or no such column, or a timestamp cannot be read.
    """
    times = np.sort(_timestamps(path, _rows(path)))
    if rate is not None and times[-1] > 0:
        times = times * (len(times) - 1) / (rate * times[-1])
    return times if duration is None else times[times < duration]


def trace_column(path: str, column: str) -> NDArray[np.float64]:
    """The positive values of another column, in the order of the instants that `trace` gives.

    Raises:
        SpecError: there is no such file, or no such column, or a value is not a number above 0.
    """
    rows = _rows(path)
    if column not in rows[0]:
        raise SpecError(f"trace {path!r} has no column {column!r}: name one of {', '.join(map(str, rows[0]))}")
    try:
        values = np.array([float(row[column] or "") for row in rows])
    except ValueError as error:
        raise SpecError(f"trace {path!r}: {column} holds no numbers: {error}; name another column") from None
    if not (np.isfinite(values) & (values > 0)).all():
        raise SpecError(f"trace {path!r}: {column} holds a number that is not above 0; name another column")
    return values[np.argsort(_timestamps(path, rows), kind="stable")]


def _rows(path: str) -> list[dict[str, str | None]]:
    """At least one, with arrival times."""
    if not Path(path).is_file():
        raise SpecError(f"no trace file {path!r}: give a CSV file with a TIMESTAMP column")
    with Path(path).open(newline="", encoding="utf-8-sig", errors="replace") as lines:  # a mark may stand first
        rows: list[dict[str, str | None]] = list(csv.DictReader(lines))
    if not rows or "TIMESTAMP" not in rows[0]:
        raise SpecError(f"trace {path!r} has no TIMESTAMP column: name the column of arrival times so")
    return rows


def _timestamps(path: str, rows: Sequence[Mapping[str, str | None]]) -> Instants:
    """From the first one on, s, in the order of the file."""
    try:
        instants = _seconds([row["TIMESTAMP"] or "" for row in rows])
    except ValueError as error:
        raise SpecError(f"trace {path!r}: TIMESTAMP holds neither seconds nor ISO dates: {error}") from None
    from_first: Instants = instants - instants.min()
    return from_first


def _seconds(texts: Sequence[str]) -> Instants:
    try:
        seconds = np.array([float(text) for text in texts])
    except ValueError:
        dates = np.array(texts, dtype="datetime64[ns]")
        seconds = np.asarray((dates - dates.min()) / np.timedelta64(1, "s"), dtype=np.float64)
    if not np.isfinite(seconds).all():  # an empty field reads as "not a time", and nan and inf read as numbers
        raise ValueError("a field is empty or not finite")
    return seconds
