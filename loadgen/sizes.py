"""How long the requests of a run are: from the words of --sizes to a length for each arrival."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.catalog import parse_spec
from policies.profile import Profile, load_profile
from policies.queue import arrivals
from policies.sizing.size_distributions import parse_sizes
from policies.types import SpecError

LONGEST_REQUEST = "longest"
_LARGEST = 128  # batch, where no spec names one: the paper's
WORDS = "uniform:LO:HI, exponential:MEAN or, of an --arrivals trace, trace:COLUMN"


@dataclass(frozen=True)
class RequestSizes:
    """What requests differ in.

    Attributes:
        lengths: of each request in order of arrival; what a length means is the profile's.
        bin_error: p_e, the probability of each neighbouring bin instead of the right one (Multi-Bin, section 6.2).
        seed: of those errors.
    """

    lengths: NDArray[np.float64]
    bin_error: float = 0.0
    seed: int = 0


def draw_lengths(words: str, arrivals_words: str, number: int, seed: int) -> NDArray[np.float64]:
    """A length for each of so many arrivals; the same words and seed, the same lengths.

    Args:
        words: as of --sizes.
        arrivals_words: as of --arrivals, whose trace trace:COLUMN reads.
        number: of arrivals; those of a trace are its first.
        seed: of the random ones.

    Raises:
        SpecError: the words give no lengths.
    """
    name, _, column = words.partition(":")
    process, _, path = arrivals_words.partition(":")
    if name == process == "trace" and ":" not in column:
        return arrivals.trace_column(path, column)[:number]
    return parse_sizes(words)(number, np.random.default_rng([seed, 2]))


def whole_tokens(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """In tokens, rounded up."""
    return np.maximum(np.ceil(np.round(lengths, 6)), 1.0)  # a scaled length is a little off the whole number it means


def simulated_profile(name: str, sizes: RequestSizes | None, specs: Sequence[str]) -> Profile:
    """The profile that --simulate names; `longest` has room for the largest batch that a spec names, 128 where none.

    Raises:
        SpecError: there is no such profile, or `longest` has no sizes.
    """
    if name != LONGEST_REQUEST:
        return load_profile(name)
    if sizes is None:
        raise SpecError(f"a batch of {LONGEST_REQUEST} takes as long as its longest request: add --sizes {WORDS}")
    asked = [_asked(spec) for spec in specs]
    return longest_request_profile(sizes.lengths, max((b for b in asked if b is not None), default=_LARGEST))


def _asked(text: str) -> int | None:
    spec = parse_spec(text)
    key = "ARG" if spec.name in ("static", "joining") and spec.arg is not None else "batch_size"
    return spec.whole(key, 1, 4096) if key == "ARG" or key in spec.parameters else None


def longest_request_profile(lengths: NDArray[np.float64], max_batch_size: int) -> Profile:
    """The server of Multi-Bin Batching: a batch takes as many seconds as its longest request is long.

    Its service time by batch size alone is the mean over batches of requests drawn from these lengths.
    """
    steps = np.arange(len(lengths) + 1) / len(lengths)
    times = [float(np.diff(steps**b) @ np.sort(lengths)) for b in range(1, max_batch_size + 1)]
    rows = ((0.0, 1.0),) * max_batch_size
    return Profile(LONGEST_REQUEST, tuple(times), lengths=(0, 1), length_service_times=rows)
