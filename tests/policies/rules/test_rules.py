"""Tables of (policy, state, action): one literal state and one action each."""

from collections.abc import Sequence
from math import inf

import pytest

from policies.rules.continuous_batching import ContinuousBatching
from policies.rules.control_limit import greedy, serial, static, timeout
from policies.rules.drain import Drain
from policies.rules.lookup import ActionRow, lookup, weighted
from policies.rules.max_under_deadline import MaxUnderDeadline
from policies.rules.maximum_wait import MaximumWait
from policies.rules.per_kind import PerKind
from policies.rules.rate_matching import RateMatching, RateMatchingLiteral
from policies.types import Kind, Launch, Mix, Policy, Request, State, Wait
from tests.support.states import state, waiting

L = (0.010, 0.014, 0.018, 0.022)  # s; service rates 100, 142.9, 166.7, 181.8 a second
TABLE = lookup([ActionRow(10.0, (0, 0, 2)), ActionRow(20.0, (0, 0, 2)), ActionRow(40.0, (0, 0, 0, 3))], 4)

WEIGHTED = weighted(  # limit 1 where power counts half, 2 as it is, 3 from 30 a second on where it counts twice
    lookup([ActionRow(10.0, (0, 0, 2)), ActionRow(40.0, (0, 0, 2))], 4),
    {0.5: [ActionRow(10.0, (0, 1))], 2.0: [ActionRow(20.0, (0, 0, 2)), ActionRow(40.0, (0, 0, 0, 3))]},
)


def launched(policy: Policy, at: State) -> tuple[int, str] | Wait:
    action = policy.decide(at)
    if isinstance(action, Wait):
        return action
    assert list(action.requests) == list(at.waiting)[: len(action.requests)], "the oldest are launched first"
    return len(action.requests), action.reason


@pytest.mark.parametrize(
    ("policy", "at", "expected"),
    [
        (greedy(4), state(1.0, 1.0), (1, "policy")),
        (greedy(4), state(1.0, 0.1, 0.2, 0.3, 0.4, 0.5), (4, "full")),
        (serial(), state(1.0, 0.1, 0.2), (1, "full")),
        (static(3), state(1.0, 0.1, 0.2), Wait(inf)),
        (static(3), state(1.0, 0.1, 0.2, 0.3, 0.4), (3, "full")),
        (timeout(4, 0.5), state(1.0, 0.75, 0.9), Wait(1.25)),
        (timeout(4, 0.5), state(1.25, 0.75, 0.9), (2, "policy")),
        (timeout(4, 0.5), state(1.0, 0.9, 0.9, 0.9, 0.9), (4, "full")),
        # equation (1) of BatchMonitor: the smallest B with B / T_b >= the rate; all waiting requests are launched
        (RateMatching(L), state(1.0, 0.9, rate=100.0), (1, "policy")),
        (RateMatching(L), state(1.0, 0.9, rate=120.0), Wait(1.0 + 3 / 120)),
        (RateMatching(L), state(1.0, 0.8, 0.9, 0.9, rate=120.0), (3, "policy")),
        (RateMatching(L), state(1.0, 0.9, 0.9, 0.9, rate=1e6), Wait(1.0 + 3e-6)),
        (RateMatching(L), state(1.0, 0.9), (1, "policy")),
        # Algorithm 1: 1 before the first count; then at least 2, strictly, and exactly that many
        (RateMatchingLiteral(L), state(5.25, 5.2), (1, "policy")),
        (RateMatchingLiteral(L), state(5.25, 5.2, rate=1.0), Wait(inf)),  # no later count allows fewer
        (RateMatchingLiteral(L), state(6.0, 5.2, rate=2 / 0.014), Wait(7.0)),
        (RateMatchingLiteral(L), state(5.25, 5.1, 5.2, 5.2, rate=1.0), (2, "policy")),
        (RateMatchingLiteral(L), state(5.25, 5.1, 5.2, rate=2 / 0.014), Wait(6.0)),
        (RateMatchingLiteral(L), state(5.25, 5.1, 5.1, 5.2, 5.2, 5.2, rate=1e6), (4, "full")),
        # launch when full, or at the last instant at which the oldest can be on time
        (MaxUnderDeadline(L), state(1.0, 1.0, slo=0.1), Wait(1.1 - 0.010)),
        (MaxUnderDeadline(L), state(1.1 - 0.010, 1.0, slo=0.1), (1, "slo")),
        (MaxUnderDeadline(L), state(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, slo=0.1), (4, "full")),
        (MaxUnderDeadline(L), state(1.085, 1.0, 1.085, 1.085, slo=0.1), (2, "slo")),  # three would take too long
        (MaxUnderDeadline(L), state(1.09, 1.0, 1.0, 1.0, 1.0, slo=0.1), (4, "full")),  # a full batch, late or not
        (
            MaxUnderDeadline(L),
            state(2.0, 1.0, 1.5, slo=0.1),
            (2, "slo"),
        ),  # late already, whatever the size
        (MaxUnderDeadline((0.005, 0.006, 0.007)), state(0.03 - 0.006, 0.0, 0.01, slo=0.03), (2, "slo")),
        (MaxUnderDeadline(L), state(1.0, 1.0), Wait(inf)),
        (TABLE, state(1.0, 0.9, rate=4.9), (1, "policy")),  # below half the lowest rate
        (TABLE, state(1.0, 0.9, rate=5.1), Wait(1.0 + 3 / 5.1)),
        (TABLE, state(1.0, 0.9, rate=20.0), Wait(1.0 + 3 / 20)),
        (TABLE, state(1.0, 0.8, 0.9, rate=29.0), (2, "policy")),
        (TABLE, state(1.0, 0.8, 0.9, rate=31.0), Wait(1.0 + 3 / 31)),
        (TABLE, state(1.0, 0.5, 0.6, 0.7, 0.8, 0.9, rate=31.0), (3, "policy")),  # the last action repeats
        (TABLE, state(1.0, 0.9), Wait(inf)),  # no rate measured: the first row
        (MaximumWait(static(3), 4, 0.5), state(1.0, 0.75), Wait(1.25)),
        (MaximumWait(static(3), 4, 0.5), state(1.25, 0.75), (1, "max_wait")),
        (MaximumWait(static(2), 4, 0.5), state(9.0, 0.75, 0.8, 0.9), (2, "full")),  # a launch is not changed
        (MaximumWait(static(9), 4, 0.5), state(9.0, 0.1, 0.2, 0.3, 0.4, 0.5), (4, "max_wait")),
        (MaximumWait(static(3), 4, inf), state(1e9, 0.75), Wait(inf)),
        (Drain({"m": 2}), state(1.0, 0.8, 0.9, 0.9), (2, "drain")),
    ],
)
def test_policy_decides(policy: Policy, at: State, expected: tuple[int, str] | Wait) -> None:
    assert launched(policy, at) == expected


