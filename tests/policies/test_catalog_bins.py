"""Specs with bins."""

from dataclasses import replace
from pathlib import Path

import pytest

from policies.catalog import check_spec, choose, combine, in_stages, solved_again
from policies.objectives.table import save_table, solve_table
from policies.profile import load_profile
from policies.rules.control_limit import ControlLimit, static
from policies.rules.maximum_wait import MaximumWait
from policies.solver.model import Problem
from policies.types import BatchKey, Launch, Request, SpecError, State

P4 = load_profile("googlenet-tesla-p4")
B = P4.max_batch_size
BY_LENGTH = replace(P4, lengths=(0, 1), length_service_times=((0.0, 1.0),) * B)


def test_flags_fill_keys_that_the_policy_within_bins_leaves_open() -> None:
    filled, named = choose("multi-bin:2,inner=smdp", P4, {"w2": "1.6"}), choose("multi-bin:2,inner=smdp:w2=1.6", P4)
    assert filled.policy == named.policy != choose("multi-bin:2,inner=smdp", P4).policy
    with pytest.raises(SpecError, match="give one"):
        choose("multi-bin:2,inner=smdp:w2=2", P4, {"w2": "1.6"})
    with pytest.raises(SpecError, match="give one"):
        check_spec("multi-bin:2,inner=smdp:w2=2", B, {"w2": "1.6"})


def test_a_policy_file_cannot_decide_within_a_bin(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    save_table(solve_table(Problem(P4, 1.0), [0.5]), file)
    assert choose(str(file), P4).name == "file"
    with pytest.raises(SpecError, match=r"table\.json cannot be used within a bin"):
        choose(f"multi-bin:2,inner={file}", P4)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("multi-bin:4", MaximumWait(static(B), B, 1.0)),
        ("multi-bin:4,batch_size=8", MaximumWait(static(8), 8, 1.0)),
        ("multi-bin:4,batch_size=8,max_wait_ms=50", MaximumWait(static(8), 8, 0.05)),
        ("multi-bin:4,batch_size=8,max_wait_ms=inf", static(8)),
        ("multi-bin:4,batch_size=8,inner=greedy", MaximumWait(ControlLimit(1, 8), 8, 1.0)),
        ("multi-bin:4,batch_size=8,inner=timeout:20", MaximumWait(ControlLimit(8, 8, 0.02), 8, 1.0)),
    ],
)
def test_bins_take_any_inner_policy_and_static_by_default(text: str, inner: object) -> None:
    chosen = choose(text, BY_LENGTH)
    assert chosen.policy == inner
    assert chosen.bins is not None
    assert chosen.profile is BY_LENGTH, "after a swap another policy may launch larger batches"


def test_bins_are_cut_at_optimised_edges_or_in_equal_parts() -> None:
    sizes = [1.0] * 6 + [2.0] * 3 + [90.0]
    for edges, expected in (("optimised", [90.0]), ("equal", [2.0])):
        chosen = choose(f"multi-bin:2,batch_size=4,edges={edges}", P4)
        assert chosen.bins is not None
        assert list(chosen.bins.with_edges_of(sizes).edges) == expected
    assert choose("greedy", P4).kind("m", 5.0) == BatchKey("m")


def test_a_solved_policy_within_bins_acts_by_each_bins_own_rate() -> None:
    chosen = choose("multi-bin:2,inner=smdp:w2=1.6,max_wait_ms=inf", P4)
    alone = choose("smdp:w2=1.6,max_wait_ms=inf", P4)
    assert chosen.table is None, "its rows are by the rate of one bin, not of all requests"
    for rate in (0.1 * P4.capacity, 0.7 * P4.capacity):
        a, b = BatchKey("m"), BatchKey("m", 1)
        queue = [Request(i, 0.0, a) for i in range(5)]
        own, other = State(0.0, queue, rates={a: rate}), State(0.0, queue, rates={a: rate, b: 0.9 * P4.capacity})
        assert combine({"m": chosen})[0].decide(other) == alone.policy.decide(own)


def test_bins_keep_the_learned_sizes_when_the_profile_changes() -> None:
    chosen = choose("multi-bin:2,batch_size=4", P4)
    again = solved_again(chosen, P4.truncated(16))
    assert again.bins is chosen.bins
    assert again.profile.max_batch_size == 16


def test_no_table_by_queue_length_describes_bins() -> None:
    chosen = choose("multi-bin:2,max_wait_ms=inf", P4)
    assert chosen.action_table(100.0) is None
    assert chosen.fixed_action_table() is None


@pytest.mark.parametrize("text", ["multi-bin:3", "multi-bin:3,inner=smdp:w2=2", "smdp-bins:2"])
def test_a_spec_for_lengths_can_be_checked_without_a_profile(text: str) -> None:
    check_spec(text, 8, has_lengths=True)
    with pytest.raises(SpecError, match="cannot be used within"):
        check_spec("multi-bin:3,inner=catch-up:slo_ms=5", 8)


@pytest.mark.parametrize("spec", ["lazy:slo_ms=100", "catch-up:slo_ms=100"])
def test_a_policy_that_decides_between_stages_needs_a_profile_without_lengths(spec: str) -> None:
    with pytest.raises(SpecError, match=r"service times by length, .*; use greedy or multi-bin"):
        choose(spec, BY_LENGTH)
    with pytest.raises(SpecError, match="use greedy or multi-bin"):
        check_spec(spec, 8, has_lengths=True)
    staged = in_stages(spec, BY_LENGTH)
    assert (staged.stages, staged.lengths) == (10, None), "simulated requests without lengths have stages"
    assert in_stages(spec, BY_LENGTH, 4).stages == 4


def test_after_a_swap_to_bins_suspended_requests_are_finished_kind_by_kind() -> None:
    policy, _ = combine({"m": choose("multi-bin:2", P4)})
    started = [Request(n, 0.0, BatchKey("m", n % 2), stages=4, stage=2) for n in range(4)]
    assert policy.decide(State(0.1, [], started)) == Launch(started[::2])
