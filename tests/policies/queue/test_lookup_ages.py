"""Lookup in tables of maximum ages: launches, waits, rows by rate, mixes, and the maximum wait."""

from math import inf
from pathlib import Path

import pytest

from policies.catalog import ModelPolicy, choose, solved, solved_again
from policies.objectives.table import PolicyTable, TableRow, save_table
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.lookup import ActionRow, Lookup, lookup
from policies.queue.monitor import NoMonitor
from policies.rules.maximum_wait import MaximumWait
from policies.types import BatchKey, Launch, MaxAges, Request, State, Wait

AGES = MaxAges((0.0, 0.010, 0.004, 0.0))
SMALL = Profile("small", (0.002, 0.003, 0.0035, 0.004), energies=(1.0, 1.2, 1.4, 1.6))


def policy(ages: MaxAges = AGES, largest: int = 4) -> Lookup:
    return lookup([ActionRow(100.0, (0, 1), None, ages)], largest)


def state(now: float, *arrivals: float, rate: float | None = None, first_id: int = 0) -> State:
    waiting = [Request(first_id + i, at) for i, at in enumerate(arrivals)]
    return State(now, waiting, (), {} if rate is None else {BatchKey(): rate})


@pytest.mark.parametrize(
    ("now", "arrivals", "until"),
    [(1.0, (1.0,), 1.010), (1.009, (1.0,), 1.010), (1.003, (1.0, 1.003), 1.004)],
)
def test_it_waits_until_the_oldest_has_its_maximum_age(now: float, arrivals: tuple[float, ...], until: float) -> None:
    assert policy().decide(state(now, *arrivals)) == Wait(until)


@pytest.mark.parametrize(
    ("now", "arrivals", "size"),
    [(1.010, (1.0,), 1), (1.004, (1.0, 1.004), 2), (1.0, (1.0,) * 3, 3), (1.0, (1.0,) * 9, 4)],
)
def test_it_launches_all_at_the_maximum_age(now: float, arrivals: tuple[float, ...], size: int) -> None:
    action = policy().decide(state(now, *arrivals))
    assert isinstance(action, Launch)
    assert len(action.requests) == size


def test_the_end_of_a_wait_launches_whatever_the_rounding() -> None:
    for step in range(1000):
        arrival = 1e6 + step * 0.000_123
        action = policy().decide(state(arrival, arrival))
        assert isinstance(action, Wait)
        assert isinstance(policy().decide(state(action.until, arrival)), Launch)


def test_it_decides_again_once_the_rate_has_decayed() -> None:
    assert policy().decide(state(1.0, 1.0, rate=1000.0)) == Wait(1.003)
    assert isinstance(policy().decide(state(1.0, 1.0, rate=10.0)), Launch)  # below half the lowest rate


def test_the_row_of_the_nearest_rate_is_used() -> None:
    rows = [ActionRow(100.0, (0, 1), None, AGES), ActionRow(300.0, (0, 1), None, MaxAges((0.0, 0.006)))]
    assert lookup(rows, 4).decide(state(1.0, 1.0, rate=210.0)) == Wait(1.006)


def test_a_mix_keeps_its_table_while_the_oldest_request_waits() -> None:
    mixed = policy(MaxAges((0.0, 0.010, 0.009), 0.5, (0.0, 0.020, 0.018)))
    tables = set()
    for oldest in range(50):
        alone = mixed.decide(state(1.0, 1.0, first_id=oldest))
        joined = mixed.decide(state(1.005, 1.0, 1.005, first_id=oldest))
        assert isinstance(alone, Wait)
        assert isinstance(joined, Wait)
        tables.add((round(alone.until - 1.0, 6), round(joined.until - 1.0, 6)))
    assert tables == {(0.010, 0.009), (0.020, 0.018)}


def test_the_maximum_wait_comes_first() -> None:
    bounded = MaximumWait(policy(), 4, 0.007)
    assert bounded.decide(state(1.0, 1.0)) == Wait(1.007)
    action = bounded.decide(state(1.007, 1.0))
    assert isinstance(action, Launch)
    assert action.reason == "max_wait"


def test_there_is_no_action_table() -> None:
    assert policy().action_table(100.0) is None
    assert solved((0, 1), SMALL, max_ages=AGES).fixed_max_ages() == AGES
    assert solved((0, 1), SMALL).fixed_max_ages() is None


def test_no_batch_is_above_the_largest_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    rows = (TableRow(100.0, 0.1, 0.0, (0, 1), max_ages=MaxAges((0.0, 0.01, 0.0))),)
    save_table(PolicyTable("small", 1.0, None, 2, rows, {"slo_p95_ms": 12.0}), path)
    action = choose(str(path), SMALL).policy.decide(state(1.0, *(1.0,) * 4))
    assert isinstance(action, Launch)
    assert len(action.requests) == 2


@pytest.mark.parametrize(("end", "launches"), [(1.0095, False), (1.010, True), (1.5, True)])
def test_the_lookahead_uses_the_age_at_the_end_of_the_batch(end: float, launches: bool) -> None:
    batcher = Batcher(policy(), {"": 4}, NoMonitor())
    batcher.arrive(Request(0, 0.99))
    running = batcher.decide(1.0)
    assert isinstance(running, Launch)
    batcher.arrive(Request(1, 1.0))
    following = batcher.lookahead(running, end)
    assert (following is not None) == launches


def test_the_next_request_is_the_oldest_after_a_cancellation() -> None:
    batcher = Batcher(policy(), {"": 4}, NoMonitor())
    first, second = Request(0, 1.0), Request(1, 1.002)
    batcher.arrive(first)
    batcher.arrive(second)
    assert batcher.decide(1.002) == Wait(1.004)
    assert batcher.cancel(first)
    assert batcher.decide(1.003) == Wait(1.012)


