"""Predicted response times: against queueing theory, with lengths, and with neighbours on the device."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from policies.catalog import choose
from policies.planning.prediction import Traffic, predict
from policies.profile import Profile

ONE = Profile("one", (0.01,))
TWO = Profile("two", (0.01, 0.012))
LENGTHS = (10, 100)
PADDED = Profile("padded", (0.05, 0.1), lengths=LENGTHS, length_service_times=((0.01, 0.1), (0.02, 0.2)))


def traffic(profile: Profile, rate: float, spec: str = "greedy", lengths: tuple[float, ...] = ()) -> Traffic:
    return Traffic(choose(spec, profile), profile, rate, lengths)


@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_the_mean_is_that_of_pollaczek_and_khinchine(cv: float) -> None:
    load = 0.6
    ratios = tuple(np.random.default_rng(0).gamma(cv**-2, cv**2, 2000).tolist()) if cv else (1.0,)
    found = predict({"m": replace(traffic(ONE, load / 0.01), ratios=ratios)})["m"]
    assert found.mean == pytest.approx(0.01 * (1.0 + load * (1.0 + cv**2) / 2.0 / (1.0 - load)), rel=0.1)
    assert found.p95 > found.mean
    assert found.batch_size == 1.0


def test_slow_batches_in_a_row_make_a_longer_queue_than_the_same_ones_apart() -> None:
    apart, together = ((0.8, 0.8, 0.8, 1.6) * 50, (0.8,) * 150 + (1.6,) * 50)
    means = [predict({"m": replace(traffic(ONE, 70.0), ratios=ratios)})["m"].mean for ratios in (apart, together)]
    assert means[1] > 1.5 * means[0]


def test_batches_grow_with_the_rate_and_rare_requests_are_served_alone() -> None:
    rare, many = (predict({"m": traffic(TWO, rate)})["m"] for rate in (0.1, 140.0))
    assert rare.mean == pytest.approx(0.01, rel=0.02)
    assert rare.batch_size == pytest.approx(1.0, abs=0.02)
    assert many.batch_size > 1.6


def test_a_neighbour_makes_responses_longer() -> None:
    alone = predict({"m": traffic(ONE, 40.0)})["m"]
    beside = predict({"m": traffic(ONE, 40.0), "n": traffic(ONE, 40.0), "idle": traffic(ONE, 0.0)})
    assert set(beside) == {"m", "n"}
    assert beside["m"].mean > 1.5 * alone.mean


@pytest.mark.parametrize("spec", ["auto", "multi-bin:2,inner=greedy", "serial"])
def test_lengths_are_drawn_from_those_that_were_seen(spec: str) -> None:
    short, mixed = (predict({"m": traffic(PADDED, 5.0, spec, lengths)})["m"] for lengths in ((10.0,), (10.0, 100.0)))
    assert short.mean == pytest.approx(0.0103, rel=0.05)
    assert mixed.mean > 4 * short.mean


def test_each_level_has_its_own_figures() -> None:
    """Mean waiting times of the classes of a non-preemptive M/D/1 queue (Cobham): W0 / ((1 - s_(k-1)) (1 - s_k))."""
    load, share = 0.8, 0.25
    one = traffic(ONE, load / 0.01)
    found = predict({"m": replace(one, levels=((share, inf), (1.0 - share, inf)))})["m"]
    residual = load * 0.01 / 2
    first = residual / (1.0 - share * load)
    second = first / (1.0 - load)
    for level, waiting in ((1, first), (2, second)):
        assert found.levels[level][0] == pytest.approx(0.01 + waiting, rel=0.15)
        assert found.levels[level][1] > found.levels[level][0]
    assert found.mean == pytest.approx(share * found.levels[1][0] + (1.0 - share) * found.levels[2][0], rel=0.03)
    assert predict({"m": one})["m"].levels == {}
    never_late = predict({"m": replace(one, levels=((share, inf), (1.0 - share, 0.0)))})["m"]
    assert never_late.levels[2][0] < found.levels[2][0]
    assert never_late.levels[1][0] > found.levels[1][0]


def test_nothing_is_predicted_without_arrivals() -> None:
    assert predict({"m": traffic(ONE, 0.0)}) == {}


def test_a_prediction_changes_no_state_of_the_policy_in_use() -> None:
    used = traffic(PADDED, 5.0, "multi-bin:2,inner=greedy", tuple(np.linspace(10, 100, 50).tolist()))
    before = dict(used.chosen.monitor.rates(1e9))
    predict({"m": used})
    assert dict(used.chosen.monitor.rates(1e9)) == before
    assert used.chosen.bins is not None
    assert used.chosen.bins.sizes == []
