"""Recommendation of bins and batch size for a size distribution, an arrival rate and a bound on the mean response time.

Candidates are evaluated by simulation. Equation 7 is a lower bound of their mean response time, by which some are
excluded; it is exact only if no formed batch waits for the server.
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
from policies.sizing.bins import batch_time, least_response_time, optimised_edges_by_count
from policies.sizing.size_distributions import LONGEST_REQUEST, LONGEST_REQUEST_BATCH, SIZES_USAGE, Draw, parse_sizes
from policies.types import SpecError

_BINS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_SIMULATED = 200_000  # requests
_FITTED = 20_000  # sizes, of these requests, to which the edges are fitted
_OPTIONS = ("profile", "sizes", "arrival_rate", "slo_mean_ms", "max_batch_size", "seed", "as_json")
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BinningProblem:
    """The system for which bins and batch size are recommended.

    Attributes:
        arrival_rate: rate of the Poisson arrivals, 1/s.
        sizes: draws request sizes: lengths if there is a profile, else service times alone, s.
        profile: profile with lengths; None: the paper's server.
        max_batch_size: largest batch to consider.
        seed: seed of the simulations.
    """

    arrival_rate: float
    sizes: Draw
    profile: Profile | None
    max_batch_size: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the profile."""
        return LONGEST_REQUEST if self.profile is None else self.profile.name

    def draw(self) -> tuple[_Floats, _Floats]:
        """Draw instants of arrival, s, and sizes."""
        rng = np.random.default_rng(self.seed)
        return np.cumsum(rng.exponential(1.0 / self.arrival_rate, _SIMULATED)), self.sizes(_SIMULATED, rng)

    def times(self, batch_size: int, sizes: _Floats) -> _Floats:
        """Return the service time of a batch of this size, for each request size as its longest, s."""
        if self.profile is None:
            return sizes
        profile, (lengths, index) = self.profile, np.unique(np.ceil(sizes), return_inverse=True)
        return np.array([profile.service_time(batch_size, int(length)) for length in lengths])[index]


@dataclass(frozen=True, slots=True)
class BinningCandidate:
    """Multi-bin batching with optimised edges, batches of exactly B, and no maximum wait.

    Attributes:
        bins: K.
        batch_size: B.
        edges: edges between service times, s.
        capacity: maximum throughput (equation 1), 1/s.
        least: lower bound of the mean response time (equation 7), s.
    """

    bins: int
    batch_size: int
    edges: tuple[float, ...]
    capacity: float
    least: float

    @property
    def spec(self) -> str:
        """The policy spec."""
        return f"multi-bin:{self.bins},batch_size={self.batch_size},max_wait_ms=inf"


@dataclass(frozen=True, slots=True)
class SimulatedCandidate:
    """A candidate and its mean response time by simulation, s."""

    candidate: BinningCandidate
    response: Estimate

    def keeps(self, bound: float) -> bool:
        """Return whether the mean is below the bound (s) by two standard errors."""
        return self.response.value + 2.0 * self.response.standard_error <= bound


def recommend(problem: BinningProblem, bound: float | None) -> list[SimulatedCandidate]:
    """Return the simulated candidates, the recommended one first.

    With a bound, those that keep it come first, in decreasing order of capacity, and then the others by mean response
    time. Without a bound all are ordered by mean response time.

    Args:
        problem: the system.
        bound: bound on the mean response time, s.

    Raises:
        SpecError: no candidate is stable at the arrival rate, or none keeps the bound.
    """
    arrivals, sizes = problem.draw()
    candidates = list(_candidates(problem, sizes[:_FITTED]))
    stable = [each for each in candidates if each.capacity > problem.arrival_rate]
    if not stable:
        raise SpecError(
            f"no bins and batch size sustain {problem.arrival_rate:g} requests per second: the maximum is "
            f"{max(each.capacity for each in candidates):.4g}; lower --arrival-rate, or allow larger batches"
        )
    tried: list[SimulatedCandidate] = []
    for each in sorted(stable, key=lambda candidate: candidate.least):
        if tried and each.least > max(bound or 0.0, min(other.response.value for other in tried)):
            break
        times = problem.times(each.batch_size, sizes)
        run = serve(arrivals, times, np.searchsorted(each.edges, times, side="right"), each.batch_size)
        tried.append(SimulatedCandidate(each, estimate(run.responses, lambda block: float(block.mean()))))
    return _ranked(tried, bound)


