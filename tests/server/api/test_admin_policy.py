"""How the admin routes and the dashboard describe a policy with maximum ages."""

from dataclasses import replace

import pytest

from policies.catalog import ModelPolicy, choose
from policies.charts.action_table import max_ages_at_rates
from policies.profile import Profile
from server.api.admin import describe_policy
from server.api.schemas import Policy

SMALL = Profile("small", (0.002, 0.003, 0.0035, 0.0042), energies=(0.03, 0.04, 0.047, 0.052))


@pytest.fixture
def chosen(few_loads: None) -> ModelPolicy:
    return choose("smdp:slo_p95_ms=12", SMALL)


def test_a_row_of_maximum_ages_has_its_share_and_lower_bound(chosen: ModelPolicy) -> None:
    described = describe_policy(replace(chosen, margin=0.001), 300.0, [])
    Policy.model_validate(described)
    row = described["rows"][2]
    assert "batch_size" not in row
    assert chosen.table is not None
    solved = chosen.table.rows[2]
    assert solved.max_ages is not None
    assert row["max_age_ms"] == pytest.approx([1e3 * age for age in solved.max_ages.max_age])
    assert row["share_within"] == pytest.approx([0.95], abs=0.01)
    assert 0.0 < row["power_lower_bound_w"] <= (solved.mean_power or 0.0)
    assert described["age_margin_ms"] == 1.0


def test_a_row_of_batch_sizes_has_its_mix() -> None:
    mixed = describe_policy(choose("smdp:slo_mean_ms=5", SMALL), 300.0, [])
    Policy.model_validate(mixed)
    assert any("mix" in row for row in mixed["rows"])


@pytest.mark.usefixtures("few_loads")
def test_another_resource_is_described_in_its_unit() -> None:
    described = describe_policy(choose("smdp:slo_p95_ms=12", replace(SMALL, energies=None)), 300.0, [])
    Policy.model_validate(described)
    assert (described["resource"], described["resource_unit"]) == ("busy_time", "busy share")
    assert described["expected_power_w"] is None
    row = described["rows"][2]
    assert 0.0 < row["resource_lower_bound"] <= 1.0
    assert "power_lower_bound_w" not in row


def test_the_chart_has_a_row_of_maximum_ages_for_each_rate(chosen: ModelPolicy) -> None:
    rows = max_ages_at_rates(chosen)
    assert chosen.table is not None
    assert [row["rate_hz"] for row in rows] == [row.arrival_rate for row in chosen.table.rows]
    assert len(rows[0]["max_age_ms"]) == SMALL.max_batch_size + 1
    assert max_ages_at_rates(choose("greedy", SMALL)) == []
