"""Padded batches of mixed lengths: mean and variation by batch size, and goals that are solved for them."""

import numpy as np
import pytest

from policies.catalog import choose, solved_again
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.simulator import simulate
from policies.sizing.padded import of_mixed_lengths
from policies.types import BatchKey, Request

LENGTHS = (10, 20, 40, 80)
TIMES = tuple(tuple(0.004 + 0.0005 * b * length for length in LENGTHS) for b in range(1, 9))
PROFILE = Profile("padded", tuple(row[1] for row in TIMES), cvs=(0.1,) * 8, lengths=LENGTHS, length_service_times=TIMES)


def sizes_of(lengths: np.ndarray) -> list[float]:
    return [PROFILE.time_alone(float(length)) for length in lengths]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_mean_and_variation_are_those_of_drawn_batches(size: int) -> None:
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(3.0, 0.6, 4000), 80.0)
    found = of_mixed_lengths(PROFILE, sizes_of(lengths))
    longest = rng.choice(lengths, (20_000, size)).max(axis=1)
    times = np.array([PROFILE.service_time(size, each) for each in longest]) * (1 + 0.1 * rng.standard_normal(20_000))
    assert found.service_time(size) == pytest.approx(times.mean(), rel=0.01)
    assert found.cvs is not None
    assert found.cvs[size - 1] == pytest.approx(times.std() / times.mean(), rel=0.05)
    assert not found.varies_by_length


def test_without_observed_sizes_each_length_of_the_profile_is_as_likely() -> None:
    found = of_mixed_lengths(PROFILE)
    assert found.service_time(1) == pytest.approx(np.mean(TIMES[0]))
    assert found.service_time(8) > 0.9 * TIMES[7][-1], "the longest of eight is nearly always the longest of all"
    plain = PROFILE.without_lengths()
    assert of_mixed_lengths(plain) is plain


def share_within(spec: str, rate: float, lengths: np.ndarray, limit: float) -> float:
    chosen = choose(spec, PROFILE)
    if chosen.solve_for is not None:
        chosen = chosen.with_solved_sizes(sizes_of(lengths[:2000]))
    rng = np.random.default_rng(11)
    instants = np.cumsum(rng.exponential(1.0 / rate, len(lengths)))
    requests = [
        Request(i, at, BatchKey("m"), size=PROFILE.time_alone(length), length=length)
        for i, (at, length) in enumerate(zip(instants.tolist(), lengths.tolist(), strict=True))
    ]
    batcher = Batcher(chosen.policy, {"m": 8}, chosen.monitor)
    within = 0

    def time(launch: object) -> float:
        requests = launch.requests  # type: ignore[attr-defined]
        mean = PROFILE.service_time(len(requests), max(request.length for request in requests))
        return float(mean * rng.gamma(100.0, 0.01))

    for service in simulate(batcher, requests, time):
        within += sum(service.finish - request.arrival <= limit for request in service.finished)
    return within / len(lengths)


@pytest.mark.parametrize("rate", [20.0, 40.0])
def test_a_percentile_is_kept_where_lengths_vary(rate: float) -> None:
    rng = np.random.default_rng(7)
    lengths = np.minimum(rng.lognormal(3.0, 0.7, 20_000), 80.0)
    assert share_within("smdp:slo_p95_ms=250", rate, lengths, 0.25) > 0.94


@pytest.mark.slow
def test_a_policy_is_solved_again_for_the_sizes_that_are_known() -> None:
    chosen = choose("auto:slo_p95_ms=250", PROFILE)
    assert chosen.table is not None
    assert chosen.takes_margin
    known = chosen.with_solved_sizes(sizes_of(np.full(500, 10.0)))
    assert known.table is not None
    assert known.table.rows[-1].arrival_rate > 1.5 * chosen.table.rows[-1].arrival_rate, "short requests take less"
    again = solved_again(known, PROFILE, margin=0.02)
    assert again.table is not None
    assert again.table.rows[-1].arrival_rate == pytest.approx(known.table.rows[-1].arrival_rate)
    assert (again.slo, again.margin) == (0.25, 0.02)
