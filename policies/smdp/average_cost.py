"""The evaluation equations of a semi-Markov policy with many states, solved by GMRES.

Equation (17) of the journal paper (arXiv 2501.02181) for a fixed policy: h + g y = c + P h, with h = 0 in one state.
The solver of a single queue has its own closure (tail.py); this is for states of several dimensions, whose matrix P is
only known by its products.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres

from policies.smdp.distributions import Floats
from policies.types import SpecError

_PRECISION = 1e-8  # of the residual, relative to the costs
_RESTART, _RESTARTS = 300, 10


@dataclass(frozen=True)
class Chain:
    """The semi-Markov chain of a policy; arrays are by state.

    Attributes:
        expected: returns the expected values at the next epoch for values by state: P h.
        sojourn: y, mean time to the next epoch, s.
        cost: c, until the next epoch.
        energy: until the next epoch, J.
    """

    expected: Callable[[Floats], Floats]
    sojourn: Floats
    cost: Floats
    energy: Floats


def average_cost(chain: Chain, cost: Floats, start: Floats | None = None) -> tuple[Floats, float]:
    """Return relative values by state, 0 in the first one, and the average cost per second.

    Args:
        chain: of the policy.
        cost: until the next epoch, by state: its cost, or its energy for the mean power.
        start: relative values of a similar policy; None: 0.

    Raises:
        SpecError: the equations do not converge.
    """
    scaled = chain.sojourn / chain.sojourn.mean()  # so that all columns are of one magnitude

    def apply(unknown: Floats) -> Floats:  # the first unknown is the average cost of a mean sojourn
        values = unknown.copy()
        values[0] = 0.0
        return np.asarray(values - chain.expected(values) + unknown[0] * scaled)

    operator = LinearOperator((len(cost), len(cost)), matvec=apply, dtype=float)
    first = None if start is None else start.ravel().copy()
    found, failed = gmres(operator, cost, x0=first, rtol=_PRECISION, restart=_RESTART, maxiter=_RESTARTS)
    if failed:
        raise SpecError("the average cost of a policy does not converge; give a lower arrival rate")
    gain = float(found[0]) / float(chain.sojourn.mean())
    found[0] = 0.0
    return found, gain
