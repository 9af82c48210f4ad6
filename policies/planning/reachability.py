"""Which response times can be promised on a device: the least percentile at each arrival rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from policies.catalog import ModelPolicy
from policies.objectives.frontier import SHARE
from policies.objectives.trial import Trial
from policies.profile import Profile
from policies.queue.table_simulator import ServiceModel, simulate_table
from policies.rules.by_level import LimitedBulk
from policies.sizing.padded import of_mixed_lengths
from policies.solver.distributions import measured_service
from policies.solver.model import Problem
from policies.traits import ActionTable

_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
_BISECTIONS = 5  # for the highest load at which an objective is kept
_NEGLIGIBLE_LOAD, _LOAD_STEP = 0.01, 0.05  # of neighbours: not counted, and to which it is rounded
_SIMULATED_REQUESTS = 15_000  # for each load


@dataclass(frozen=True, slots=True)
class Reachability:
    """Up to which arrival rate an objective can be kept on a device, and what can be promised at each rate.

    Attributes:
        objective: response time within which a share of the requests has to be answered, s.
        highest_load: the load up to which it can be kept; 0 if it cannot, the highest of `least` if it always can.
        capacity: arrival rate at load 1, 1/s.
        least: by load, the least response time that can be promised, s.
        alone: service time of one request alone, s.
        share: of the requests.
        beside: what else the device serves, in words; empty where nothing does.
    """

    objective: float
    highest_load: float
    capacity: float
    least: Mapping[float, float]
    alone: float
    share: float = SHARE
    beside: str = ""

    @property
    def warning(self) -> str | None:
        """One line about an objective that cannot be kept at each of these loads; None if it can."""
        if self.highest_load >= max(self.least):
            return None
        asked = f"the objective, {_per_cent(self.share)} within {1e3 * self.objective:g} ms,{self.beside}"
        if self.alone > self.objective:
            alone = f"{_short(1e3 * self.alone)} ms"
            found = f"{asked} cannot be kept at any arrival rate, since one request alone takes {alone}"
            remedy = "use a faster device"
        elif not self.highest_load:
            found, remedy = f"{asked} cannot be kept at any arrival rate", "add a device"
        else:
            rate = f"{_short(self.highest_load * self.capacity)} requests a second, a load of {self.highest_load:.2g}"
            found = f"{asked} can be kept only up to {rate}"
            remedy = "add a device"
        least = ", ".join(f"{_short(1e3 * s)} ms at {_short(load * self.capacity)}/s" for load, s in self.least.items())
        return f"{found}; the least that can be promised is {least}; raise the objective, or {remedy}"


def _short(value: float) -> str:
    """Return a positive number with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _per_cent(share: float) -> str:
    return f"{100 * share:.4g}%"


def reachability(profile: Profile, objective: float, share: float = SHARE) -> Reachability:
    """Evaluate an objective, s, for a share of the requests on a device with this profile, by simulation.

    It takes well under a second.

    The percentiles are those of the best policy that never waits, since solving may take minutes for large batches. The
    solved policies of least mean response time are within 1 per cent of them on the shipped GoogLeNet profile.
    """
    least = {load: _least_percentile(profile, load, share) for load in _LOADS}
    alone, missed = profile.service_time(1), next((load for load, least_s in least.items() if least_s > objective), 1.0)
    kept = max((load for load in _LOADS if load < missed), default=0.0)
    for _ in range(_BISECTIONS if alone <= objective and missed < 1.0 else 0):
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if _least_percentile(profile, middle, share) <= objective else (kept, middle)
    return Reachability(objective, kept, profile.capacity, least, alone, share)


@lru_cache(maxsize=256)
def _least_percentile(profile: Profile, load: float, share: float) -> float:
    """Return the least response time within which a policy that never waits answers a share at this load, s.

    The policies differ in their largest batch, since a larger one may be slower per request.
    """
    problem = Problem(profile, load * profile.capacity, service=measured_service(profile))
    trial, largest = Trial(problem, _SIMULATED_REQUESTS), profile.max_batch_size
    device = ServiceModel(trial.service_time(), largest)
    most_efficient = max(range(1, largest + 1), key=lambda b: b / profile.service_time(b))
    limits = {largest, most_efficient, *(2**k for k in range(largest.bit_length()))}
    tables = [ActionTable(tuple(range(limit + 1)), largest) for limit in limits]
    return min(float(np.quantile(simulate_table(t, device, trial.instants).responses, share)) for t in tables)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another model of the device: its name, its profile, and its arrivals a second."""

    model: str
    profile: Profile
    rate: float

    @property
    def load(self) -> float:
        """The part of the device's time that it takes, if its batches are as large as is most efficient."""
        return self.rate / self.profile.capacity


def _beside_bulk(chosen: ModelPolicy) -> list[str] | None:
    """The warnings about the objective of the first priority level; None for other policies."""
    policy = chosen.unbounded
    if not isinstance(policy, LimitedBulk):
        return None
    if policy.kept_up_to >= policy.rates[-1]:
        return []
    asked = f"the objective of level 1, {_per_cent(chosen.share)} within {1e3 * chosen.objective:g} ms"
    rate = "at any rate" if not policy.kept_up_to else f"above {_short(policy.kept_up_to)} of its requests a second"
    return [f"{asked}, cannot be kept beside other levels {rate}; raise the objective, or add a device"]


def objective_warnings(chosen: ModelPolicy, neighbours: Sequence[Neighbour] = ()) -> list[str]:
    """Return a line for an objective that the policy does not pursue, and one for an objective that cannot be kept.

    Neighbours leave the model a part of the device's time: its service times count as longer by that part, to at most
    ten times as long. So the line says what can be promised at their present rates.
    """
    if chosen.objective == inf:
        return []
    beside_bulk = _beside_bulk(chosen)
    if beside_bulk is not None:
        return beside_bulk
    busy = [each for each in neighbours if each.load > _NEGLIGIBLE_LOAD]
    load = _LOAD_STEP * round(sum(each.load for each in busy) / _LOAD_STEP)  # for the cache
    known = of_mixed_lengths(chosen.profile, chosen.solved_sizes)
    times = np.array(known.service_times) / max(1.0 - load, 0.1)
    profile = replace(known, service_times=tuple(times.tolist()), energies=None) if load else known
    named = "".join(f" beside {each.model} at {_short(each.rate)}/s," for each in busy)
    reached = reachability(profile, chosen.objective, chosen.share)
    reached = replace(reached, alone=chosen.profile.service_time(1), beside=named)
    found = [] if reached.warning is None else [reached.warning]
    if chosen.slo == inf:
        asked = f"{_per_cent(chosen.share)} within {1e3 * chosen.objective:g} ms"
        found.append(
            f"policy {chosen.spec!r} does not pursue the objective, {asked}, which stays promised and counted; set "
            f"smdp:slo_p95_ms={1e3 * chosen.objective:g} to pursue it"
        )
    return found
