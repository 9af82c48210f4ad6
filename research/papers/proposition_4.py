"""Proposition 4: the optimal control limit in closed form.

Source: Xu, Zhou and Niu (arXiv 2501.02181), section VI: Proposition 4 (after Deb and Serfozo, 1973), Corollary 1 and
equations (31) and (32). The optimal policy is a control limit if the service time does not depend on the batch size
(Assumption 1), B_min = 1 (Assumption 2) and the energy is linear in the batch size (Assumption 3). The limit has a
closed form if the service time is also exponential (Assumption 4). Otherwise the optimal policy may have another
structure: the journal's appendix E.

| symbol | name here     | meaning, unit                                         | equation |
|--------|---------------|-------------------------------------------------------|----------|
| lambda | arrival_rate  | requests per second                                   | III      |
| 1 / mu | service_time  | mean service time, s                                  | Ass. 1   |
| zeta_0 | fixed_energy  | energy of a batch beyond that of its requests, J      | Ass. 3   |
| chi    | chi           | lambda / mu, arrivals during a service                | Prop. 4  |
| psi    | (not needed)  | chi / (1 + chi)                                       | Prop. 4  |
| xi     | xi            | root of (1 - psi) xi^(B_max + 1) - xi + psi in (0, 1) | Prop. 4  |
| r      | r             | xi / (1 - xi)                                         | Prop. 4  |
| D_q    | D             | the limit is the first q with D_q >= 0                | (32)     |
| Q      | control limit | launch min(s, B_max) from s = Q on                    | (31)     |

The energy that each request adds, beta, is the same under every policy and has no effect on the limit.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.optimize import brentq

from policies.types import SpecError


@dataclass(frozen=True, slots=True)
class SizeIndependent:
    """Batches whose service time is exponential, and the same for all sizes.

    Attributes:
        arrival_rate: lambda, 1/s.
        service_time: its mean l, s.
        max_batch_size: B_max.
        fixed_energy: zeta_0, J a batch.
        w1: weight of the mean response time, per ms.
        w2: weight of the mean power, per W.
    """

    arrival_rate: float
    service_time: float
    max_batch_size: int
    fixed_energy: float = 0.0
    w1: float = 1.0
    w2: float = 0.0


def optimal_control_limit(case: SizeIndependent) -> int:
    """The best control limit Q, from 1 to B_max: Proposition 4, equation (32).

    Raises:
        SpecError: the load is 1 or more, or a number is outside its range.
    """
    _check(case)
    chi = case.arrival_rate * case.service_time
    xi = _root(chi, case.max_batch_size)
    r = xi / (1.0 - xi)
    priced = case.w2 * case.fixed_energy * case.arrival_rate**2 / (1e3 * case.w1)  # w1 counts per ms
    for q in range(1, case.max_batch_size):
        if q * ((q + 1) / 2.0 + chi - r) - r**2 * xi**q + r * (r - chi) - priced >= 0.0:
            return q
    return case.max_batch_size


def _root(chi: float, largest: int) -> float:
    """Xi. The printed equation has the root 1 as well, close to xi at high load.

    Divided by 1 - xi, and by 1 - psi, it reads xi + xi^2 + ... + xi^B_max = chi: increasing from 0 to B_max on (0, 1),
    hence one root where the load is below 1, and none at 1.
    """
    powers = np.arange(1, largest + 1)

    def excess(xi: float) -> float:
        return float(np.sum(xi**powers)) - chi

    return float(brentq(excess, 0.0, 1.0, xtol=1e-15, rtol=1e-14))


def _check(case: SizeIndependent) -> None:
    if case.max_batch_size < 1:
        raise SpecError(f"maximum batch size {case.max_batch_size} is below 1; give at least 1")
    for name in ("arrival_rate", "service_time", "w1"):
        value = getattr(case, name)
        if not 0.0 < value < inf:
            raise SpecError(f"{name} {value:g} is not positive and finite; give such a number")
    for name in ("fixed_energy", "w2"):
        value = getattr(case, name)
        if not 0.0 <= value < inf:
            raise SpecError(f"{name} {value:g} is negative or not finite; give a finite number of 0 or more")
    load = case.arrival_rate * case.service_time / case.max_batch_size
    if load >= 1.0:
        raise SpecError(
            f"load {load:.4g} is 1 or more: arrival rate {case.arrival_rate:g} per second, capacity "
            f"{case.max_batch_size / case.service_time:.6g} per second; lower the rate or allow larger batches"
        )
