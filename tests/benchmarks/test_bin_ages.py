"""The simulation of bins with maximum ages of their own."""

from math import inf

import pytest

from benchmarks.bin_ages import BOUNDS, LARGEST, LOADS, ByBin, ages_of, bins_of, simulate
from benchmarks.support.harness import load_record
from policies.rules.lookup import ActionRow, lookup
from policies.smdp.ages import actions_of_ages
from policies.types import Kind, Launch, MaxAges, Request, State, Wait

AT_ONCE, WHEN_FULL = (MaxAges((0.0, *(age,) * (LARGEST - 1), 0.0)) for age in (0.0, inf))


def test_each_bin_has_a_policy_of_its_own() -> None:
    rows = [ActionRow(1.0, actions_of_ages(ages, LARGEST), None, ages) for ages in (WHEN_FULL, AT_ONCE)]
    policy = ByBin([lookup([row], LARGEST) for row in rows])
    first, second = (policy.decide(State(1.0, (Request(0, 0.5, Kind("m", i)),))) for i in (0, 1))
    assert isinstance(first, Wait)
    assert isinstance(second, Launch)


def test_bins_that_wait_until_they_are_full_take_the_least_power() -> None:
    edges = (10.0,)
    parts, rate = bins_of(edges), 0.2
    assert [part.share for part in parts] == pytest.approx([9 / 19, 10 / 19], abs=0.01)
    per_request = sum(part.share * part.profile.service_times[-1] / LARGEST for part in parts)
    _, full = simulate(edges, [WHEN_FULL] * 2, rate, 20_000, 0)
    assert full == pytest.approx(rate * per_request, rel=0.03), "a full batch of each bin takes its mean time"
    _, mixed = simulate(edges, [WHEN_FULL, AT_ONCE], rate, 20_000, 0)
    _, greedy = simulate(edges, [AT_ONCE] * 2, rate, 20_000, 0)
    assert full < mixed < greedy


def test_a_smaller_bound_makes_each_bin_launch_earlier() -> None:
    parts = bins_of((10.0,))
    wide, narrow = (ages_of(parts, 0.2, bound) for bound in (60.0, 45.0))
    assert all(b.max_age[2] < a.max_age[2] for a, b in zip(wide, narrow, strict=True))


def test_the_record_shows_what_the_page_says() -> None:
    power = {
        (*map(float, key.split()), policy): found["power_w"]
        for key, policies in load_record("bin_ages").items()
        for policy, found in policies.items()
    }
    wide = max(BOUNDS)
    for load in LOADS:
        assert power[load, wide, 2, "maximum ages"] < power[load, wide, 2, "timeout"]
        assert power[load, wide, 3, "maximum ages"] > power[load, wide, 3, "timeout"]
    for load in (0.7, 0.85):
        others = [w for (at, bound, *_), w in power.items() if (at, bound) == (load, wide)]
        assert power[load, wide, 2, "maximum ages"] == min(others)
    assert power[0.3, min(BOUNDS), 2, "maximum ages"] > power[0.3, min(BOUNDS), 2, "timeout"]