def test_per_kind_launches_the_batch_that_was_formed_first() -> None:
    a, b = Kind("a"), Kind("b")
    queue = [Request(0, 0.0, a), Request(1, 0.1, b), Request(2, 0.2, b), Request(3, 0.3, a)]
    action = PerKind({"a": static(2), "b": static(2)}).decide(State(1.0, queue))
    assert isinstance(action, Launch)
    assert [r.id for r in action.requests] == [1, 2]


def test_a_kind_at_its_maximum_wait_is_launched_before_a_batch_that_was_formed_earlier() -> None:
    a, b = Kind("a"), Kind("b")
    queue = [Request(0, 0.0, b), Request(1, 0.5, a), Request(2, 0.9, b)]
    policy = PerKind({"a": greedy(4), "b": MaximumWait(static(4), 4, 1.0)})
    action = policy.decide(State(1.0, queue))
    assert isinstance(action, Launch)
    assert [r.id for r in action.requests] == [0, 2]


def of_two(first: Sequence[float], second: Sequence[float]) -> State:
    """Requests of models a and b that arrived at these instants, at 3.0 s."""
    here = sorted([(at, Kind("a")) for at in first] + [(at, Kind("b")) for at in second])
    return State(3.0, [Request(n, at, kind) for n, (at, kind) in enumerate(here)])


