"""The limit on batch size times longest length, for every policy and at every decision."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import choose, combine
from policies.profile import Profile, parse_profile
from policies.queue.batcher import Batcher
from policies.queue.simulator import simulate
from policies.types import Launch, Request

LENGTHS = (10, 100, 1000)
LIMIT = 1000
TIMES = tuple(tuple(0.001 + 1e-5 * b * length for length in LENGTHS) for b in range(1, 9))
PROFILE = Profile(
    "padded", tuple(row[1] for row in TIMES), lengths=LENGTHS, length_service_times=TIMES, max_batch_tokens=LIMIT
)


def requests(seed: int, count: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.002, count)).tolist()
    lengths = rng.choice([5, 10, 50, 100, 400, 1000], count).tolist()
    return [
        Request(index, at, size=PROFILE.time_alone(length), length=length, payload=length)
        for index, (at, length) in enumerate(zip(arrivals, lengths, strict=True))
    ]


@pytest.mark.parametrize("spec", ["length-aware", "greedy", "static:8", "timeout:5", "smdp"])
@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_no_batch_exceeds_the_tokens_and_all_requests_are_served(spec: str, seed: int) -> None:
    chosen = choose(spec, PROFILE)
    policy, monitor = combine({"": chosen})
    batcher = Batcher(policy, {"": 8}, monitor, {"": LIMIT})
    served = 0
    largest = 1
    arriving = requests(seed, 300)
    for request in arriving:
        request.kind = chosen.kind("", request.size)

    def service_time(launch: Launch) -> float:
        return PROFILE.service_time(len(launch.requests), max(request.length for request in launch.requests))

    for service in simulate(batcher, arriving, service_time):
        batch = service.launch.requests
        assert len(batch) == 1 or len(batch) * max(request.length for request in batch) <= LIMIT
        served += len(batch)
        largest = max(largest, len(batch))
    assert served == 300
    assert largest > 1 or spec == "smdp", "it knows that batches of mixed lengths gain nothing here"


def test_the_limit_is_part_of_the_profile_file() -> None:
    assert parse_profile(PROFILE.to_json(), "it").max_batch_tokens == LIMIT
    assert parse_profile(replace(PROFILE, max_batch_tokens=None).to_json(), "it").max_batch_tokens is None


def test_a_launch_keeps_the_oldest_requests_that_fit() -> None:
    policy, monitor = combine({"": choose("greedy", PROFILE)})
    batcher = Batcher(policy, {"": 8}, monitor, {"": LIMIT})
    for index, length in enumerate((100, 100, 1000, 100, 100)):
        batcher.arrive(Request(index, 0.0, length=length))
    first = batcher.decide(0.0)
    assert isinstance(first, Launch)
    assert [request.id for request in first.requests] == [0, 1, 3, 4]
    batcher.complete(first)
    batcher.set_limits("", 8, None)
    second = batcher.decide(1.0)
    assert isinstance(second, Launch)
    assert [request.id for request in second.requests] == [2]
