"""Capacity planning: the search against an exhaustive one, and the cost of a device."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from policies.objectives.frontier import MeanBound, ShareBound, UnreachableError, choose_weight, parse_bound
from policies.objectives.trial import simulated_percentile
from policies.percentile.ages import ResponseBounds
from policies.planning import devices
from policies.planning.devices import CapacityProblem, plan_capacity, simulate_fleet
from policies.planning.prices import Price, check_flags, priced
from policies.profile import Profile, load_profile
from policies.queue.simulator import estimate
from policies.solver.model import Problem
from policies.solver.solver import evaluate, solve
from policies.types import SpecError

P4 = load_profile("googlenet-tesla-p4")
DEVICES = Price(1.0, 0.0, "devices", 0.0)


def problem(rate: float, mean: float, price: Price = DEVICES, profile: Profile = P4) -> CapacityProblem:
    """Return a problem with a bound on the mean, s."""
    return CapacityProblem(Problem(profile, rate), MeanBound(mean), price, True, 20_000, 0)


def keeps(profile: Profile, rate: float, mean: float) -> bool:
    return least_power(profile, rate, mean) is not None


@cache  # several prices have the same candidates
def least_power(profile: Profile, rate: float, mean: float) -> float | None:
    """Return the power of a device at a rate, W; None where no policy keeps the bound on the mean, s."""
    try:
        return choose_weight(Problem(profile, rate), MeanBound(mean)).mean_power
    except UnreachableError:
        return None


@pytest.mark.parametrize(("rate", "mean"), [(5000.0, 0.0066), (5000.0, 0.009), (300.0, 0.00145), (9000.0, 0.003)])
def test_the_fewest_devices_that_keep_the_bound_are_found(rate: float, mean: float) -> None:
    fewest = next(n for n in range(1, 50) if rate < n * P4.capacity and keeps(P4, rate / n, mean))
    found = plan_capacity(problem(rate, mean))
    assert found.best.devices == fewest
    assert found.best.solution.mean_response_time <= mean
    assert [each.kept for each in found.candidates] == [each.devices >= fewest for each in found.candidates]
    assert found.beyond == fewest + 1


def test_tables_of_batch_sizes_are_chosen_by_the_simulation_that_is_shown() -> None:
    step = Profile("step", tuple(2e-3 if b <= 8 else 8e-3 for b in range(1, 17)))
    bound = ShareBound(0.005, 0.95, simulated_percentile(0.95, 300, 0))
    planning = CapacityProblem(Problem(step, 40_000.0), bound, DEVICES, True, 300, 0)
    rows = plan_capacity(planning).candidates
    assert any(row.kept for row in rows)
    assert all(row.kept == (row.percentile <= 0.005) for row in rows)


def test_spare_devices_come_on_top_of_the_fewest_and_share_the_load() -> None:
    tried: list[int] = []
    alone = plan_capacity(problem(5000.0, 0.0066))
    spared = plan_capacity(replace(problem(5000.0, 0.0066), spare=2), tried.append)
    assert spared.best.devices == alone.best.devices + 2
    assert spared.best.kept
    assert spared.best.solution.load == pytest.approx(5000.0 / spared.best.devices / P4.capacity)
    assert set(tried) >= {each.devices for each in spared.candidates}
    assert max(tried) == spared.best.devices


@pytest.mark.parametrize(
    "price", [Price(4.0, 1.0, "W", 4.0), Price(0.3, 0.1, "an hour", 0.0), Price(30.0, 1.0, "W", 30.0)]
)
def test_the_cheapest_number_is_found_and_none_costs_less_than_its_lower_bound(price: Price) -> None:
    rate, mean = 4000.0, 0.006
    capacity = problem(rate, mean, price)
    costs = {}
    for n in range(2, 7):
        power = least_power(P4, rate / n, mean)
        if power is not None:
            costs[n] = price.cost(n, n * power)
            assert costs[n] >= capacity.least_cost(n)
    found = plan_capacity(capacity)
    assert found.best.devices == min(costs, key=costs.__getitem__)
    assert found.best.cost == pytest.approx(min(costs.values()))
    assert found.least_beyond >= found.best.cost


def test_the_power_of_a_plan_includes_idle_power_of_all_devices() -> None:
    capacity = problem(4000.0, 0.02, Price(10.0, 1.0, "W", 10.0))
    found = plan_capacity(capacity)
    assert found.best.devices == 2
    assert found.best.power == pytest.approx(20.0 + 2 * (found.best.solution.mean_power or 0.0))


def test_without_energies_the_plan_saves_busy_time() -> None:
    planning = problem(5000.0, 0.0066, profile=replace(P4, energies=None))
    found = plan_capacity(planning)
    assert found.best.devices == 3
    solution = found.best.solution
    assert found.best.power == pytest.approx(3 * solution.mean_power)
    assert solution.mean_power < solve(Problem(replace(P4, energies=None), 5000 / 3)).mean_power


def test_a_bound_below_the_service_time_is_rejected_with_the_least() -> None:
    with pytest.raises(SpecError, match=r"enough: one request alone takes 1\.357 ms, and .* the least .* is 1\.357"):
        plan_capacity(problem(5000.0, 0.001))


def test_a_device_of_almost_no_cost_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_MAX_TRIED", 4)
    with pytest.raises(SpecError, match="2 to 6 devices were tried and more may still cost less"):
        plan_capacity(replace(problem(2000.0, 0.0045, Price(1e-6, 1.0, "W", 1e-6)), requests=50))


def test_more_devices_than_can_be_simulated_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "MAX_DEVICES", 2)
    assert plan_capacity(problem(2000.0, 0.0066)).best.devices <= 2
    with pytest.raises(SpecError, match="need 3 devices, spare ones included, above the maximum of 2 for a plan"):
        plan_capacity(problem(5000.0, 0.0066))


def test_a_large_fleet_is_simulated_with_fewer_requests_routed_by_expected_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacity = replace(problem(5000.0, 0.0066), requests=2000)
    best = plan_capacity(capacity).best
    monkeypatch.setattr(devices, "_MAX_EVALUATIONS", 3000)
    runs = simulate_fleet(capacity, best)
    assert {name: ran.scheduled for name, ran in runs.items()} == {"random": 2000, "least expected": 1000}
    monkeypatch.setitem(devices.ROUTINGS, "least expected", 2)
    assert list(simulate_fleet(capacity, best)) == ["random"]


def test_the_simulated_fleet_agrees_with_the_plan_and_is_faster_by_expected_delay() -> None:
    capacity = CapacityProblem(Problem(P4, 5000.0), parse_bound("slo_p95_ms", "10", 30_000), DEVICES, True, 60_000, 0)
    found = plan_capacity(capacity)
    assert found.best.devices == 3
    runs = simulate_fleet(capacity, found.best)
    mean = estimate(runs["random"].responses, lambda block: float(block.mean()))
    assert abs(mean.value - found.best.solution.mean_response_time) < 5 * mean.standard_error
    assert mean.standard_error < 0.01 * mean.value
    assert runs["random"].mean_power == pytest.approx(found.best.power, rel=0.01)
    late = [float(np.quantile(runs[name].responses, 0.95)) for name in ("random", "least expected")]
    assert late[1] < late[0] == pytest.approx(0.010, rel=0.02)
    assert devices.keeps(runs["random"], capacity.bound)
    for bound in (ResponseBounds(((0.010, 0.95),), mean.value), MeanBound(mean.value)):
        assert devices.keeps(runs["random"], bound)
    for smaller in (ResponseBounds(((0.010, 0.97),)), ResponseBounds((), 0.9 * mean.value), MeanBound(0.0)):
        assert not devices.keeps(runs["random"], smaller)


def test_idle_power_is_counted_once() -> None:
    known, price = priced(P4, None, 10.0, None)
    assert price == Price(10.0, 1.0, "W", 10.0)
    rate, table = 300.0, tuple(range(33))
    busy = evaluate(Problem(replace(P4, energies=P4.service_times), rate), table).mean_power or 0.0  # share of time
    whole = evaluate(Problem(P4, rate), table).mean_power or 0.0
    beyond = evaluate(Problem(known, rate), table).mean_power or 0.0
    assert 0.3 < busy < 0.95
    assert 10.0 + beyond == pytest.approx(whole + 10.0 * (1.0 - busy))


def test_the_cost_depends_on_the_known_prices() -> None:
    h100 = load_profile("resnet50-h100")
    assert priced(P4, None, None, None)[1] == DEVICES
    assert priced(h100, None, None, None)[1] == Price(124.7, 1.0, "W", 124.7)
    assert priced(h100, 2.0, None, None)[1] == Price(2.0, 0.0, "an hour", 124.7)
    assert priced(h100, 2.0, None, 0.5)[1] == Price(2.0 + 0.06235, 5e-4, "an hour", 124.7)


@pytest.mark.parametrize(
    ("profile", "prices", "message"),
    [
        (P4, (0.0, None, None), "--device-price 0 is invalid"),
        (P4, (None, float("nan"), None), "--idle-power-w nan is invalid"),
        (P4, (None, 40.0, None), "above the 29.1 W"),
        (P4, (None, None, 0.3), "with --power-price alone"),
        (load_profile("resnet50-h100"), (None, 100.0, None), "has an idle power of 124.7 W"),
        (
            load_profile("resnet50-l4-int8"),
            (None, 20.0, None),
            "does not save energy in joules: leave --idle-power-w out",
        ),
        (replace(P4, cost_unit="EUR"), (1.0, None, 0.3), "does not save energy in joules: leave --power-price out"),
    ],
)
def test_invalid_prices_are_rejected(
    profile: Profile, prices: tuple[float | None, float | None, float | None], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        priced(profile, *prices)


def test_flags_of_a_plan_and_of_a_solution_exclude_each_other() -> None:
    check_flags(["profile", "arrival_rate", "w2"], False)
    check_flags(["profile", "plan", "arrival_rate", "slo_share", "device_price"], True)
    with pytest.raises(SpecError, match="leave --w2 out"):
        check_flags(["plan", "w2", "slo_mean_ms"], True)
    with pytest.raises(SpecError, match="add --plan"):
        check_flags(["power_price"], False)