@pytest.mark.parametrize(
    ("a", "b", "arrivals", "first"),
    [
        (greedy(4), greedy(4), ((0.1, 0.2, 0.3, 0.4), (0.05, 2.9)), "b"),
        (greedy(2), greedy(2), ((0.1, 0.2), (0.05, 2.9)), "b"),
        (ContinuousBatching(2), ContinuousBatching(4), ((0.1, 0.2), (0.05, 2.9)), "b"),
        (timeout(2, 9.0), timeout(2, 0.5), ((0.1, 0.2), (0.05, 2.9)), "b"),
        (static(2), static(2), ((0.1, 0.2), (0.05, 2.9)), "a"),
        (MaximumWait(static(2), 2, 9.0), MaximumWait(static(2), 2, 9.0), ((0.1, 0.2), (0.05, 2.9)), "a"),
        (MaximumWait(static(2), 2, 1.0), MaximumWait(static(2), 2, 1.0), ((0.1, 0.2), (0.05, 2.9)), "b"),
        (MaximumWait(static(2), 2, 1.0), MaximumWait(static(2), 2, 1.0), ((0.1, 0.2), (0.15,)), "a"),
        (MaximumWait(static(2), 2, 1.0), MaximumWait(static(4), 4, 1.0), ((1.0, 1.2, 1.3), (0.9, 2.9)), "b"),
    ],
)
def test_the_kind_of_the_oldest_request_is_first_unless_a_batch_had_to_wait_for_its_size(
    a: Policy, b: Policy, arrivals: tuple[Sequence[float], Sequence[float]], first: str
) -> None:
    action = PerKind({"a": a, "b": b}).decide(of_two(*arrivals))
    assert isinstance(action, Launch)
    assert action.requests[0].kind.model == first


def test_per_kind_uses_each_kinds_own_rate_and_waits_until_the_earliest_instant() -> None:
    a, b = Kind("a"), Kind("b")
    queue = [Request(0, 0.0, a), Request(1, 0.1, b)]
    action = PerKind({"a": RateMatching(L), "b": timeout(4, 5.0)}).decide(State(1.0, queue, rates={a: 150.0, b: 1.0}))
    assert action == Wait(1.0 + 3 / 150)


@pytest.mark.parametrize(
    ("rate", "mean_rate", "limit"),
    [
        (10.0, 10.0, 2),
        (10.0, 7.1, 2),  # the factors meet at 1 / sqrt(2) and sqrt(2)
        (10.0, 7.0, 1),
        (10.0, 0.0, 1),
        (40.0, 56.5, 2),
        (40.0, 56.6, 3),
        (31.0, 1e9, 3),
        (29.0, 1e9, 2),  # the row of the measured rate in that table
        (5.1, 1e9, 2),  # which has no lower one
        (4.9, 1e9, 1),  # below half the lowest rate all are launched, whatever the mean
        (10.0, None, 2),  # no mean measured
    ],
)
def test_with_a_varying_rate_power_is_weighted_by_mean_over_measured_rate(
    rate: float, mean_rate: float | None, limit: int
) -> None:
    kind = Kind("m")
    means = {} if mean_rate is None else {kind: mean_rate}
    for n in range(1, 4):
        action = WEIGHTED.decide(State(1.0, waiting(*[0.9] * n), rates={kind: rate}, mean_rates=means))
        assert isinstance(action, Launch) == (n >= limit), n
        if isinstance(action, Wait):
            assert action.until == 1.0 + 3 / rate


def test_a_kind_keeps_its_own_rate_and_its_own_mean() -> None:
    a, b = Kind("a"), Kind("b")
    both = State(1.0, [Request(0, 0.9, a), Request(1, 0.9, b)], rates={a: 10.0, b: 30.0}, mean_rates={a: 7.0, b: 5.0})
    assert (both.arrival_rate, both.mean_rate) == (40.0, 12.0)
    own, other = both.by_kind()[a], both.among([Kind("c")])
    assert (own.arrival_rate, own.mean_rate, own.reevaluate_at) == (10.0, 7.0, 1.0 + 3 / 10)
    assert (other.rates, other.mean_rates) == ({}, {})
    action = PerKind({"a": WEIGHTED, "b": WEIGHTED}).decide(both)
    assert isinstance(action, Launch)
    assert action.requests[0].kind == a, "limit 1 by its own mean; by both means it would be 2"


def test_drain_finishes_suspended_requests_before_it_starts_waiting_ones() -> None:
    started = [Request(0, 0.0, Kind("m"), stages=2, stage=1)]
    action = Drain({"m": 4}).decide(State(1.0, waiting(0.5, 0.6), started))
    assert isinstance(action, Launch)
    assert action.requests == started


def test_a_mixed_row_draws_by_the_waiting_ids_and_gives_the_same_action_again() -> None:
    policy = lookup([ActionRow(10.0, (0, 1), Mix(0.25, (0, 0)))], 4)
    states = [State(1.0, [Request(i, 0.5)], rates={Kind(): 10.0}) for i in range(4000)]
    waits = [isinstance(policy.decide(s), Wait) for s in states]
    assert waits == [isinstance(policy.decide(s), Wait) for s in states]
    # a share of 4000 draws at p = 0.25 has a standard deviation of 0.0068; four of them
    assert sum(waits) / len(waits) == pytest.approx(0.25, abs=0.028)
