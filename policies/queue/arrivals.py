"""Arrival processes: sorted instants in [0, duration), s, drawn from a given random generator."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.types import SpecError

Instants = NDArray[np.float64]


def poisson(rate: float, duration: float, rng: np.random.Generator) -> Instants:
    """Draw Poisson arrivals: independent exponential gaps of mean 1 / rate."""
    instants = np.empty(0)
    last = 0.0
    while last < duration:
        expected = rate * (duration - last)
        gaps = rng.exponential(1.0 / rate, int(expected + 4 * expected**0.5) + 8)
        instants = np.concatenate([instants, last + np.cumsum(gaps)])
        last = float(instants[-1])
    return instants[instants < duration]


def constant(rate: float, duration: float) -> Instants:
    """Return arrivals with equal gaps of 1 / rate, the first at 0."""
    return np.arange(0, max(1, round(rate * duration))) / rate


def backlog(rate: float, duration: float) -> Instants:
    """Return rate x duration arrivals at instant 0."""
    return np.zeros(max(1, round(rate * duration)))


def mmpp(rates: Sequence[float], phase_lengths: Sequence[float], duration: float, rng: np.random.Generator) -> Instants:
    """Draw a Markov-modulated Poisson process: cyclic phases of exponential length (mean, s) and given rate (1/s)."""
    lengths: list[float] = []
    end = 0.0
    while end < duration:
        lengths.append(float(rng.exponential(phase_lengths[len(lengths) % len(phase_lengths)])))
        end += lengths[-1]
    cycle = [rates[i % len(rates)] for i in range(len(lengths))]
    return steps(cycle, lengths, duration, rng)


def steps(rates: Sequence[float], lengths: Sequence[float], duration: float, rng: np.random.Generator) -> Instants:
    """Draw Poisson arrivals whose rate (1/s) changes after each length (s); the last rate lasts to the end."""
    parts, start = [np.empty(0)], 0.0
    for i, rate in enumerate(rates):
        end = duration if i == len(rates) - 1 else min(duration, start + lengths[i])
        if rate > 0 and end > start:
            parts.append(start + poisson(rate, end - start, rng))
        start = max(start, end)
    return np.concatenate(parts)


def ramp(first: float, last: float, duration: float, rng: np.random.Generator) -> Instants:
    """Draw Poisson arrivals whose rate (1/s) is linear in time, from `first` at 0 to `last` at the end.

    Time change: arrivals of a process of rate 1, mapped by the inverse of the expected number of arrivals until t,
    m(t) = first t + slope t^2 / 2. The form of the inverse avoids cancellation as the slope goes to 0.
    """
    slope = (last - first) / duration
    expected = poisson(1.0, (first + last) / 2 * duration, rng)
    root = np.sqrt(np.maximum(first**2 + 2 * slope * expected, 0.0))  # rounding may fall below 0 where last is 0
    instants: Instants = np.maximum.accumulate(2 * expected / (first + root))  # rounding may swap close neighbours
    return instants[instants < duration]


def trace(path: str, rate: float | None, duration: float | None) -> Instants:
    """Read arrivals from the TIMESTAMP column of a CSV file, relative to the first.

    Time is rescaled to the mean `rate` (1/s) and cut at `duration` (s), unless these are None.

    Raises:
        SpecError: the file or the column does not exist, or a timestamp is invalid.
    """
    times = np.sort(_timestamps(path, _rows(path)))
    if rate is not None and times[-1] > 0:
        times = times * (len(times) - 1) / (rate * times[-1])
    return times if duration is None else times[times < duration]


def trace_column(path: str, column: str) -> NDArray[np.float64]:
    """Read the positive values of another column, in the order of the instants of `trace`.

    Raises:
        SpecError: the file or the column does not exist, or a value is not a number above 0.
    """
    rows = _rows(path)
    if column not in rows[0]:
        raise SpecError(f"trace {path!r} has no column {column!r}: name one of {', '.join(map(str, rows[0]))}")
    try:
        values = np.array([float(row[column] or "") for row in rows])
    except ValueError as error:
        raise SpecError(f"trace {path!r}: column {column} is not numeric: {error}; name another column") from None
    if not (np.isfinite(values) & (values > 0)).all():
        raise SpecError(f"trace {path!r}: column {column} has values that are not above 0; name another column")
    return values[np.argsort(_timestamps(path, rows), kind="stable")]


def _rows(path: str) -> list[dict[str, str | None]]:
    """Read the rows of a trace: at least one, with a TIMESTAMP column."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig", errors="replace") as lines:  # "sig": a byte order mark
            rows: list[dict[str, str | None]] = list(csv.DictReader(lines))
    except OSError as error:
        remedy = "give a readable CSV file with a TIMESTAMP column"
        raise SpecError(f"no trace file {path!r} ({error.strerror}): {remedy}") from error
    if not rows or "TIMESTAMP" not in rows[0]:
        raise SpecError(f"trace {path!r} has no TIMESTAMP column: give the column of arrival times this name")
    return rows


def _timestamps(path: str, rows: Sequence[Mapping[str, str | None]]) -> Instants:
    """Return the instants relative to the earliest, s, in the order of the file."""
    try:
        instants = _seconds([row["TIMESTAMP"] or "" for row in rows])
    except ValueError as error:
        raise SpecError(f"trace {path!r}: TIMESTAMP values are neither seconds nor ISO dates: {error}") from None
    from_first: Instants = instants - instants.min()
    return from_first


def _seconds(texts: Sequence[str]) -> Instants:
    try:
        seconds = np.array([float(text) for text in texts])
    except ValueError:
        dates = np.array(texts, dtype="datetime64[ns]")
        seconds = np.asarray((dates - dates.min()) / np.timedelta64(1, "s"), dtype=np.float64)
    if not np.isfinite(seconds).all():  # an empty field is parsed as NaT, and nan and inf as numbers
        raise ValueError("a field is empty or not finite")
    return seconds
