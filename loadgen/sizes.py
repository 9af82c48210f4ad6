"""Request lengths of a run, from a value of --sizes, and the profile of a simulated one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.catalog import parse_spec
from policies.planning.simulation import RequestSizes
from policies.profile import Profile, load_profile
from policies.queue import arrivals
from policies.sizing.size_distributions import (
    LONGEST_REQUEST,
    LONGEST_REQUEST_BATCH,
    longest_request_profile,
    parse_sizes,
)
from policies.types import SpecError

SIZES_USAGE = "uniform:LO:HI, exponential:MEAN or, of an --arrivals trace, trace:COLUMN"


def draw_request_lengths(sizes: str, arrival_process: str, number: int, seed: int) -> NDArray[np.float64]:
    """Draw a length for each arrival, reproducible by the seed.

    Args:
        sizes: value of --sizes.
        arrival_process: value of --arrivals, whose trace trace:COLUMN reads.
        number: number of arrivals; a trace's first rows are taken.
        seed: seed of random lengths.

    Raises:
        SpecError: a value is invalid.
    """
    name, _, column = sizes.partition(":")
    process, _, path = arrival_process.partition(":")
    if name == process == "trace" and ":" not in column:
        return arrivals.trace_column(path, column)[:number]
    return parse_sizes(sizes)(number, np.random.default_rng([seed, 2]))


def whole_lengths(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round lengths up to whole numbers, at least 1."""
    return np.maximum(np.ceil(np.round(lengths, 6)), 1.0)  # round first, because scaling has floating-point errors


def simulated_profile(name: str, sizes: RequestSizes | None, specs: Sequence[str]) -> Profile:
    """Load the profile named by --simulate.

    The profile `longest` goes up to the largest batch size in the specs, or to 128 if none has one.

    Raises:
        SpecError: there is no such profile, or `longest` has no sizes.
    """
    if name != LONGEST_REQUEST:
        return load_profile(name)
    if sizes is None:
        raise SpecError(f"a batch of {LONGEST_REQUEST} takes as long as its longest request: add --sizes {SIZES_USAGE}")
    known = [b for b in map(_batch_size, specs) if b is not None]
    return longest_request_profile(sizes.lengths, max(known, default=LONGEST_REQUEST_BATCH))


def _batch_size(text: str) -> int | None:
    """Batch size in a policy's spec; None if it has none."""
    spec = parse_spec(text)
    key = "ARG" if spec.name == "static" and spec.arg is not None else "batch_size"
    return spec.whole(key, 1, 4096) if key == "ARG" or key in spec.parameters else None