def _candidates(problem: BinningProblem, sizes: _Floats) -> Iterator[BinningCandidate]:
    powers = [2**i for i in range(problem.max_batch_size.bit_length()) if 2**i < problem.max_batch_size]
    for batch_size in (*powers, problem.max_batch_size):
        times = problem.times(batch_size, sizes)
        bin_counts = _BINS if batch_size > 1 else (1,)
        for bins, edges in zip(bin_counts, optimised_edges_by_count(times, bin_counts, batch_size), strict=True):
            if len(edges) < bins - 1:  # fewer distinct sizes than bins
                break
            mean = batch_time(times, edges, batch_size)
            least = least_response_time(mean, bins, batch_size, problem.arrival_rate)
            yield BinningCandidate(bins, batch_size, edges, batch_size / mean, least)


def _ranked(tried: list[SimulatedCandidate], bound: float | None) -> list[SimulatedCandidate]:
    by_mean = sorted(tried, key=lambda each: each.response.value)
    if bound is None:
        return by_mean
    kept = sorted((each for each in by_mean if each.keeps(bound)), key=lambda each: -each.candidate.capacity)
    if not kept:
        best = by_mean[0]
        raise SpecError(
            f"no bins and batch size keep a mean response time of {1e3 * bound:g} ms: the least, by "
            f"{best.candidate.spec}, is {1e3 * best.response.value:.4g} ms; relax the bound, or lower --arrival-rate"
        )
    return kept + [each for each in by_mean if not each.keeps(bound)]


def candidate_row(simulated: SimulatedCandidate, problem: BinningProblem, bound: float | None) -> dict[str, Any]:
    """Return the JSON object of a simulated candidate."""
    candidate, response = simulated.candidate, simulated.response
    return {
        "policy": candidate.spec,
        "bins": candidate.bins,
        "batch_size": candidate.batch_size,
        "capacity_hz": candidate.capacity,
        "load": problem.arrival_rate / candidate.capacity,
        "least_response_time_ms": 1e3 * candidate.least,
        "mean_response_time_ms": 1e3 * response.value,
        "standard_error_ms": 1e3 * response.standard_error,
        "bound_kept": None if bound is None else simulated.keeps(bound),
    }


def parse_problem(
    profile: str, sizes: str | None, given: Sequence[str], rate: float | None, max_batch_size: int | None, seed: int
) -> BinningProblem:
    """Build the problem from the options of solve-policy --sizes.

    Args:
        profile: name or path of a profile, or "longest", the paper's server.
        sizes: --sizes.
        given: names of all parameters that were set.
        rate: arrival rate, 1/s.
        max_batch_size: largest batch.
        seed: seed of the simulations.

    Raises:
        SpecError: an option is missing, invalid, or not one of --sizes.
    """
    for name in given:
        if name not in _OPTIONS:
            flag = f"--{name.replace('_', '-').strip('-')}"
            raise SpecError(f"--sizes does not take {flag}: leave {flag} out")
    if sizes is None:
        raise SpecError(f"profile {LONGEST_REQUEST!r} needs the sizes of the requests: add --sizes {SIZES_USAGE}")
    if rate is None or not 0.0 < rate < inf:
        raise SpecError(f"--arrival-rate {rate} is invalid: give a positive number of requests per second")
    largest, known = LONGEST_REQUEST_BATCH if max_batch_size is None else max_batch_size, None
    if profile != LONGEST_REQUEST:
        known = load_profile(profile).truncated(max_batch_size)
        largest = known.max_batch_size
        if not known.varies_by_length:
            raise SpecError(
                f"profile {profile!r} has no service times by length: profile a model with lengths, or give "
                f"{LONGEST_REQUEST!r}"
            )
    if largest < 1 or seed < 0:
        raise SpecError(f"--max-batch-size {largest} and --seed {seed}: give at least 1, and at least 0")
    return BinningProblem(rate, parse_sizes(sizes), known, largest, seed)
