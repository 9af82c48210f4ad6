"""The benchmark of a device that changes: what its change shows, and its table."""

from itertools import product
from typing import Any

import pytest

from benchmarks.closed_loop import CASES, LOADS, LOOP, NEW, OLD, REPETITIONS, key, model_costs, table
from benchmarks.servers.changing_device import FIXED_ENERGY, PROFILE, changed
from policies.profile import load_profile


@pytest.mark.parametrize(("load", "loss"), [(0.3, 0.084), (0.6, 0.060)])
def test_the_policy_for_the_old_device_costs_more_on_the_new_one(load: float, loss: float) -> None:
    assert load in LOADS
    costs = model_costs(load)
    assert costs[OLD] / costs[NEW] - 1.0 == pytest.approx(loss, abs=5e-4)


def test_the_change_leaves_the_service_times_and_what_each_request_adds() -> None:
    old, new = load_profile(PROFILE), changed(load_profile(PROFILE))
    assert new.service_times == old.service_times
    assert old.energies is not None
    assert new.energies is not None
    before, after = (2.0 * energies[0] - energies[1] for energies in (old.energies, new.energies))
    assert after == pytest.approx(FIXED_ENERGY * before)
    assert new.energies[31] - new.energies[30] == pytest.approx(old.energies[31] - old.energies[30])


def made_up_record() -> dict[str, Any]:
    """Costs of 110, 105 and 100 in the mean, by case, and 1 more or less by repetition."""
    costs = dict(zip(CASES, (110.0, 105.0, 100.0), strict=True))
    return {
        key(case, load, r): {
            "cost": costs[case] + r - 1,
            "mean_ms": 50.0 + r,
            "mean_power_w": 3.0,
            "noticed_after_s": 1.0 + r if case == LOOP else None,
        }
        for case, load, r in product(CASES, LOADS, range(REPETITIONS))
    }


def test_the_row_that_does_not_adapt_stands_beside_the_others_at_every_load() -> None:
    rows = [line.strip("| ").split(" | ") for line in table(made_up_record()).splitlines()[2:]]
    assert [row[:2] for row in rows] == [[str(load), case] for load, case in product(LOADS, CASES)]
    assert [row[2] for row in rows[:3]] == [
        f"{cost:.1f} ({cost - 1:.1f} to {cost + 1:.1f})" for cost in (110, 105, 100)
    ]
    assert [row[3] for row in rows[:3]] == ["+10.0%", "+5.0%", "+0.0%"]
    assert [row[4] for row in rows] == ["+8.4%", "", "+0.0%", "+6.0%", "", "+0.0%"]
    assert [row[5] for row in rows[:3]] == ["51.00"] * 3
    assert rows[1][-1] == "1.0 to 3.0"


def test_a_cell_that_is_missing_is_an_error() -> None:
    record = made_up_record()
    del record[key(OLD, LOADS[0], 0)]
    with pytest.raises(KeyError):
        table(record)
