"""Bins: requests of similar size share batches.

Guldogan, Kunde, Lee and Pedarsani, "Multi-Bin Batching for Increasing LLM Inference Throughput", section 3.

    symbol     name
    l          size: predicted service time when served alone, s (policies/sizing/size_models.py)
    [l_i-1,    what lies between two of Bins.edges; the lowest bin begins at 0, the highest has no end
      l_i)
    k          Bins.bins
    B          the batch size of the policy within a bin: static:B as printed
    p_e        probability (mistaken)

A bin is a kind of its own: PerKind asks the policy about each bin alone and launches first what was formed first, which
is the paper's service queue. What is learned of the sizes stays out of the policy, as rates do: `Bins` learns from a
request that arrives and gives it its kind, and who waits keeps it when the edges move.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from policies.types import Kind

Cut = Callable[[Sequence[float]], Sequence[float]]
_WINDOW = 4096  # sizes that are remembered
_FIRST = 32  # sizes before the first edges


class Bins:
    """Gives each request its kind by its size, and learns the edges from the sizes.

    Edges are computed anew when the number of sizes has doubled, and later once in half a window.

    Attributes:
        bins: how many, at most.
        edges: between them, s, ascending; empty until enough sizes are known: then all are in bin 0.
    """

    def __init__(self, bins: int, cut: Cut) -> None:
        """`cut` finds the edges, at most `bins` - 1, for the sizes that it is given, s."""
        self.bins = bins
        self.edges: Sequence[float] = ()
        self._cut = cut
        self._sizes: deque[float] | None = deque(maxlen=_WINDOW)
        self._to_come = _FIRST

    def kind(self, model: str, size: float) -> Kind:
        """The kind of a request of this size, s, by the edges as they are; a size on an edge is above it."""
        return Kind(model, bisect_right(self.edges, size))

    def knowing(self, sizes: Sequence[float]) -> "Bins":
        """Bins that know these sizes beforehand and learn from no others: an oracle's."""
        known = Bins(self.bins, self._cut)
        known.edges, known._sizes = self._cut(sizes), None
        return known

    def learn(self, size: float) -> None:
        """A request of this size, s, arrives: remember it, and move the edges now and then."""
        if self._sizes is None:
            return
        self._sizes.append(size)
        self._to_come -= 1
        if not self._to_come:
            self.edges = self._cut(self._sizes)
            self._to_come = min(len(self._sizes), _WINDOW // 2)


def mistaken(kind: Kind, bins: int, probability: float, rng: np.random.Generator) -> Kind:
    """The kind that a predictor gives who errs by one bin (section 6.2).

    Args:
        kind: the true one.
        bins: how many there are.
        probability: p_e, of each neighbouring bin that there is; up to 0.5.
        rng: drawn from once.
    """
    draw = float(rng.random())
    neighbour = kind.bin + (-1 if draw < probability else 1 if draw >= 1.0 - probability else 0)
    return Kind(kind.model, neighbour) if 0 <= neighbour < bins else kind
