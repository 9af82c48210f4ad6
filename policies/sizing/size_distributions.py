"""Parsing of size distributions: uniform:LO:HI, exponential:MEAN, or a column of a trace."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile
from policies.queue.arrivals import trace_column
from policies.types import SpecError

SIZES_USAGE = "uniform:LO:HI, exponential:MEAN, trace:FILE:COLUMN"
LONGEST_REQUEST = "longest"  # the Multi-Bin Batching paper's server: a batch takes as long as its longest request
LONGEST_REQUEST_BATCH = 128  # its largest batch, if no other is given
_Floats = NDArray[np.float64]
Draw = Callable[[int, np.random.Generator], _Floats]


def parse_sizes(text: str) -> Draw:
    """Parse uniform:LO:HI, exponential:MEAN or trace:FILE:COLUMN; the values of a trace are drawn at random.

    Raises:
        SpecError: the text is malformed, or the sizes are not positive.
    """
    name, *words = text.split(":")
    match name, words:
        case "uniform", [_, _]:
            low, high = (_number(text, word) for word in words)
            if low > high:
                raise SpecError(f"--sizes {text!r}: {low:g} is above {high:g}; write uniform:LO:HI")
            return lambda number, rng: rng.uniform(low, high, number)
        case "exponential", [mean]:
            scale = _number(text, mean)
            return lambda number, rng: rng.exponential(scale, number)
        case "trace", [_, *_, column]:
            values = trace_column(":".join(words[:-1]), column)
            return lambda number, rng: rng.choice(values, number)
        case _:
            raise SpecError(f"--sizes {text!r} is none of {SIZES_USAGE}; give one of them")


def _number(text: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = np.nan
    if not 0.0 < value < 1e9:
        raise SpecError(f"--sizes {text!r}: {word!r} is not a positive number; give sizes above 0")
    return value


def longest_request_profile(lengths: NDArray[np.float64], max_batch_size: int) -> Profile:
    """Profile of the server in the Multi-Bin Batching paper: a batch takes its longest request's length in seconds.

    The service time by batch size is the mean over batches of requests drawn from these lengths.
    """
    steps = np.arange(len(lengths) + 1) / len(lengths)
    times = [float(np.diff(steps**b) @ np.sort(lengths)) for b in range(1, max_batch_size + 1)]
    rows = ((0.0, 1.0),) * max_batch_size
    return Profile(LONGEST_REQUEST, tuple(times), lengths=(0, 1), length_service_times=rows)
