"""Which objectives can be kept on a device, and the warnings about those that cannot."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from policies.catalog import choose
from policies.objectives.frontier import ShareBound, UnreachableError, choose_weight
from policies.objectives.trial import simulated_percentile
from policies.planning.reachability import Neighbour, objective_warnings, reachability
from policies.profile import load_profile
from policies.solver.model import Problem

P4 = load_profile("googlenet-tesla-p4-x10").truncated(8)


def test_the_least_response_time_rises_with_the_load_from_the_service_time_of_one_request() -> None:
    least = reachability(P4, 1.0).least
    assert [*least] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert all(np.diff([*least.values()]) > 0)
    assert least[0.1] > P4.service_time(1)


def test_an_objective_is_kept_up_to_the_load_at_which_the_solver_finds_no_policy() -> None:
    found = reachability(P4, 0.040)
    assert 0.1 < found.highest_load < 0.9
    bound = ShareBound(0.040, 0.95, simulated_percentile(0.95, 15_000, 0))
    problem = Problem(P4, 1.0)
    choose_weight(replace(problem, arrival_rate=0.95 * found.highest_load * P4.capacity), bound)
    with pytest.raises(UnreachableError):
        choose_weight(replace(problem, arrival_rate=1.1 * found.highest_load * P4.capacity), bound)


def test_an_objective_below_one_service_time_is_never_kept() -> None:
    found = reachability(P4, 0.005)
    assert found.highest_load == 0.0
    assert found.warning is not None
    assert "95% within 5 ms, cannot be kept at any arrival rate, since one request alone takes 13.6 ms" in found.warning
    assert found.warning.count(" ms at ") == 5
    assert "\n" not in found.warning


def test_the_warning_says_up_to_which_rate_an_objective_is_kept() -> None:
    found = reachability(P4, 0.040)
    rate = found.highest_load * P4.capacity
    assert f"can be kept only up to {rate:.0f} requests a second" in str(found.warning)
    assert reachability(P4, 10.0).warning is None


def test_larger_batches_that_are_slower_per_request_do_not_raise_the_least_response_time() -> None:
    slower = replace(P4, service_times=(*P4.service_times[:4], *(10.0 * t for t in P4.service_times[4:])))
    assert reachability(slower, 1.0).least == reachability(P4.truncated(4), 1.0).least


def test_a_profile_without_energies_has_the_same_least_response_times() -> None:
    assert reachability(replace(P4, energies=None), 0.005) == reachability(P4, 0.005)


@pytest.mark.usefixtures("few_loads")
def test_a_policy_that_does_not_pursue_the_promised_objective_is_named() -> None:
    assert objective_warnings(choose("greedy", P4)) == []
    started = choose("smdp:slo_p95_ms=10000", P4)
    assert objective_warnings(started) == []
    (warning,) = objective_warnings(replace(choose("greedy", P4), promised=started.promised))
    assert warning.startswith("policy 'greedy' does not pursue the objective, 95% within 10000 ms")
    assert "smdp:slo_p95_ms=10000" in warning
    both = objective_warnings(replace(choose("greedy", P4), promised=0.001))
    assert len(both) == 2
    assert replace(choose("greedy", P4), promised=inf).objective == inf


@pytest.mark.slow
def test_a_promise_counts_and_names_the_neighbours_of_a_device() -> None:
    chosen = choose("smdp", P4, {"slo_p95_ms": f"{1e3 * 4 * P4.service_time(1)}"})
    quiet = Neighbour("quiet", P4, 0.0)
    alone, beside = objective_warnings(chosen, [quiet]), Neighbour("other", P4, 0.5 * P4.capacity)
    assert alone == objective_warnings(chosen)
    (line,) = objective_warnings(chosen, [quiet, beside])
    assert f", beside other at {beside.rate:.0f}/s, can be kept only up to" in line
    (busy,) = objective_warnings(chosen, [Neighbour("other", P4, 0.95 * P4.capacity)])
    assert "cannot be kept at any arrival rate; " in busy, "and not since one request alone takes that long"
