"""Devices for priority levels."""

import pytest

from policies.catalog import choose
from policies.planning.level_plan import LevelDemand, plan_levels, simulate_level_device
from policies.profile import load_profile
from policies.types import SpecError

P4 = load_profile("googlenet-tesla-p4")


def test_the_fewest_devices_keep_the_bound_and_serve_bulk() -> None:
    demand = LevelDemand(P4, 500.0, 4500.0, 0.008, 0.95)
    plan = plan_levels(demand, 0)
    kept = [n for n in range(1, plan.devices + 1) if demand.is_kept(n, demand.per_device(n))]
    assert kept == [plan.devices]
    assert plan.tried[-1] == (plan.devices, demand.per_device(plan.devices))
    assert plan_levels(demand, 2).devices == plan.devices + 2


def test_the_limit_is_that_of_the_policy_that_a_server_uses() -> None:
    """Its tables are for some rates, and it takes the next higher one."""
    demand = LevelDemand(P4, 0.31 * P4.capacity, 10.0, 0.008, 0.95)
    policy = choose("smdp:slo_p95_ms=8", P4, {"priority_weights": "8:1"}).unbounded
    assert policy == demand.policy
    assert demand.per_device(1).size == demand.policy.limit(0.5 * P4.capacity)


def test_a_tight_bound_needs_devices_for_bulk_that_the_mean_rate_does_not() -> None:
    """With batches as small as the bound requires, a device serves less bulk."""
    wide, tight = (plan_levels(LevelDemand(P4, 100.0, 4900.0, bound, 0.95), 0).devices for bound in (0.1, 0.006))
    assert wide == int(5000 / P4.capacity) + 1
    assert tight > wide


def test_a_simulated_device_keeps_the_bound_and_serves_everything() -> None:
    load = LevelDemand(P4, 500.0, 4500.0, 0.008, 0.95)
    run = simulate_level_device(load, plan_levels(load, 0).devices, 40_000, 1)
    assert run.levels is not None
    assert len(run.responses) == 40_000
    assert (run.responses[run.levels == 1] <= 0.008).mean() >= 0.95
    assert run.responses[run.levels == 2].mean() > run.responses[run.levels == 1].mean()
    assert (run.levels == 1).mean() == pytest.approx(0.1, abs=0.01)


def test_plans_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(SpecError, match="no number of devices is enough: beside bulk at most"):
        plan_levels(LevelDemand(P4, 500.0, 4500.0, 0.002, 0.95), 0)
    with pytest.raises(SpecError, match="above the maximum of 1000"):
        plan_levels(LevelDemand(P4, 500.0, 4.5e6, 0.012, 0.95), 0)
