"""How many bins, and how large a batch: for a distribution of sizes, a load, and a bound on the mean response time.

Candidates are simulated: equation 7 is the mean response time only while no formed batch waits for the server, and too
little elsewhere. It serves to leave out what can be no answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.profile import Profile, load_profile
from policies.queue.central import serve
from policies.queue.simulator import Estimate, estimate
from policies.sizing.bins import batch_time, least_response_time, optimised_edges
from policies.sizing.size_distributions import SIZES, Draw, parse_sizes
from policies.types import SpecError

LARGEST = 128  # batch of the paper's server, whose batch takes as long as its longest request, however many there are
_BINS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_SIMULATED = 200_000  # requests
_SEEN = 20_000  # of their sizes, by which candidates get their edges
_TAKEN = ("profile", "sizes", "arrival_rate", "slo_mean_ms", "max_batch_size", "seed", "as_json")
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served.

    Attributes:
        arrival_rate: of a Poisson process, 1/s.
        sizes: draws sizes: lengths where there is a profile, else service times alone, s.
        profile: with lengths; None: the paper's server.
        max_batch_size: the largest batch to think of.
        seed: of the simulations.
    """

    arrival_rate: float
    sizes: Draw
    profile: Profile | None
    max_batch_size: int
    seed: int = 0

    @property
    def name(self) -> str:
        """The profile's."""
        return "longest" if self.profile is None else self.profile.name

    def draw(self) -> tuple[_Floats, _Floats]:
        """Instants of arrival, s, and sizes."""
        rng = np.random.default_rng(self.seed)
        return np.cumsum(rng.exponential(1.0 / self.arrival_rate, _SIMULATED)), self.sizes(_SIMULATED, rng)

    def times(self, batch_size: int, sizes: _Floats) -> _Floats:
        """The time of a batch of that many, for each size as its longest, s."""
        if self.profile is None:
            return sizes
        profile, (lengths, place) = self.profile, np.unique(np.ceil(sizes), return_inverse=True)
        return np.array([profile.service_time(batch_size, int(length)) for length in lengths])[place]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Multi-bin batching with optimised edges, batches of exactly B, and no end to waiting.

    Attributes:
        bins: K.
        batch_size: B.
        edges: between the times of batches, s.
        capacity: the throughput that it does not exceed (equation 1), 1/s.
        least: no mean response time is below (equation 7), s.
    """

    bins: int
    batch_size: int
    edges: tuple[float, ...]
    capacity: float
    least: float

    @property
    def spec(self) -> str:
        """As a policy spec."""
        return f"multi-bin:{self.bins},batch_size={self.batch_size},max_wait_ms=inf"


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and its mean response time by simulation, s."""

    candidate: Candidate
    response: Estimate

    def keeps(self, bound: float) -> bool:
        """Whether the mean is within the bound (s) by two standard errors."""
        return self.response.value + 2.0 * self.response.standard_error <= bound


def recommend(demand: Demand, bound: float | None) -> list[Tried]:
    """What was tried, the recommended first.

    With a bound: whatever keeps it, the largest capacity first, since that leaves most to spare; then the others by
    their mean. Without one: by their mean.

    Args:
        demand: what is to be served.
        bound: on the mean response time, s.

    Raises:
        SpecError: nothing keeps up with the arrival rate, or keeps the bound.
    """
    arrivals, sizes = demand.draw()
    candidates = list(_candidates(demand, sizes[:_SEEN]))
    stable = [each for each in candidates if each.capacity > demand.arrival_rate]
    if not stable:
        raise SpecError(
            f"no bins and batches keep up with {demand.arrival_rate:g} requests per second: the most is "
            f"{max(each.capacity for each in candidates):.4g}; lower --arrival-rate, or allow larger batches"
        )
    tried: list[Tried] = []
    for each in sorted(stable, key=lambda candidate: candidate.least):
        if tried and each.least > max(bound or 0.0, min(other.response.value for other in tried)):
            break
        times = demand.times(each.batch_size, sizes)
        run = serve(arrivals, times, np.searchsorted(each.edges, times, side="right"), each.batch_size)
        tried.append(Tried(each, estimate(run.responses, lambda block: float(block.mean()))))
    return _ranked(tried, bound)


def _candidates(demand: Demand, sizes: _Floats) -> Iterator[Candidate]:
    powers = [2**i for i in range(demand.max_batch_size.bit_length()) if 2**i < demand.max_batch_size]
    for batch_size in (*powers, demand.max_batch_size):
        times = demand.times(batch_size, sizes)
        for bins in _BINS if batch_size > 1 else (1,):
            edges = optimised_edges(times, bins, batch_size)
            if len(edges) < bins - 1:  # fewer distinct sizes than bins
                break
            mean = batch_time(times, edges, batch_size)
            least = least_response_time(mean, bins, batch_size, demand.arrival_rate)
            yield Candidate(bins, batch_size, edges, batch_size / mean, least)


def _ranked(tried: list[Tried], bound: float | None) -> list[Tried]:
    by_mean = sorted(tried, key=lambda each: each.response.value)
    if bound is None:
        return by_mean
    kept = sorted((each for each in by_mean if each.keeps(bound)), key=lambda each: -each.candidate.capacity)
    if not kept:
        best = by_mean[0]
        raise SpecError(
            f"no bins and batches keep a mean response time of {1e3 * bound:g} ms: the least, by "
            f"{best.candidate.spec}, is {1e3 * best.response.value:.4g} ms; allow more, or lower --arrival-rate"
        )
    return kept + [each for each in by_mean if not each.keeps(bound)]


def row_of(tried: Tried, demand: Demand, bound: float | None) -> dict[str, Any]:
    """What was tried, as answers tell it."""
    candidate, response = tried.candidate, tried.response
    return {
        "policy": candidate.spec,
        "bins": candidate.bins,
        "batch_size": candidate.batch_size,
        "capacity_hz": candidate.capacity,
        "load": demand.arrival_rate / candidate.capacity,
        "least_response_time_ms": 1e3 * candidate.least,
        "mean_response_time_ms": 1e3 * response.value,
        "standard_error_ms": 1e3 * response.standard_error,
        "bound_kept": None if bound is None else tried.keeps(bound),
    }


def demand_of(
    profile: str, sizes: str | None, given: Sequence[str], numbers: tuple[float | None, int | None, int]
) -> Demand:
    """What solve-policy is asked about bins.

    Args:
        profile: a profile's name or file, or "longest", the paper's server.
        sizes: --sizes.
        given: names of all flags and arguments that were given.
        numbers: arrival rate, 1/s; largest batch; seed.

    Raises:
        SpecError: they do not go together, or cannot be.
    """
    rate, largest, seed = numbers
    for name in given:
        if name not in _TAKEN:
            raise SpecError(f"--sizes recommends bins and batches: leave --{name.replace('_', '-').strip('-')} out")
    if sizes is None:
        raise SpecError(f"profile 'longest' takes as long as its longest request: add --sizes {SIZES}")
    if rate is None or not 0.0 < rate < inf:
        raise SpecError(f"--arrival-rate {rate} cannot be: give how many requests per second arrive")
    known = None if profile == "longest" else load_profile(profile).truncated(largest)
    if known is not None and known.lengths is None:
        raise SpecError(f"profile {profile!r} has no service times by length: profile a text model, or give 'longest'")
    most = known.max_batch_size if known is not None else LARGEST if largest is None else largest
    if most < 1 or seed < 0:
        raise SpecError(f"--max-batch-size {most} and --seed {seed}: give at least 1, and at least 0")
    return Demand(rate, parse_sizes(sizes), known, most, seed)
