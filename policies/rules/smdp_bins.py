"""One decision for all bins: the batch of least average cost, which may mix bins, read from a table by their queues.

The table is solved (policies/solver/several_bins.py) for sizes that have been observed, at loads up to 0.9, and its row
is that of the nearest measured arrival rate. Until sizes are known the policy is greedy. All requests of a model are of
one kind, since they may share a batch; the bin of a request follows from its size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from policies.profile import Profile
from policies.queue.lookup import table_of
from policies.rules.rule import BinnedPolicy, Rule
from policies.sizing.bins import lengths_of, optimised_edges
from policies.solver.distributions import Floats
from policies.solver.several_bins import BinnedProblem, BinnedSolution, capacity, solve_bins
from policies.spec import Spec
from policies.types import Action, Launch, SpecError, State, Wait, launch_oldest

LARGEST_BATCHES = {1: 32, 2: 32, 3: 16}  # by bins; larger ones take an hour or gigabytes to solve
_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
_SETTLED = 1e-3  # of the average cost; the policy settles before it


@dataclass(frozen=True)
class SmdpBins:
    """Launches by the table of the arrival rate nearest to the measured one; greedy below half the lowest.

    Attributes:
        edges: between the bins, s, ascending; a size on an edge belongs to the bin above.
        rates: of the tables, 1/s, ascending.
        tables: a solution for each rate.
        max_batch_size: B.
    """

    edges: Sequence[float]
    rates: Sequence[float]
    tables: Sequence[BinnedSolution]
    max_batch_size: int

    def decide(self, state: State, /) -> Action:
        """Return the oldest requests of each bin, as many as the table says; decide again once the rate has decayed."""
        table = table_of(state, self.rates, self.tables)
        if table is None:
            return launch_oldest(state, self.max_batch_size, self.max_batch_size)
        of = [bisect_right(self.edges, request.size) for request in state.waiting]
        left = list(table.launch([of.count(j) for j in range(len(self.edges) + 1)]))
        size = sum(left)
        if not size:
            return Wait(state.reevaluate_at)
        batch = []
        for request, j in zip(state.waiting, of, strict=True):
            if left[j]:
                left[j] -= 1
                batch.append(request)
        return Launch(batch, reason="full" if size == self.max_batch_size else "policy")


def solve_smdp_bins(sizes: Sequence[float], profile: Profile, bins: int, w2: float) -> SmdpBins:
    """Solve the tables for observed sizes.

    Args:
        sizes: of requests, service times alone, s.
        profile: of the device; its largest size is B.
        bins: the largest number of bins.
        w2: weight of the mean power, per W.

    Raises:
        SpecError: the bins have more states than fit.
    """
    largest = profile.max_batch_size
    edges = optimised_edges(sizes, bins, largest)
    values = np.asarray(sizes, dtype=float)
    of = np.searchsorted(edges, values, side="right")
    samples = tuple(values[of == j] for j in range(len(edges) + 1))
    shares = [len(sample) / len(values) for sample in samples]

    def problem(rate: float) -> BinnedProblem:
        rates, times = tuple(share * rate for share in shares), partial(_batch_time, profile)
        return BinnedProblem(samples, rates, largest, times, profile.powers, 1.0, w2)

    most = capacity(problem(1.0))
    rates = [load * most for load in _LOADS]
    return SmdpBins(edges, rates, [solve_bins(problem(rate), settled=_SETTLED) for rate in rates], largest)


def _batch_time(profile: Profile, batch_size: int, sizes: Floats) -> Floats:
    """Service times of batches by the size of their longest request, alone, s."""
    if not profile.varies_by_length:
        return np.full(len(sizes), profile.service_time(batch_size))
    return np.array([profile.service_time(batch_size, length) for length in lengths_of(sizes, profile)])


def _build(spec: Spec, profile: Profile) -> BinnedPolicy:
    largest = profile.max_batch_size
    bins = spec.whole("ARG", 1, max(LARGEST_BATCHES))
    most = LARGEST_BATCHES[bins]
    if "batch_size" in spec.parameters:
        size = spec.whole("batch_size", 1, min(largest, most))
    elif (size := largest) > most:
        raise SpecError(f"policy {spec.text!r}: batches go up to {largest} here; write batch_size={most} or less")
    edges = partial(optimised_edges, bins=bins, batch_size=size)
    solve = partial(solve_smdp_bins, profile=profile.truncated(size), bins=bins, w2=spec.number("w2", 0.0))
    return BinnedPolicy(bins, edges, size, "greedy", solve)


SMDP_BINS = Rule(
    name="smdp-bins",
    build=_build,
    keys=frozenset({"batch_size", "w2"}),
    takes_arg=True,
    defaults={"w2": "0"},
    per_bin=False,
    description="One solved decision for all {arg} bins of requests of similar size; a batch may mix them; w2 = {w2}.",
    example="smdp-bins:2",
)
