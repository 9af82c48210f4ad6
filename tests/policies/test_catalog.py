import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from policies.catalog import choose, combine, ignored_keys, in_stages, solved, solved_again
from policies.objectives.table import save_table, solve_table
from policies.profile import Profile, load_profile
from policies.queue.batcher import Batcher
from policies.queue.lookup import Lookup
from policies.queue.monitor import NoMonitor
from policies.rules.co_located import CoLocated
from policies.rules.control_limit import ControlLimit, static
from policies.rules.max_under_deadline import MaxUnderDeadline
from policies.rules.maximum_wait import MaximumWait
from policies.rules.per_kind import PerKind
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.traits import ActionTable
from policies.types import BatchKey, Launch, Request, SpecError, State, Wait

P4 = load_profile("googlenet-tesla-p4")
B = P4.max_batch_size


@pytest.fixture
def few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve tables for five loads instead of 49, and those for multiples of w2 for fewer loads, too."""
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: [0.02, 0.3, 0.5, 0.7, 0.9])
    monkeypatch.setattr("policies.objectives.solving._STEP", 2.5)


def solve_for(loads: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.objectives.solving.default_loads", lambda: loads)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("greedy", ControlLimit(1, B)),
        ("serial", ControlLimit(1, 1)),
        ("static:8", ControlLimit(8, 8)),
        ("timeout:2.5", ControlLimit(B, B, 0.0025)),
        ("timeout: 2.5 , max_wait_ms=1000", ControlLimit(B, B, 0.0025)),
        ("max-under-deadline:slo_ms=100", MaxUnderDeadline(P4.service_times)),
    ],
)
def test_a_spec_builds_its_policy_with_a_maximum_wait(text: str, inner: object) -> None:
    assert choose(text, P4).policy == MaximumWait(inner, B, 1.0)  # type: ignore[arg-type]


def test_an_infinite_max_wait_leaves_the_policy_untouched() -> None:
    assert choose("static:8,max_wait_ms=inf", P4).policy == static(8)
    assert choose("static:8", P4, max_wait=inf).policy == static(8)
    assert choose("greedy,max_wait_ms=5", P4).policy == MaximumWait(ControlLimit(1, B), B, 0.005)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clever", "unknown policy 'clever'"),
        ("", "unknown policy ''"),
        ("static", "static:VALUE"),
        ("static:0", "below 1"),
        ("static:33", r"within 1\.\.32"),
        ("static:2.5", "not a whole number"),
        ("static:eight", "'eight' is not a number"),
        ("static:nan", "below 1"),
        ("static:inf", r"within 1\.\.32"),
        ("smdp:w2=1,w2=2", "twice"),
        ("smdp:w2=1e308", "0 to 1e"),
        ("timeout:-1", "below 0"),
        ("greedy:3", "takes no argument '3'"),
        ("greedy:limit=3", "unknown key 'limit'"),
        ("smdp:w2=-1", "below 0"),
        ("smdp:w2=x", "'x' is not a number"),
        ("max-under-deadline", "slo_ms=VALUE"),
        ("lazy", "lazy:slo_ms=VALUE"),
        ("lazy:slack=oracle", "lazy:slo_ms=VALUE"),
        ("lazy:slo_ms=-1", "below 0"),
        ("lazy:slo_ms=100,slack=none", "unknown slack 'none'; give printed, remaining, oracle"),
        ("smdp:w2", "w2 has no value; write smdp:w2=VALUE"),
        ("lazy:100", "takes no argument '100'"),
        ("catch-up", "catch-up:slo_ms=VALUE"),
        ("catch-up:slo_ms=100,slack=oracle", "unknown key 'slack'"),
        ("greedy:max_wait_ms=soon", "'soon' is not a number"),
        ("nowhere.json", "no policy file"),
        ("multi-bin", "multi-bin:VALUE"),
        ("multi-bin:0", "below 1"),
        ("multi-bin:99", r"within 1\.\.64"),
        ("multi-bin:2,batch_size=33", r"within 1\.\.32"),
        ("multi-bin:2,batch_size=8,inner=static:9", r"within 1\.\.8"),
        ("multi-bin:2,edges=even", "'even'; give optimised or equal"),
        ("multi-bin:2,inner=clever", "unknown policy 'clever'"),
        ("multi-bin:2,inner=lazy", "lazy cannot be used within a bin"),
        ("multi-bin:2,inner=multi-bin:2", "multi-bin cannot be used within a bin"),
        ("multi-bin:2,inner= /nowhere/table.json:3", "/nowhere/table.json cannot be used within a bin"),
        ("joining", "unknown policy 'joining': choose one of greedy"),
        ("lazy:slo_ms=100,timesteps=3", "unknown key 'timesteps'"),
    ],
)
def test_an_unusable_spec_is_an_error_of_one_line(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        choose(text, P4)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("few_tables")
def test_a_profile_without_energies_weighs_busy_time() -> None:
    busy = replace(P4, energies=None)
    fastest, saving = (choose(f"smdp:w2={w2}", busy).table for w2 in (0, 30))
    assert fastest is not None
    assert saving is not None
    assert saving.resource == "busy_time"
    assert (saving.rows[-1].mean_power or 0.0) < (fastest.rows[-1].mean_power or 0.0)


@pytest.mark.usefixtures("few_tables")
def test_flags_fill_keys_that_the_spec_leaves_open_and_a_conflict_is_an_error() -> None:
    assert choose("smdp", P4, {"w2": "1.6"}).parameters["w2"] == "1.6"
    assert choose("greedy", P4, {"w2": "1.6"}).name == "greedy"
    assert choose("smdp:w2=1.60", P4, {"w2": "1.6"}).parameters["w2"] == "1.60", "compared as numbers, not as text"
    message = r"w2=2, but --w2 is 1; give one: leave w2 out .*, or start the server without --w2 .* such as smdp:w2=1, "
    with pytest.raises(SpecError, match=message):
        choose("smdp:w2=2", P4, {"w2": "1.0"})


def test_only_a_spec_that_names_an_slo_has_one() -> None:
    assert choose("greedy", P4).slo == inf
    assert choose("max-under-deadline:slo_ms=100", P4).slo == pytest.approx(0.1)


@pytest.mark.usefixtures("few_loads")
def test_the_objective_is_that_of_the_spec_else_the_promised_one_and_survives_solving_again() -> None:
    small = P4.truncated(8)
    started = choose("smdp", small, {"slo_p95_ms": "20"})
    assert (started.slo, started.promised, started.objective) == (0.02, 0.02, 0.02)
    greedy = replace(choose("greedy", small, started.defaults), promised=started.promised)
    assert (greedy.slo, greedy.objective) == (inf, 0.02)
    assert solved_again(greedy, small).objective == 0.02
    assert replace(choose("lazy:slo_ms=50", small), promised=0.02).objective == 0.05


def test_a_policy_file_that_was_solved_for_a_percentile_has_it_as_its_objective(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for bound, objective in (({"slo_p95_ms": 20.0}, 0.02), ({"slo_mean_ms": 20.0}, inf), ({"slo_p95_ms": "x"}, inf)):
        save_table(solve_table(Problem(P4, 1.0), [0.3], bound=bound), path)
        assert choose(str(path), P4).slo == objective


@pytest.mark.parametrize(
    ("spec", "ignored"),
    [
        ("smdp", set()),
        ("auto", set()),
        ("greedy", {"w2", "slo_p95_ms"}),
        ("lazy:slo_ms=50", {"w2", "slo_p95_ms"}),
        ("policy.json", {"w2", "slo_p95_ms"}),
        ("multi-bin:2", {"w2", "slo_p95_ms"}),
        ("multi-bin:2,inner=static:4", {"w2", "slo_p95_ms"}),
        ("multi-bin:2,inner=smdp", set()),
    ],
)
def test_keys_that_neither_a_policy_nor_the_one_within_its_bins_takes_are_ignored(spec: str, ignored: set[str]) -> None:
    assert ignored_keys(spec, {"w2", "slo_p95_ms"}) == ignored


def test_auto_and_smdp_are_tables_over_49_loads() -> None:
    chosen = choose("auto", P4)
    assert chosen.table is not None
    assert [row.load for row in chosen.table.rows] == pytest.approx([0.02 * n for n in range(1, 50)])


@pytest.mark.parametrize("spec", ["smdp", "smdp:w2=50", "auto"])
@pytest.mark.parametrize("largest", [1, 4, 8, 32])
@pytest.mark.parametrize("silence", [None, 3600.0])
def test_a_lone_request_is_launched_at_once_as_the_first_one_and_after_silence(
    spec: str, largest: int, silence: float | None
) -> None:
    profile = P4.truncated(largest)
    chosen = choose(spec, profile)
    if silence is not None:
        for n in range(100):
            chosen.monitor.arrive(BatchKey("m"), 1e-3 * n)
    now = 10.0 + (silence or 0.0)
    batcher = Batcher(chosen.policy, {"m": largest}, chosen.monitor)
    batcher.arrive(Request(0, now, BatchKey("m")))
    assert isinstance(batcher.decide(now), Launch)


@pytest.mark.usefixtures("few_tables")
def test_devices_with_the_same_profile_share_a_table_and_others_have_their_own() -> None:
    table = choose("smdp:w2=3", P4).table
    assert choose("smdp:w2=3", replace(P4)).table is table
    faster = replace(P4, service_times=tuple(time / 2 for time in P4.service_times))
    assert choose("smdp:w2=3", faster).table != table


def test_only_a_table_solved_for_a_weight_is_weighted_by_the_mean_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve_for([0.02, 0.5, 0.9], monkeypatch)
    path = tmp_path / "p.json"
    save_table(solve_table(Problem(P4, 1.0, w2=1.0), [0.3, 0.7]), path)
    for spec in (str(path), "smdp:w2=0", "auto", "smdp:slo_mean_ms=8"):
        policy = choose(f"{spec}{',' if ':' in spec or spec == str(path) else ':'}max_wait_ms=inf", P4).policy
        assert isinstance(policy, Lookup)
        assert not policy.weightings, spec
    file = solved_again(choose(f"{path},max_wait_ms=inf", P4), P4).policy
    assert isinstance(file, Lookup)
    assert not file.weightings
    chosen = choose("auto:w2=2,max_wait_ms=inf", P4)
    for policy in (chosen.policy, solved_again(chosen, P4).policy):
        assert isinstance(policy, Lookup)
        assert [w.factor for w in policy.weightings] == [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
        assert all(w.rows[0].arrival_rate == pytest.approx(0.02 * P4.capacity) for w in policy.weightings)
        row = policy.weightings[4].rows[-1]
        assert row.batch_size == solve(Problem(P4, row.arrival_rate, w2=4.0)).batch_size


def test_a_policy_file_is_loaded_and_one_for_larger_batches_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_table(solve_table(Problem(P4, 1.0, w2=1.0), [0.3, 0.7]), path)
    chosen = choose(f"{path},max_wait_ms=inf", P4)
    assert isinstance(chosen.policy, Lookup)
    assert chosen.name == "file"
    with pytest.raises(SpecError, match="above the maximum 8"):
        choose(str(path), P4.truncated(8))
    path.write_text(json.dumps({"schema": "other"}))
    with pytest.raises(SpecError, match="malformed"):
        choose(str(path), P4)


@pytest.mark.parametrize(
    ("spec", "table"),
    [
        ("greedy", (0, *range(1, 33))),
        ("static:2", (0, 0, 2)),
        ("serial", (0, 1)),
        ("rate-matching", (0, 0, 2, 3, 4, 5, *range(6, 33))),
    ],
)
def test_a_policy_of_the_queue_length_alone_has_a_table(spec: str, table: tuple[int, ...]) -> None:
    rate = 1.5 / P4.service_time(1) if spec == "rate-matching" else 100.0  # needs l(2) <= 2 / rate: 1.25 <= 1.81 ms
    found = choose(spec, P4, max_wait=inf).action_table(rate)
    assert found is not None
    assert found.batch_size[: len(table)] == table
    assert found.mix is None


@pytest.mark.parametrize(
    "spec",
    [
        *("timeout:5", "max-under-deadline:slo_ms=9", "static:2"),
        *("lazy:slo_ms=50", "catch-up:slo_ms=50"),
    ],
)
def test_a_policy_that_depends_on_waiting_times_has_no_table(spec: str) -> None:
    assert choose(spec, P4, max_wait=1.0).action_table(100.0) is None


@pytest.mark.usefixtures("few_tables")
def test_a_solved_table_acts_by_its_row_nearest_in_rate() -> None:
    chosen = choose("smdp:w2=1.6", P4, max_wait=inf)
    assert chosen.table is not None
    assert chosen.action_table(0.7 * P4.capacity) == ActionTable(chosen.table.rows[3].batch_size, 32)
    assert chosen.action_table(0.001 * P4.capacity) == ActionTable((0, *range(1, 33)), 32)
    again = solved(chosen.table.rows[3].batch_size, P4)
    assert again.action_table(123.0) == ActionTable(chosen.table.rows[3].batch_size, 32)


def test_models_of_one_device_keep_their_own_policies_and_monitors() -> None:
    policy, monitor = combine({"a": choose("greedy", P4), "b": replace(choose("static:4", P4), monitor=NoMonitor())})
    assert isinstance(policy, PerKind)
    monitor.arrive(BatchKey("a"), 0.5)
    monitor.arrive(BatchKey("b"), 0.5)
    assert set(monitor.rates(0.6)) == {BatchKey("a")}


def test_models_by_stages_share_one_policy_and_the_others_keep_their_own() -> None:
    lazy, pays, greedy = choose("lazy:slo_ms=50", P4), choose("catch-up:slo_ms=90", P4), choose("greedy", P4)
    assert combine({"a": lazy})[0] == lazy.policy
    assert combine({"a": lazy, "b": pays})[0] == CoLocated({"a": lazy.policy, "b": pays.policy})  # type: ignore[dict-item]
    policy, _ = combine({"a": lazy, "b": pays, "c": greedy})
    assert isinstance(policy, PerKind)
    assert policy.together == {"a", "b"}
    tight = Request(0, 0.5, BatchKey("b"), deadline=0.52)
    queue = [Request(1, 0.4, BatchKey("a"), deadline=0.6), tight, Request(2, 0.45, BatchKey("c"))]
    action = policy.decide(State(1.0, queue))
    assert isinstance(action, Launch)
    assert [r.id for r in action.requests] == [2], "formed before the one of least slack among the models by stages"
    action = policy.decide(State(1.0, queue[:2]))
    assert isinstance(action, Launch)
    assert action.requests == [tight]


@pytest.mark.usefixtures("few_loads")
@pytest.mark.parametrize(
    ("spec", "first"), [("smdp", "b"), ("smdp:slo_p95_ms=300", "a"), ("max-under-deadline:slo_ms=1", "a")]
)
def test_if_a_model_has_an_objective_the_batch_formed_first_is_first(spec: str, first: str) -> None:
    policy, _ = combine({"a": choose(spec, P4), "b": choose("greedy", P4)})
    queue = [Request(0, 0.4, BatchKey("a"), deadline=0.41), *(Request(n, 0.5, BatchKey("b")) for n in (1, 2, 3))]
    action = policy.decide(State(1.0, queue, rates={BatchKey("a"): 0.0, BatchKey("b"): 0.0}))
    assert isinstance(action, Launch)
    assert action.requests[0].kind.model == first


@pytest.mark.usefixtures("few_loads")
@pytest.mark.parametrize(
    ("spec", "uses"),
    [("smdp", True), ("smdp:w2=2,max_wait_ms=inf", True), ("smdp:slo_mean_ms=50", False), ("greedy", False)],
)
def test_tables_for_a_weight_use_the_slowdown_by_other_models(spec: str, uses: bool) -> None:
    assert choose(spec, P4).uses_slowdown == uses


def test_after_a_swap_to_a_policy_without_stages_suspended_requests_are_finished_first() -> None:
    policy, _ = combine({"a": choose("static:4", P4)})
    started = [Request(n, 0.0, BatchKey("a"), stages=4, stage=2) for n in range(2)]
    action = policy.decide(State(0.1, [Request(9, 0.1, BatchKey("a"))], started))
    assert action == Launch(started)
    assert isinstance(policy.decide(State(0.1, [Request(9, 0.1, BatchKey("a"))])), Wait)


def test_a_simulation_by_stages_has_ten_equal_stages_by_default() -> None:
    staged = P4.in_stages(3)
    assert in_stages("lazy:slo_ms=50", P4).stages == 10
    assert in_stages("catch-up:slo_ms=50", staged) is staged
    assert in_stages("lazy:slo_ms=50", staged, 4).stages == 4
    assert in_stages("greedy", P4) is P4


def test_a_bound_chooses_a_row_for_each_rate_and_the_nearest_where_none_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve_for([0.02, 0.1, 0.3, 0.5, 0.7, 0.84, 0.98], monkeypatch)
    chosen = choose("smdp:slo_mean_ms=8,max_wait_ms=inf", P4)
    assert chosen.table is not None
    assert chosen.table.bound == {"slo_mean_ms": 8.0}
    times = [row.mean_response_time or inf for row in chosen.table.rows]
    assert times[:-1] == pytest.approx([0.008] * 6)  # up to load 0.84
    assert times[-1] > 0.019
    found = chosen.action_table(0.5 * P4.capacity)
    assert found is not None
    assert found.mix is not None


def test_a_percentile_in_the_spec_is_the_deadline_too() -> None:
    bare = Profile("bare", P4.service_times[:4])  # without energies every weight is the same
    chosen = choose("smdp:slo_p95_ms=20", bare)
    assert chosen.slo == 0.020
    assert chosen.table is not None
    assert {row.w2 for row in chosen.table.rows} == {0.0}


@pytest.mark.parametrize(("fixed", "waits"), [(1e-4, False), (1e-3, True)])
def test_no_request_waits_for_a_percentile_where_the_fixed_time_of_a_batch_is_small(
    fixed: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve_for([0.3, 0.5], monkeypatch)
    chosen = choose(
        "smdp:slo_p95_ms=60", Profile("a long time a request", tuple(fixed + 0.01 * b for b in range(1, 9)))
    )
    assert chosen.table is not None
    found = {max(row.max_ages.max_age) > 0.0 for row in chosen.table.rows if row.max_ages}
    assert found == {waits}


@pytest.mark.parametrize("spec", ["smdp:w2=1,slo_mean_ms=8", "smdp:slo_mean_ms=8,power_cap_w=40"])
def test_a_spec_gives_one_weight_or_one_bound(spec: str) -> None:
    with pytest.raises(SpecError, match="give one of them"):
        choose(spec, P4)


def test_a_weight_beside_a_bound_of_the_command_line_names_the_flag() -> None:
    message = r"'smdp:w2=1' has w2=1, but --slo-p95-ms is 20; give one: leave w2 out .* such as smdp:slo_p95_ms=20, "
    with pytest.raises(SpecError, match=message):
        choose("smdp:w2=1", P4, {"slo_p95_ms": "20"})
    with pytest.raises(SpecError, match="sets w2 and slo_p95_ms; give one of them"):
        choose("smdp", P4, {"w2": "1", "slo_p95_ms": "20"})


@pytest.mark.usefixtures("few_tables")
def test_solved_again_on_a_slower_device_each_load_keeps_its_weight() -> None:
    slower = replace(P4, service_times=tuple(1.5 * t for t in P4.service_times))
    before = choose("smdp:w2=1.6", P4)
    again = solved_again(before, slower)
    assert before.table is not None
    assert again.table is not None
    assert [row.load for row in again.table.rows] == pytest.approx([row.load for row in before.table.rows])
    assert {row.w2 for row in again.table.rows} == {1.6}
    assert again.table.rows[2].batch_size == choose("smdp:w2=1.6", slower).table.rows[2].batch_size  # type: ignore[union-attr]
    assert solved_again(choose("rate-matching", P4), slower).policy != choose("rate-matching", P4).policy


@pytest.mark.usefixtures("few_loads")
def test_solved_again_for_a_percentile_each_load_keeps_its_weight_times_the_factor() -> None:
    small = P4.truncated(8)
    before, half = choose("smdp:slo_p95_ms=12", small), 0.5
    again = solved_again(before, small, half)
    assert before.table is not None
    assert again.table is not None
    assert [row.w2 for row in again.table.rows] == pytest.approx([half * row.w2 for row in before.table.rows])
    assert again.table.bound == {"slo_p95_ms": 12.0}
    assert again.slo == 0.012


def test_solved_again_other_bounds_hold_on_the_new_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_for([0.1, 0.32, 0.36, 0.4, 0.7, 0.98], monkeypatch)
    dearer = replace(P4, energies=tuple(1.5 * e for e in P4.energies or ()))
    again = solved_again(choose("smdp:power_cap_w=40", P4), dearer)
    assert again.table is not None
    powers = [row.mean_power or inf for row in again.table.rows]
    assert powers[1:4] == pytest.approx([40.0] * 3)  # loads 0.32 to 0.4, where the cap binds and can be kept


def test_a_files_table_is_kept_on_another_device(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    save_table(solve_table(Problem(P4, 1.0, w2=1.0, max_batch_size=8), [0.3]), path)
    before = choose(str(path), P4)
    again = solved_again(before, replace(P4, service_times=tuple(2 * t for t in P4.service_times)))
    assert again.policy == before.policy
    assert again.profile is not before.profile


def test_a_file_is_an_error_on_a_device_with_smaller_batches(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    save_table(solve_table(Problem(P4, 1.0, w2=1.0, max_batch_size=8), [0.3]), path)
    with pytest.raises(SpecError, match="launches batches of 8, above the maximum 4"):
        solved_again(choose(str(path), P4), P4.truncated(4))