@pytest.fixture
def chosen(few_loads: None) -> ModelPolicy:
    return choose("smdp:slo_p95_ms=12", SMALL)


def test_a_bound_on_a_percentile_is_solved_for_maximum_ages(chosen: ModelPolicy) -> None:
    assert chosen.table is not None
    assert all(row.max_ages is not None for row in chosen.table.rows)
    assert chosen.table.bound == {"slo_p95_ms": 12.0}
    assert chosen.slo == 0.012
    older = choose("smdp:slo_p95_ms=12,policy_form=batch-size", SMALL)
    assert older.table is not None
    assert all(row.max_ages is None for row in older.table.rows)
    pairs = list(zip(chosen.table.rows, older.table.rows, strict=True))[:4]  # loads at which the bound is kept
    assert all((row.mean_power or inf) <= (other.mean_power or 0.0) * 1.001 for row, other in pairs)


def test_a_margin_solves_for_a_smaller_bound_and_keeps_the_objective(chosen: ModelPolicy) -> None:
    again, inside = solved_again(chosen, SMALL, margin=0.002), choose("smdp:slo_p95_ms=10", SMALL)
    assert again.table is not None
    assert inside.table is not None
    assert again.table.rows == inside.table.rows
    assert (again.slo, again.margin, again.spec) == (chosen.slo, 0.002, chosen.spec)
    assert again.parameters == chosen.parameters


def rows_at(chosen: ModelPolicy) -> dict[float, TableRow]:
    assert chosen.table is not None
    return {round(row.load, 2): row for row in chosen.table.rows}


def test_near_a_rate_only_the_rows_of_its_loads_are_solved_again(chosen: ModelPolicy) -> None:
    again = solved_again(chosen, SMALL, margin=0.002, arrival_rate=0.5 * SMALL.capacity)
    inside, before, after = rows_at(choose("smdp:slo_p95_ms=10", SMALL)), rows_at(chosen), rows_at(again)
    assert {load for load in before if after[load] == inside[load] != before[load]} == {
        load for load in before if 0.41 < load < 0.59
    }
    assert all(after[load] == before[load] for load in before if not 0.41 < load < 0.59)
    assert not again.unsolved_rate(0.58 * SMALL.capacity)
    assert again.unsolved_rate(0.62 * SMALL.capacity)
    assert not chosen.unsolved_rate(0.62 * SMALL.capacity)
    both = solved_again(again, SMALL, margin=0.002, arrival_rate=0.7 * SMALL.capacity)
    assert not both.unsolved_rate(0.5 * SMALL.capacity)
    assert not both.unsolved_rate(0.7 * SMALL.capacity)
    assert rows_at(both)[0.5] == after[0.5]


def test_near_a_rate_the_other_rows_keep_their_loads_for_a_profile_with_another_capacity(chosen: ModelPolicy) -> None:
    slower = Profile("slower", tuple(2.0 * t for t in SMALL.service_times), energies=SMALL.energies)
    again = solved_again(chosen, slower, arrival_rate=0.5 * slower.capacity)
    assert [row.arrival_rate for row in rows_at(again).values()] == pytest.approx(
        [load * slower.capacity for load in rows_at(again)]
    )
    assert again.unsolved_rate(0.1 * slower.capacity)


def test_a_margin_does_not_solve_for_less_than_twice_the_time_of_one_request(chosen: ModelPolicy) -> None:
    again = solved_again(chosen, SMALL, margin=0.011)
    assert again.table is not None
    assert again.table.bound == {"slo_p95_ms": 4.0}
    tight = solved_again(choose("smdp:slo_p95_ms=3", SMALL), SMALL, margin=0.001)
    assert tight.table is not None
    assert tight.table.bound == {"slo_p95_ms": 3.0}


@pytest.fixture
def _two_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.3, 0.7])


@pytest.mark.usefixtures("_two_loads")
@pytest.mark.parametrize("bound", ["slo_p95_ms=12", "slo_share=12:0.9"])
def test_a_policy_can_begin_with_a_margin(bound: str) -> None:
    begun, inside = choose(f"smdp:{bound}", SMALL, margin_share=0.5), choose(f"smdp:{bound.replace('12', '6')}", SMALL)
    assert begun.takes_margin
    assert begun.table is not None
    assert inside.table is not None
    assert (begun.slo, begun.promised, begun.margin) == (0.012, 0.012, 0.006)
    assert begun.table.rows == inside.table.rows
    assert begun.parameters == choose(f"smdp:{bound}", SMALL).parameters


@pytest.mark.usefixtures("_two_loads")
@pytest.mark.parametrize("spec", ["smdp:slo_p95_ms=12,policy_form=batch-size", "smdp:slo_mean_ms=12", "greedy"])
def test_policies_without_ages_begin_without_a_margin(spec: str) -> None:
    begun = choose(spec, SMALL, margin_share=0.5)
    assert begun.margin == 0.0
    assert begun.table == choose(spec, SMALL).table


@pytest.mark.usefixtures("_two_loads")
def test_the_margin_of_padded_inputs_is_not_limited_by_the_time_of_the_longest() -> None:
    lines = Profile("lines", (1.0, 1.1), lengths=(1, 1000), length_service_times=((0.001, 1.0), (0.0011, 1.1)))
    begun = choose("smdp:slo_p95_ms=1500", lines, margin_share=0.5)
    assert begun.table is not None
    assert begun.table.bound == {"slo_p95_ms": 750.0}
