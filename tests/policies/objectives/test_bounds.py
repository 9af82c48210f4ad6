"""Which form of policy keeps a bound."""

from dataclasses import replace

import pytest

from policies.objectives.bounds import parse_bounds, solve_within
from policies.objectives.frontier import MeanBound, ShareBound, UnreachableError
from policies.objectives.trial import Trial
from policies.percentile.ages import AgeSolution, ResponseBounds, evaluate_ages
from policies.profile import Profile, load_profile
from policies.queue.simulator import share_within
from policies.solver.model import Problem
from policies.types import SpecError

P4 = load_profile("googlenet-tesla-p4")
# beyond 8 requests a batch takes twice as long: with 9 waiting it is better to launch 8
STEP = Profile(
    "step",
    tuple(2e-3 if b <= 8 else 4e-3 for b in range(1, 17)),
    energies=tuple(0.1 if b <= 8 else 0.2 for b in range(1, 17)),
)
P95, SHARE, MEAN = ("slo_p95_ms", "10"), ("slo_share", "20:0.999"), ("slo_mean_ms", "6")


def test_bounds_are_parsed_for_the_form_that_keeps_them() -> None:
    assert parse_bounds([P95]) == ResponseBounds(((0.010, 0.95),))
    assert parse_bounds([P95, SHARE, MEAN]) == ResponseBounds(((0.010, 0.95), (0.020, 0.999)), 0.006)
    assert parse_bounds([MEAN]) == MeanBound(0.006)
    assert isinstance(parse_bounds([P95], "batch-size"), ShareBound)


@pytest.mark.parametrize(
    ("named", "form"),
    [([P95, SHARE], "batch-size"), ([MEAN, MEAN], "max-ages"), ([P95, ("power_cap_w", "30")], "max-ages")],
)
def test_bounds_that_no_form_keeps_together_are_refused(named: list[tuple[str, str]], form: str) -> None:
    with pytest.raises(SpecError, match="cannot be kept together"):
        parse_bounds(named, form)


def test_a_percentile_is_kept_by_ages_unless_batches_are_very_large() -> None:
    bound = parse_bounds([("slo_p95_ms", "40")])
    assert isinstance(solve_within(Problem(P4, 1000.0), bound), AgeSolution)
    sizes = range(1, 258)
    wide = Profile("wide", tuple(1e-3 + 1e-4 * b for b in sizes), energies=tuple(0.02 + 0.01 * b for b in sizes))
    assert not isinstance(solve_within(Problem(wide, 0.3 * wide.capacity), bound), AgeSolution)


@pytest.mark.parametrize(("times", "limit"), [((2e-3, 4e-3), 6), ((2e-3, 5e-3), 12)])
def test_smaller_batches_are_tried_where_they_may_be_better(times: tuple[float, float], limit: float) -> None:
    profile = replace(STEP, service_times=tuple(times[b > 8] for b in range(1, 17)))
    problem = Problem(profile, 0.8 * profile.capacity)
    found = solve_within(problem, parse_bounds([("slo_share", f"{limit}:0.9")]))
    assert isinstance(found, AgeSolution)
    assert found.max_ages.max_batch_size == found.batch_size[-1] == 8
    assert found.load == pytest.approx(0.8)
    simulated = Trial(problem, 100_000).run(found)
    assert simulated.batch_sizes.max() == 8
    assert share_within(simulated.responses, limit / 1e3).value == pytest.approx(found.share_within[0], abs=0.01)
    assert evaluate_ages(problem, found.max_ages, (limit / 1e3,)).mean_power == pytest.approx(found.mean_power)


def test_an_unreachable_percentile_says_how_near_it_comes() -> None:
    with pytest.raises(UnreachableError, match=r"0\.95 within 8 ms \(the largest at load 0\.9 is 0\.36") as caught:
        solve_within(Problem(P4, 0.9 * P4.capacity), parse_bounds([("slo_p95_ms", "8")]))
    assert isinstance(caught.value.nearest, AgeSolution)


def test_the_nearest_policy_has_smaller_batches_where_launching_all_is_too_slow() -> None:
    slow = replace(STEP, service_times=tuple(2e-3 if b <= 8 else 8e-3 for b in range(1, 17)))
    with pytest.raises(UnreachableError) as caught:
        solve_within(Problem(slow, 0.95 * slow.capacity), parse_bounds([("slo_p95_ms", "2.5")]))
    nearest = caught.value.nearest
    assert isinstance(nearest, AgeSolution)
    assert nearest.max_ages.max_batch_size == max(nearest.batch_size) == 8
    assert nearest.mean_response_time < 0.02
