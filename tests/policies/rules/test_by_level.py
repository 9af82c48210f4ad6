"""Policies that know priority levels, and how their specs are read."""

import numpy as np
import pytest

from policies.catalog import check_spec, choose, solved_again
from policies.planning.reachability import objective_warnings
from policies.profile import Profile
from policies.queue.monitor import LevelShares
from policies.rules import by_level
from policies.rules.by_level import LimitedBulk, SmdpLevels, parse_weights
from policies.rules.maximum_wait import MaximumWait
from policies.solver.levels import LevelSolution
from policies.types import BatchKey, Launch, Request, SpecError, State, Wait

M, WEIGHTS = BatchKey("m"), {"priority_weights": "8:1"}
PROFILE = Profile("p", tuple(0.010 + 0.002 * b for b in range(1, 17)), energies=tuple(1.0 + b for b in range(1, 17)))


def state(levels: list[int], rate: float | None = None, share: float = 0.5) -> State:
    waiting = [Request(i, float(i), M, level=level) for i, level in enumerate(levels)]
    rates = {} if rate is None else {M: rate}
    return State(100.0, waiting, rates=rates, level_shares={"m": (share, 1.0 - share)})


def solution(sizes: list[list[int]]) -> LevelSolution:
    return LevelSolution(np.array(sizes), 0.0, (0.0, 0.0), 0.0, 1)


TABLES = SmdpLevels(
    (2.0, 6.0), (solution([[0, 0, 2], [1, 2, 3], [2, 3, 4]]), solution([[0, 1, 2], [1, 2, 3], [2, 3, 4]])), 4
)


@pytest.mark.parametrize(
    ("levels", "rate", "size"),
    [
        ([2], 2.0, 0),  # bulk waits for the first level
        ([1], 2.0, 1),
        ([2], 5.0, 1),  # the row of the nearest rate
        ([1, 2, 2], 2.0, 3),
        ([1, 2, 2, 2, 2], None, 3),  # longer queues count as the longest
        ([2], 0.5, 1),  # greedy
    ],
)
def test_as_many_are_launched_as_the_table_says(levels: list[int], rate: float | None, size: int) -> None:
    action = TABLES.decide(state(levels, rate))
    if size:
        assert isinstance(action, Launch)
        assert [request.id for request in action.requests] == list(range(size))
    else:
        assert action == Wait(100.0 + 3.0 / 2.0)


LIMITED = LimitedBulk((10.0, 20.0), (6, 3), 8)


@pytest.mark.parametrize(
    ("first", "bulk", "rate", "size"),
    [
        (0, 9, 2.0, 6),
        (2, 9, 2.0, 6),
        (0, 9, 22.0, 3),  # the first level has 11/s, so that the row of 20/s holds
        (0, 2, 22.0, 2),
        (5, 9, 22.0, 5),  # batches of the first level alone are as large as they come
        (9, 9, 2.0, 8),
        (1, 0, 2.0, 1),
        (0, 9, 500.0, 3),
    ],
)
def test_batches_with_bulk_are_limited(first: int, bulk: int, rate: float, size: int) -> None:
    action = LIMITED.decide(state([1] * first + [2] * bulk, rate))
    assert isinstance(action, Launch)
    assert len(action.requests) == size


def test_weights_are_parsed() -> None:
    assert parse_weights("8,1") == (8.0, 1.0)
    assert parse_weights("16:4:0", ":") == (16.0, 4.0, 0.0)


@pytest.mark.parametrize("text", ["8", "1,8", "8,x", "8,-1", "", "9,8,7,6,5,4,3,2,1", "nan,1", "inf,1"])
def test_malformed_weights_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"priority weights .* give 2 to 8 numbers of at least 0, the greatest first"):
        parse_weights(text)


def test_a_percentile_is_kept_by_limited_batches_of_bulk() -> None:
    chosen = choose("smdp:slo_p95_ms=60", PROFILE, WEIGHTS)
    assert isinstance(chosen.policy, MaximumWait)
    policy = chosen.policy.inner
    assert isinstance(policy, LimitedBulk)
    assert chosen.slo == 0.06
    assert list(policy.limits) == sorted(policy.limits, reverse=True)
    assert 1 < policy.limits[0] < 16
    tighter = solved_again(chosen, PROFILE, margin=0.02)
    assert isinstance(tighter.policy, MaximumWait)
    assert isinstance(tighter.policy.inner, LimitedBulk)
    assert tighter.policy.inner.limits[0] < policy.limits[0]
    assert (tighter.slo, tighter.margin) == (0.06, 0.02)


def test_without_a_percentile_tables_are_solved_once_the_shares_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_level, "_LOADS", (0.5,))
    small = PROFILE.truncated(4)
    chosen = choose("auto", small, WEIGHTS)
    shares = LevelShares(2)
    for i in range(600):
        assert bool(chosen.unsolved_shares(shares)) == (i >= 512)
        shares.arrive(1 if i % 4 == 0 else 2)
    solved = chosen.with_solved_shares(chosen.unsolved_shares(shares))
    assert isinstance(solved.policy, MaximumWait)
    assert isinstance(solved.policy.inner, SmdpLevels)
    assert solved.solved_shares[0] == pytest.approx(0.25, abs=0.01)
    assert not solved.unsolved_shares(shares), "the shares have not changed"
    for _ in range(600):
        shares.arrive(1)
    assert solved.unsolved_shares(shares)
    again = solved_again(solved, small)
    assert again.solved_shares == solved.solved_shares
    assert isinstance(again.policy, MaximumWait)
    assert isinstance(again.policy.inner, SmdpLevels)


@pytest.mark.parametrize(
    ("spec", "weights", "message"),
    [
        ("smdp:slo_mean_ms=50", "8:1", "slo_mean_ms cannot be kept with priority weights"),
        ("smdp", "1:8", "give 2 to 8 numbers of at least 0, the greatest first, such as 8:1"),
        ("smdp:priority_weights=8:1", "8:1", "priority_weights are those of a model"),
    ],
)
def test_malformed_specs_are_refused(spec: str, weights: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_spec(spec, 8, {"priority_weights": weights})


def test_a_percentile_beside_bulk_knows_the_lengths_of_padded_inputs() -> None:
    lengths = (10, 20, 40)
    times = tuple(tuple(0.004 + 0.0005 * b * length for length in lengths) for b in range(1, 9))
    padded = Profile("padded", tuple(row[0] for row in times), lengths=lengths, length_service_times=times)
    chosen = choose("auto:slo_p95_ms=150", padded, WEIGHTS)
    short = chosen.with_solved_sizes([padded.time_alone(10.0)] * 300)
    assert isinstance(chosen.policy, MaximumWait)
    assert isinstance(short.policy, MaximumWait)
    before, after = chosen.policy.inner, short.policy.inner
    assert isinstance(before, LimitedBulk)
    assert isinstance(after, LimitedBulk)
    assert after.limits[0] > before.limits[0]


def test_a_bound_that_cannot_be_kept_beside_bulk_is_named() -> None:
    (warning,) = objective_warnings(choose("smdp:slo_p95_ms=15", PROFILE, WEIGHTS))
    assert warning.startswith(
        "the objective of level 1, 95% within 15 ms, cannot be kept beside other levels at any rate"
    )
    (warning,) = objective_warnings(choose("smdp:slo_p95_ms=40", PROFILE, WEIGHTS))
    assert "cannot be kept beside other levels above" in warning
    assert objective_warnings(choose("smdp:slo_p95_ms=400", PROFILE, WEIGHTS)) == []
