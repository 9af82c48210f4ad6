"""BatchMonitor's Algorithm 1 to the letter."""

from math import inf

import numpy as np
import pytest

from policies.planning.simulation import simulate_policy
from policies.profile import load_profile
from policies.queue.batcher import Batcher
from policies.queue.simulator import simulate
from policies.types import BatchKey, Launch, Request, State, Wait
from research.rate_matching_literal import RateMatchingLiteral, TumblingMonitor, rate_matching_literal
from tests.support.states import state

A = BatchKey("a")
L = (0.010, 0.014, 0.018, 0.022)  # s; service rates 100, 142.9, 166.7, 181.8 a second


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (state(5.25, 5.2), (1, "policy")),  # before the first count
        (state(5.25, 5.2, rate=1.0), Wait(inf)),  # no later count allows fewer
        (state(6.0, 5.2, rate=2 / 0.014), Wait(7.0)),
        (state(5.25, 5.1, 5.2, 5.2, rate=1.0), (2, "policy")),
        (state(5.25, 5.1, 5.2, rate=2 / 0.014), Wait(6.0)),
        (state(5.25, 5.1, 5.1, 5.2, 5.2, 5.2, rate=1e6), (4, "full")),
    ],
)
def test_exactly_the_preferred_size_is_launched(at: State, expected: tuple[int, str] | Wait) -> None:
    action = RateMatchingLiteral(L).decide(at)
    assert ((len(action.requests), action.reason) if isinstance(action, Launch) else action) == expected


def test_a_request_that_is_left_is_drained() -> None:
    queue = Batcher(RateMatchingLiteral((1.0, 1.5)), {"a": 2}, TumblingMonitor())
    requests = [Request(0, 0.1, A), Request(1, 1.5, A)]
    assert [[r.id for r in s.launch.requests] for s in simulate(queue, requests, lambda _: 0.1)] == [[0], [1]]


def test_it_is_simulated_as_the_policies_of_the_server_are() -> None:
    chosen = rate_matching_literal(load_profile("googlenet-tesla-p4").truncated(8))
    run = simulate_policy(chosen, np.linspace(0.1, 4.0, 400))
    assert len(run.responses) == 400
    assert len(set(run.batch_sizes)) > 1, "several windows with several sizes"


def test_tumbling_counts_are_of_the_last_whole_second_and_none_in_the_first() -> None:
    monitor = TumblingMonitor()
    for at in (5.2, 5.4, 5.6, 6.1):
        monitor.arrive(A, at)
    assert monitor.rates(5.9) == {}
    assert monitor.rates(6.0) == {A: 3.0}
    assert monitor.rates(6.99) == {A: 3.0}
    assert monitor.rates(7.0) == {A: 1.0}
    assert monitor.rates(8.0) == {A: 0.0}
    monitor.arrive(A, 10.5)
    assert monitor.rates(10.6) == {A: 0.0}
    assert monitor.rates(11.0) == {A: 1.0}
