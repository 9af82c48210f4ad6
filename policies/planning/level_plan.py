"""Devices for priority levels: the fewest that keep a percentile of the first level, and serve all bulk beside it.

Arrivals are split evenly and at random, so that each of n devices has Poisson arrivals at 1/n of the rates, and acts as
a server with this percentile does. Both the share within the bound and n times the throughput of bulk grow with n, so
that the fewest devices are found by bisection. The share is that beside bulk that always waits (policies/percentile/
bulk.py), the worst case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from policies.percentile.bulk import BulkBatches, bulk_batches
from policies.planning.devices import MAX_DEVICES, fewest
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import Run, run
from policies.rules.by_level import LimitedBulk, limited_bulk
from policies.solver.distributions import measured_service
from policies.solver.model import LARGEST_LOAD
from policies.types import BatchKey, Launch, Request, SpecError


@dataclass(frozen=True)
class LevelDemand:
    """The arrivals of two levels at a fleet of equal devices, and the bound on the first level's response time.

    Attributes:
        profile: of a device.
        first: arrival rate of the first level, 1/s.
        bulk: arrival rate of all other levels, 1/s.
        response_time: the bound, s.
        share: of the first level's requests to be within it.
    """

    profile: Profile
    first: float
    bulk: float
    response_time: float
    share: float

    @cached_property
    def policy(self) -> LimitedBulk:
        """The policy of each device."""
        return limited_bulk(self.profile, self.response_time, self.share)

    def per_device(self, devices: int) -> BulkBatches:
        """The largest batch with bulk on each of this many devices, and what it gives."""
        rate = self.first / devices
        (found,) = bulk_batches(self.profile, rate, self.response_time, [self.policy.limit(rate)])
        return found

    def is_kept(self, devices: int, found: BulkBatches) -> bool:
        """Whether this many devices keep the bound, and bulk does not need more than their throughput."""
        return found.share >= self.share and self.bulk <= LARGEST_LOAD * devices * found.throughput


@dataclass(frozen=True)
class LevelPlan:
    """The devices for priority levels.

    Attributes:
        devices: how many, spare ones included.
        tried: numbers of devices with what each of them gives, ascending.
    """

    devices: int
    tried: Sequence[tuple[int, BulkBatches]]


def plan_levels(demand: LevelDemand, spare: int) -> LevelPlan:
    """Find the fewest devices, with `spare` more that may be out of service.

    Raises:
        SpecError: no number of devices is enough, or too many are needed.
    """
    profile, tried = demand.profile, dict[int, BulkBatches]()

    def is_enough(devices: int) -> bool:
        if devices not in tried:
            tried[devices] = demand.per_device(devices)
        return demand.is_kept(devices, tried[devices])

    _check_reachable(demand)
    least = int((demand.first + demand.bulk) / profile.capacity) + 1
    found = (fewest(is_enough, least) if least <= MAX_DEVICES else least) + spare
    if found > MAX_DEVICES:
        raise SpecError(
            f"{demand.first + demand.bulk:g} requests per second need {found} devices, spare ones included, above the "
            f"maximum of {MAX_DEVICES} for a plan: plan for a fraction of the rate and scale the number of devices"
        )
    is_enough(found)
    return LevelPlan(found, sorted(tried.items()))


def _check_reachable(demand: LevelDemand) -> None:
    """Check the bound at the lowest rate of the policy, where it is easiest to keep."""
    if demand.policy.kept_up_to > 0.0:
        return
    rate = demand.policy.rates[0]
    (found,) = bulk_batches(demand.profile, rate, demand.response_time, demand.policy.limits[:1])
    raise SpecError(
        f"no number of devices is enough: beside bulk at most {found.share:.4g} of level 1 are answered within "
        f"{1e3 * demand.response_time:g} ms; raise the bound"
    )


def simulate_level_device(demand: LevelDemand, devices: int, requests: int, seed: int) -> Run:
    """Simulate one of the devices, with its part of the arrivals."""
    rate, rng = (demand.first + demand.bulk) / devices, np.random.default_rng([seed, 9])
    instants = poisson(rate, (requests + 10 * requests**0.5 + 10) / rate, rng)[:requests].tolist()
    levels = np.where(rng.random(len(instants)) * rate < demand.first / devices, 1, 2).tolist()
    first, largest, model = demand.first / devices, demand.profile.max_batch_size, BatchKey().model
    policy = LimitedBulk([first], [demand.policy.limit(first)], largest)
    draw = measured_service(demand.profile).sampler(np.array(demand.profile.service_times), rng)

    def service_time(launch: Launch) -> float:
        return draw(len(launch.requests))

    served = [Request(i, at, level=level) for i, (at, level) in enumerate(zip(instants, levels, strict=True))]
    batcher = Batcher(policy, {model: largest}, NoMonitor(), levels={model: 2})
    return run(batcher, served, service_time, lambda _: None)
