"""Bins: requests of similar size share batches.

Guldogan, Kunde, Lee and Pedarsani, "Multi-Bin Batching for Increasing LLM Inference Throughput", section 3.

    symbol     name
    l          size: predicted service time when served alone, s (Profile.time_alone)
    [l_i-1,    between two of Bins.edges; the lowest bin begins at 0, the highest has no end
      l_i)
    k          Bins.bins
    B          the batch size of the policy within a bin: static:B as printed
    p_e        probability (mispredicted)

A bin is a kind of its own: PerKind applies the policy to each bin alone and launches the batch that was formed first,
which is the paper's service queue. The policy stays pure: `Bins` learns the sizes from arriving requests and gives each
its kind. A waiting request keeps its kind when the edges move.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.profile import Profile
from policies.rules.rule import BinnedPolicy, EdgeFinder, Rule
from policies.sizing.bins import equal_edges, optimised_edges
from policies.spec import Spec
from policies.types import BatchKey, SpecError

_MAX_BINS = 64
_WINDOW = 4096  # sizes kept
_MIN_SIZES = 32  # before the first edges


class Bins:
    """Gives each request its kind by its size, and learns the edges from the sizes.

    Edges are recomputed when the number of sizes has doubled, and later every half window.

    Attributes:
        bins: maximum number of bins.
        pooled: whether one policy decides about all bins, so that all requests are of one kind.
        edges: edges between the bins, s, ascending; empty, so that all requests are in bin 0, until enough sizes are
            known.
        updates: number of times that the edges were recomputed.
    """

    def __init__(self, bins: int, find_edges: EdgeFinder, pooled: bool = False) -> None:
        """`find_edges` returns the edges, at most `bins` - 1, for observed sizes, s."""
        self.bins = bins
        self.pooled = pooled
        self.edges: Sequence[float] = ()
        self.updates = 0
        self._find_edges = find_edges
        self._sizes: deque[float] | None = deque(maxlen=_WINDOW)
        self._until_update = _MIN_SIZES

    def kind(self, model: str, size: float) -> BatchKey:
        """The kind of a request of this size, s, by the current edges; a size on an edge belongs to the bin above."""
        return BatchKey(model, 0 if self.pooled else bisect_right(self.edges, size))

    @property
    def sizes(self) -> list[float]:
        """The latest sizes, s; empty for fixed edges."""
        return list(self._sizes or ())

    def with_edges_of(self, sizes: Sequence[float]) -> "Bins":
        """Return bins with the edges of these sizes, s, which do not learn from arriving requests."""
        fixed = Bins(self.bins, self._find_edges, self.pooled)
        fixed.edges, fixed._sizes = self._find_edges(sizes), None
        return fixed

    def fixed(self) -> "Bins":
        """Return bins with the present edges, which do not learn from arriving requests."""
        found = Bins(self.bins, one_bin, self.pooled)
        found.edges, found._sizes = tuple(self.edges), None
        return found

    def rescale(self, convert: Callable[[float], float]) -> None:
        """Convert all sizes and edges, s, since the service times of the same requests have changed."""
        self.edges = [convert(edge) for edge in self.edges]
        if self._sizes is not None:
            self._sizes = deque(map(convert, self._sizes), maxlen=_WINDOW)

    def learn(self, size: float) -> None:
        """Record the size, s, of an arriving request; recompute the edges from time to time."""
        if self._sizes is None:
            return
        self._sizes.append(size)
        self._until_update -= 1
        if not self._until_update:
            self.edges = self._find_edges(self._sizes)
            self.updates += 1
            self._until_update = min(len(self._sizes), _WINDOW // 2)


def one_bin(_: Sequence[float]) -> Sequence[float]:
    """Return no edges."""
    return ()


def mispredicted(kind: BatchKey, bins: int, probability: float, rng: np.random.Generator) -> BatchKey:
    """The kind given by a predictor that is sometimes off by one bin (section 6.2).

    Args:
        kind: the true one.
        bins: number of bins.
        probability: p_e, of each neighbouring bin that exists; up to 0.5.
        rng: drawn from once.
    """
    draw = float(rng.random())
    neighbour = kind.bin + (-1 if draw < probability else 1 if draw >= 1.0 - probability else 0)
    return kind._replace(bin=neighbour) if 0 <= neighbour < bins else kind


def _build(spec: Spec, profile: Profile) -> BinnedPolicy:
    largest = profile.max_batch_size
    bins = spec.whole("ARG", 1, _MAX_BINS)
    size = spec.whole("batch_size", 1, largest) if "batch_size" in spec.parameters else largest
    finders: dict[str, EdgeFinder] = {
        "optimised": partial(optimised_edges, bins=bins, batch_size=size),
        "equal": partial(equal_edges, bins=bins),
    }
    edges = spec.parameters.get("edges", "optimised")
    if edges not in finders:
        raise SpecError(f"policy {spec.text!r}: unknown edges {edges!r}; give {' or '.join(finders)}")
    inner = f"{spec.parameters.get('inner', f'static:{size}')},max_wait_ms={spec.parameters['max_wait_ms']}"
    return BinnedPolicy(bins, finders[edges], size, inner)


MULTI_BIN = Rule(
    name="multi-bin",
    build=_build,
    keys=frozenset({"batch_size", "inner", "edges"}),
    takes_arg=True,
    defaults={"inner": "static"},
    per_bin=False,
    description="Requests of similar size share batches, in {arg} bins; the policy within a bin is {inner}.",
    example="multi-bin:3",
)
