"""The simulation of bins with maximum ages of their own."""

from math import inf

import pytest

from benchmarks.support.harness import load_record
from policies.percentile.ages import actions_of_ages
from policies.queue.lookup import ActionRow, lookup
from policies.types import BatchKey, Launch, MaxAges, Request, State, Wait
from research.bin_ages import LARGEST, ByBin, ages_of, bins_of, simulate

AT_ONCE, WHEN_FULL = (MaxAges((0.0, *(age,) * (LARGEST - 1), 0.0)) for age in (0.0, inf))


def test_each_bin_has_a_policy_of_its_own() -> None:
    rows = [ActionRow(1.0, actions_of_ages(ages, LARGEST), None, ages) for ages in (WHEN_FULL, AT_ONCE)]
    policy = ByBin([lookup([row], LARGEST) for row in rows])
    first, second = (policy.decide(State(1.0, (Request(0, 0.5, BatchKey("m", i)),))) for i in (0, 1))
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
    found = load_record("bin_ages")
    ratios = {
        key: policies["maximum ages"]["power_w"] / policies["timeout"]["power_w"]
        for key, policies in found.items()
        if "maximum ages" in policies
    }
    less = {key for key, ratio in ratios.items() if ratio < 0.99}
    assert less == {"0.5 60 2", "0.7 60 2"}
    assert all(ratios[key] > 0.98 for key in less)
    assert all(ratio > 1.02 for key, ratio in ratios.items() if key.endswith(" 3"))
