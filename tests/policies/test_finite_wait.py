"""Under every rule of the catalog each wait ends, and a lone request after a silence is served at once."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import CATALOG, ModelPolicy, choose, combine
from policies.profile import load_profile
from policies.queue.batcher import Batcher
from policies.queue.simulator import Service, simulate
from policies.types import BatchKey, Launch, Request, State, Wait

P4 = load_profile("googlenet-tesla-p4").truncated(8)
M = BatchKey("m")
SPECS = {rule.name: rule.example for rule in CATALOG.values()}
OBJECTIVES = {
    "least response time": "auto",
    "a weight of power": "auto:w2=30",
    "a bound on the mean": "auto:slo_mean_ms=30",
    "a cap on power": "auto:power_cap_w=40",
}


@cache
def chosen_for(spec: str) -> ModelPolicy:
    chosen = choose(spec, P4)
    return chosen if chosen.bins is None else replace(chosen, bins=chosen.bins.with_edges_of([0.0, 1.0, 2.0, 3.0]))


def started(spec: str) -> ModelPolicy:
    """The policy with a monitor that has measured nothing yet."""
    chosen = chosen_for(spec)
    return replace(chosen, monitor=deepcopy(chosen.monitor))


def requests(instants: Sequence[float], chosen: ModelPolicy) -> list[Request]:
    return [
        Request(i, at, chosen.kind("m", float(3 * i % 4)), deadline=at + chosen.slo) for i, at in enumerate(instants)
    ]


def serve(chosen: ModelPolicy, instants: Sequence[float]) -> list[Service]:
    policy, monitor = combine({"m": chosen})
    batcher = Batcher(policy, {"m": P4.max_batch_size}, monitor)
    return list(simulate(batcher, requests(instants, chosen), lambda launch: P4.service_time(len(launch.requests))))


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=60)
@given(
    ages=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=12).map(lambda ages: sorted(ages, reverse=True)),
    rate=st.none() | st.floats(0.0, 1e5),
)
def test_every_wait_ends_before_the_oldest_request_has_waited_longer_than_a_second(
    name: str, ages: list[float], rate: float | None
) -> None:
    now = 1000.0
    state = State(
        now, requests([now - age for age in ages], chosen_for(SPECS[name])), rates={} if rate is None else {M: rate}
    )
    match combine({"m": chosen_for(SPECS[name])})[0].decide(state):
        case Wait(until):
            assert now < until <= now - ages[0] + 1.0
        case Launch(launched):
            assert launched


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=15)
@given(
    gaps=st.lists(st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.3, 20.0]), min_size=1, max_size=60),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_idle_device_launches_within_the_maximum_wait(name: str, gaps: list[float], seed: int) -> None:
    jitter = np.random.default_rng(seed).exponential(1.0, len(gaps))
    free = 0.0
    for service in serve(started(SPECS[name]), np.cumsum(np.array(gaps) * jitter).tolist()):
        oldest = service.launch.requests[0].arrival
        # 1e-9: instants of some thousand seconds are exact to 1e-12, sums of a few of them to less
        assert service.start <= max(free, oldest + 1.0) + 1e-9
        free = service.finish


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=10)
@given(load=st.floats(0.05, 1.2), seed=st.integers(0, 2**32 - 1))
def test_a_single_request_after_an_idle_hour_is_launched_at_once(name: str, load: float, seed: int) -> None:
    gaps = np.random.default_rng(seed).exponential(1 / (load * P4.capacity), 300)
    busy = np.cumsum(gaps)
    services = serve(started(OBJECTIVES[name]), [*busy.tolist(), busy[-1] + 3600.0])
    assert len(services[-1].launch.requests) == 1
    assert services[-1].start == pytest.approx(busy[-1] + 3600.0, abs=1e-9)


def test_an_infinite_maximum_wait_does_not_change_the_policy() -> None:
    batch = requests([0.0], chosen_for(SPECS["static"]))
    assert choose("static:5,max_wait_ms=inf", P4).policy.decide(State(1000.0, batch)) == Wait(inf)
