"""Length-aware batching: which requests share a batch, against all runs of neighbours, and in simulation."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.catalog import choose, solved_again
from policies.planning.prediction import Traffic, predict
from policies.planning.simulation import RequestSizes, Simulation
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.queue.lookup import ActionRow, Lookup, lookup
from policies.sizing.length_aware import length_aware
from policies.types import BatchKey, Launch, MaxAges, Request, State, Wait

LENGTHS = (8, 32, 64, 128, 256)


def padded(fixed: float, each: float, per_batch: float = 0.0, largest: int = 8) -> Profile:
    """Batches take `fixed` + `each` b L + `per_batch` L, s, with L the longest length."""
    rows = tuple(tuple(fixed + each * b * n + per_batch * n for n in LENGTHS) for b in range(1, largest + 1))
    return Profile("p", tuple(row[2] for row in rows), lengths=LENGTHS, length_service_times=rows)


def launched(profile: Profile, lengths: list[float], rate: float = 0.0) -> list[int]:
    """Positions in the queue of the requests of the batch."""
    requests = [
        Request(n, float(n), BatchKey("m"), size=profile.service_time(1, length)) for n, length in enumerate(lengths)
    ]
    action = length_aware(profile).decide(State(99.0, requests, rates={BatchKey("m"): rate}))
    assert isinstance(action, Launch)
    return [request.id for request in action.requests]


PROFILES = (padded(0.002, 0.0001), padded(0.0, 0.0001), padded(0.004, 0.00001, 0.0001), padded(0.05, 0.0001, 0.0, 3))


@pytest.mark.parametrize("profile", PROFILES, ids=["some gain", "no gain", "much gain", "three at most"])
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_the_run_that_saves_most_in_its_time_around_the_oldest_request_is_launched(
    profile: Profile, lengths: list[int]
) -> None:
    batch = launched(profile, [*map(float, lengths)])
    assert 0 in batch
    assert all(one < other for one, other in pairwise(batch)), "in order of arrival"
    alone = [profile.service_time(1, float(length)) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda n: alone[n])

    def gain(run: list[int]) -> float:
        one_by_one = sum((len(lengths) - i) * alone[n] for i, n in enumerate(run))
        return one_by_one / profile.service_time(len(run), max(float(lengths[n]) for n in run)) - len(lengths)

    runs = [order[i : i + b] for b in range(1, profile.max_batch_size + 1) for i in range(len(order) - b + 1)]
    best, nearly = max(gain(run) for run in runs if 0 in run), 0.0101 * len(lengths)
    assert gain(sorted(batch, key=lambda n: alone[n])) >= best - nearly
    smaller = [gain(run) for run in runs if 0 in run and len(run) < len(batch)]
    assert all(each < best - 0.98 * nearly for each in smaller), "a smaller batch that saves as much wins"


def test_a_small_gain_is_taken_only_for_a_long_queue_or_much_traffic() -> None:
    profile = padded(0.002, 0.0001)  # two of length 64 take 1.76 times as long as one
    assert launched(profile, [64.0, 64.0]) == [0]
    assert launched(profile, [64.0] * 8) == [0, 1], "so that the first answers are not as late as the last"
    assert launched(profile, [64.0, 64.0], rate=100.0) == [0, 1]


def test_without_a_gain_one_at_a_time_and_with_a_large_one_all() -> None:
    assert launched(PROFILES[1], [100.0, 100.0, 100.0]) == [0]
    assert launched(PROFILES[3], [8.0, 16.0, 12.0]) == [0, 1, 2]


def test_a_short_request_does_not_wait_for_a_long_one_in_its_batch() -> None:
    assert launched(PROFILES[0], [8.0, 256.0, 10.0]) == [0, 2]


def test_a_profile_without_lengths_and_one_with_a_single_length_are_served() -> None:
    linear = Profile("p", tuple(0.01 * b for b in range(1, 5)))
    assert launched(linear, [1.0] * 3) == [0]
    single = Profile("p", (0.01, 0.011), lengths=(4,), length_service_times=((0.01,), (0.011,)))
    assert launched(single, [4.0, 9.0, 2.0]) == [0, 1]


def test_a_deep_queue_is_served_from_its_oldest_request_on() -> None:
    assert 0 in launched(PROFILES[0], [float(8 + n % 250) for n in range(2000)])


def test_auto_serves_padded_inputs_where_greedy_diverges() -> None:
    profile, rng = padded(0.002, 0.0001, largest=32), np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(np.log(48), 0.8, 4000)), 4, 256).astype(int)
    capacity = 1.0 / float(np.mean([profile.service_time(1, float(n)) for n in lengths]))
    instants = poisson(0.75 * capacity, 3000 / capacity, np.random.default_rng(2))
    sizes = RequestSizes(lengths[: len(instants)])
    mean = {
        spec: float(np.mean(Simulation(profile, spec, sizes=sizes).run(instants).responses))
        for spec in ("serial", "greedy", "smdp", "auto", "multi-bin:2,inner=greedy")
    }
    assert mean["auto"] < min(mean["serial"], mean["multi-bin:2,inner=greedy"])
    assert mean["greedy"] > 10 * mean["auto"], "it forms batches that take longer"
    assert mean["auto"] < mean["smdp"] < 1.5 * mean["auto"], (
        "it knows the times of mixed batches, but not which requests wait"
    )


def test_auto_with_a_goal_and_for_inputs_of_one_length_is_the_solved_table() -> None:
    assert choose("auto", PROFILES[0]).table is None
    bounded = choose("auto", PROFILES[0], {"slo_p95_ms": "500"})
    assert bounded.table is not None
    for policy in (bounded.unbounded, solved_again(bounded, PROFILES[0], margin=0.1, arrival_rate=50.0).unbounded):
        assert isinstance(policy, Lookup)
        assert policy.similar is not None
    assert choose("auto", Profile("p", (0.01, 0.012))).table is not None


@pytest.mark.parametrize(
    ("lengths", "largest", "batch"),
    [
        ((8.0, 256.0, 10.0, 256.0), None, [0, 2]),
        ((64.0,) * 4, None, [0, 1, 2, 3]),  # sharing saves, however long it takes
        ((256.0,) * 4, 1, [0]),  # a larger batch would take longer than the row allows,
        ((8.0, 256.0, 10.0, 256.0), 1, [0, 2]),  # and this one does not
    ],
)
def test_a_solved_table_says_when_and_similar_lengths_who(
    lengths: tuple[float, ...], largest: int | None, batch: list[int]
) -> None:
    ages = MaxAges((0.0, 0.010, 0.004), max_batch_size=largest)
    policy = replace(lookup([ActionRow(100.0, (0, 1), None, ages)], 8), similar=length_aware(PROFILES[0]))
    waiting = [Request(n, 1.0, size=PROFILES[0].service_time(1, length)) for n, length in enumerate(lengths)]
    assert policy.decide(State(1.001, waiting)) == Wait(1.004)
    action = policy.decide(State(1.004, waiting))
    assert isinstance(action, Launch)
    assert [request.id for request in action.requests] == batch


def test_a_bound_is_kept_at_rates_where_mixed_lengths_would_be_late() -> None:
    profile = padded(0.005, 0.00006, 0.00014)
    lengths = tuple(np.clip(np.random.default_rng(0).lognormal(4.0, 1.0, 500), 5, 256).tolist())
    solved = choose("smdp:slo_p95_ms=120,max_wait_ms=inf", profile)
    policy = solved.policy
    assert isinstance(policy, Lookup)
    both = solved, replace(solved, policy=replace(policy, similar=None))
    similar, mixed = (predict({"m": Traffic(each, profile, 44.0, lengths)})["m"].within for each in both)
    assert similar > 0.95 > mixed
