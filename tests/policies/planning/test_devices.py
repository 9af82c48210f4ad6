"""How many devices: the search against all numbers tried, and what a device costs."""

from dataclasses import replace

import numpy as np
import pytest

from policies.planning import devices
from policies.planning.devices import Demand, check, plan
from policies.planning.prices import Price, check_flags, priced
from policies.profile import Profile, load_profile
from policies.queue.simulator import estimate
from policies.smdp.choice import MeanBound, UnreachableError, choose, parse_bound
from policies.smdp.model import Problem
from policies.smdp.solver import evaluate, solve
from policies.types import SpecError

P4 = load_profile("googlenet-tesla-p4")
DEVICES = Price(1.0, 0.0, "devices", 0.0)


def demand(rate: float, mean: float, price: Price = DEVICES, profile: Profile = P4) -> Demand:
    """`mean` in s."""
    return Demand(Problem(profile, rate), MeanBound(mean), price, True, 20_000, 0)


def keeps(profile: Profile, rate: float, mean: float) -> bool:
    try:
        choose(Problem(profile, rate), MeanBound(mean))
    except UnreachableError:
        return False
    return True


@pytest.mark.parametrize(("rate", "mean"), [(5000.0, 0.0066), (5000.0, 0.009), (300.0, 0.00145), (9000.0, 0.003)])
def test_the_fewest_that_keep_the_promise_are_found(rate: float, mean: float) -> None:
    fewest = next(n for n in range(1, 50) if rate < n * P4.capacity and keeps(P4, rate / n, mean))
    found = plan(demand(rate, mean))
    assert found.best.devices == fewest
    assert found.best.solution.mean_response_time <= mean
    assert [each.kept for each in found.tried] == [each.devices >= fewest for each in found.tried]
    assert found.beyond == fewest + 1


@pytest.mark.parametrize(
    "price", [Price(4.0, 1.0, "W", 4.0), Price(0.3, 0.1, "an hour", 0.0), Price(30.0, 1.0, "W", 30.0)]
)
def test_the_cheapest_of_all_numbers_is_found_and_none_costs_less_than_its_bound(price: Price) -> None:
    rate, mean = 4000.0, 0.006
    asked = demand(rate, mean, price)
    costs = {}
    for n in range(2, 7):
        if keeps(P4, rate / n, mean):
            costs[n] = price.cost(n, n * (choose(Problem(P4, rate / n), MeanBound(mean)).mean_power or 0.0))
            assert costs[n] >= asked.least_cost(n)
    found = plan(asked)
    assert found.best.devices == min(costs, key=costs.__getitem__)
    assert found.best.cost == pytest.approx(min(costs.values()))
    assert found.least_beyond >= found.best.cost


def test_the_power_of_a_plan_is_that_of_all_devices_and_their_idling() -> None:
    asked = demand(4000.0, 0.02, Price(10.0, 1.0, "W", 10.0))
    found = plan(asked)
    assert found.best.devices == 2
    assert found.best.power == pytest.approx(20.0 + 2 * (found.best.solution.mean_power or 0.0))


def test_without_energies_the_fastest_policy_is_planned_with() -> None:
    found = plan(demand(5000.0, 0.0066, profile=replace(P4, energies=None)))
    assert found.best.devices == 3
    assert found.best.power is None
    assert found.best.solution.batch_size == solve(Problem(P4, 5000 / 3)).batch_size


def test_a_promise_faster_than_a_request_alone_is_refused_with_the_least() -> None:
    with pytest.raises(SpecError, match=r"no number of devices is enough: .* the least at load 0.0001 is 1.357"):
        plan(demand(5000.0, 0.001))


def test_a_device_that_costs_next_to_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_MOST", 4)
    with pytest.raises(SpecError, match="from 2 to 6 devices were tried and more may still pay"):
        plan(replace(demand(2000.0, 0.0045, Price(1e-6, 1.0, "W", 1e-6)), requests=50))


def test_more_devices_than_can_be_checked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_LARGEST", 2)
    assert plan(demand(2000.0, 0.0066)).best.devices <= 2
    with pytest.raises(SpecError, match="5000 requests per second take 3 devices, plans are for up to 2: give a part"):
        plan(demand(5000.0, 0.0066))


def test_a_large_fleet_is_checked_at_random_by_all_requests_and_less_by_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = demand(5000.0, 0.0066)
    best = plan(asked).best
    monkeypatch.setattr(devices, "_ASKED", 30_000)
    runs = check(asked, best)
    assert {name: ran.scheduled for name, ran in runs.items()} == {"random": 20_000, "least expected": 10_000}
    monkeypatch.setattr(devices, "_LARGE", 2)
    assert list(check(asked, best)) == ["random"]


def test_the_plan_is_what_the_fleet_does_and_by_looking_it_is_faster() -> None:
    asked = Demand(Problem(P4, 5000.0), parse_bound("slo_p95_ms", "10", 30_000), DEVICES, True, 60_000, 0)
    found = plan(asked)
    assert found.best.devices == 3
    runs = check(asked, found.best)
    mean = estimate(runs["random"].responses, lambda block: float(block.mean()))
    assert abs(mean.value - found.best.solution.mean_response_time) < 5 * mean.standard_error
    assert mean.standard_error < 0.01 * mean.value
    assert runs["random"].mean_power == pytest.approx(found.best.power, rel=0.01)
    late = [float(np.quantile(runs[name].responses, 0.95)) for name in ("random", "least expected")]
    assert late[1] < late[0] == pytest.approx(0.010, rel=0.02)


def test_idle_power_is_counted_once() -> None:
    known, price = priced(P4, None, 10.0, None)
    assert price == Price(10.0, 1.0, "W", 10.0)
    rate, table = 300.0, tuple(range(33))
    busy = evaluate(Problem(replace(P4, energies=P4.service_times), rate), table).mean_power or 0.0  # share of time
    whole = evaluate(Problem(P4, rate), table).mean_power or 0.0
    beyond = evaluate(Problem(known, rate), table).mean_power or 0.0
    assert 0.3 < busy < 0.95
    assert 10.0 + beyond == pytest.approx(whole + 10.0 * (1.0 - busy))


def test_what_is_least_follows_from_what_is_known() -> None:
    h200 = load_profile("resnet50-h200-prior")
    assert priced(P4, None, None, None)[1] == DEVICES
    assert priced(h200, None, None, None)[1] == Price(110.0, 1.0, "W", 110.0)
    assert priced(h200, 2.0, None, None)[1] == Price(2.0, 0.0, "an hour", 110.0)
    assert priced(h200, 2.0, None, 0.5)[1] == Price(2.0 + 0.055, 5e-4, "an hour", 110.0)


@pytest.mark.parametrize(
    ("profile", "prices", "says"),
    [
        (P4, (0.0, None, None), "--device-price 0 cannot be"),
        (P4, (None, float("nan"), None), "--idle-power-w nan cannot be"),
        (P4, (None, 40.0, None), "above the 29.1 W"),
        (P4, (None, None, 0.3), "by --power-price alone"),
        (load_profile("resnet50-h200-prior"), (None, 100.0, None), "says 110 W idle itself"),
        (load_profile("resnet50-l4-int8"), (None, 20.0, None), "no energies in joules: leave --idle-power-w out"),
        (replace(P4, cost_unit="EUR"), (1.0, None, 0.3), "no energies in joules: leave --power-price out"),
    ],
)
def test_prices_that_cannot_be_are_refused(
    profile: Profile, prices: tuple[float | None, float | None, float | None], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        priced(profile, *prices)


def test_flags_of_a_plan_and_of_a_solution_do_not_mix() -> None:
    check_flags(["profile", "arrival_rate", "w2"], False)
    check_flags(["profile", "plan", "arrival_rate", "slo_share", "device_price"], True)
    with pytest.raises(SpecError, match="leave --w2 out"):
        check_flags(["plan", "w2", "slo_mean_ms"], True)
    with pytest.raises(SpecError, match="add --plan"):
        check_flags(["power_price"], False)
