"""Tables of (policy, state, action): one literal state and one action each."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from policies.profile import Profile
from policies.queue.drain import Drain
from policies.queue.lookup import ActionRow, lookup, weighted
from policies.rules.control_limit import greedy, serial, static, timeout
from policies.rules.finish_first import FinishSuspended
from policies.rules.max_under_deadline import MaxUnderDeadline
from policies.rules.maximum_wait import MaximumWait
from policies.rules.per_kind import PerKind, slowdowns
from policies.rules.rate_matching import RateMatching
from policies.types import BatchKey, Launch, Mix, Policy, Request, State, Wait
from tests.support.states import state, waiting

L = (0.010, 0.014, 0.018, 0.022)  # s; service rates 100, 142.9, 166.7, 181.8 a second
TABLE = lookup([ActionRow(10.0, (0, 0, 2)), ActionRow(20.0, (0, 0, 2)), ActionRow(40.0, (0, 0, 0, 3))], 4)

BINS = (BatchKey("m", 0), BatchKey("m", 1))
MODELS = (BatchKey("a"), BatchKey("b"))
PROFILES = {name: Profile(name, L) for name in ("a", "b")}

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


def of_two(first: Sequence[float], second: Sequence[float], kinds: Sequence[BatchKey] = BINS) -> State:
    """Requests of two kinds that arrived at these instants, at 3.0 s."""
    here = sorted([(at, kinds[0]) for at in first] + [(at, kinds[1]) for at in second])
    return State(3.0, [Request(n, at, kind) for n, (at, kind) in enumerate(here)])


def first_launched(policy: Policy, at: State) -> BatchKey:
    action = policy.decide(at)
    assert isinstance(action, Launch)
    return action.requests[0].kind


@pytest.mark.parametrize(
    ("policy", "max_wait", "arrivals", "first"),
    [
        (greedy(4), inf, ((0.1, 0.2, 0.3, 0.4), (0.05, 2.9)), 1),
        (greedy(2), inf, ((0.1, 0.2), (0.05, 2.9)), 1),
        (timeout(2, 0.5), inf, ((0.1, 0.2), (0.05, 2.9)), 1),
        (static(2), inf, ((0.1, 0.2), (0.05, 2.9)), 0),
        (MaximumWait(static(2), 2, 9.0), 9.0, ((0.1, 0.2), (0.05, 2.9)), 0),
        (MaximumWait(static(2), 2, 1.0), 1.0, ((0.1, 0.2), (0.05, 2.9)), 1),
        (MaximumWait(static(2), 2, 1.0), 1.0, ((0.1, 0.2), (0.15,)), 0),
        (MaximumWait(static(4), 4, 2.05), 2.05, ((1.0, 1.2, 1.3, 1.4), (0.9, 2.9)), 1),  # overdue before formed
    ],
)
def test_of_one_models_bins_that_of_the_oldest_request_is_first_unless_a_batch_had_to_wait_for_its_size(
    policy: Policy, max_wait: float, arrivals: tuple[Sequence[float], Sequence[float]], first: int
) -> None:
    bins = PerKind({"m": policy}, max_waits={"m": max_wait})
    assert first_launched(bins, of_two(*arrivals)) == BINS[first]


@pytest.mark.parametrize(
    ("a", "b", "max_wait_of_b", "first"),
    [
        ((2.1, 2.2), (2.1, 2.9, 2.9), 1.0, "b"),  # 2 x 2 / 14 ms < 3 x 3 / 18 ms
        ((2.1,) * 5, (2.1,) * 8, 1.0, "b"),  # batches of 4: the longer queue
        ((2.1,), (2.8, 2.8), 1.0, "a"),  # 0.9 / 10 ms > 2 x 2 x 0.2 / 14 ms
        ((2.1,), (2.8, 2.8, 2.8), 1.0, "b"),  # 0.9 / 10 ms < 3 x 3 x 0.2 / 18 ms
        ((1.9,), (2.8, 2.9, 2.9), 1.0, "a"),  # overdue
        ((1.9,), (1.8, 2.9, 2.9), 1.0, "b"),  # the oldest of two that are overdue
        ((1.9,), (1.5, 2.9, 2.9), 1.6, "a"),  # each by its own maximum wait
    ],
)
def test_of_models_on_a_device_the_largest_product_of_queue_service_rate_and_waiting_time_is_first(
    a: Sequence[float], b: Sequence[float], max_wait_of_b: float, first: str
) -> None:
    policy = PerKind({"a": greedy(4), "b": greedy(4)}, PROFILES, {"a": 1.0, "b": max_wait_of_b})
    assert first_launched(policy, of_two(a, b, MODELS)).model == first


def test_of_models_of_unequal_service_times_the_faster_one_is_first() -> None:
    slow = replace(PROFILES["a"], service_times=tuple(4 * t for t in L))
    policy = PerKind({"a": greedy(4), "b": greedy(4)}, {**PROFILES, "a": slow})
    assert first_launched(policy, of_two((2.1, 2.1, 2.2), (2.1, 2.2), MODELS)).model == "b"
    assert first_launched(policy, of_two((2.1,) * 9, (2.1, 2.2), MODELS)).model == "a"


def test_of_the_model_that_is_first_the_bin_that_was_formed_first_is_launched() -> None:
    kinds = BatchKey("a", 0), BatchKey("a", 1), BatchKey("b")
    at = ((kinds[1], 1.0), (kinds[2], 1.1), (kinds[0], 2.0), (kinds[0], 2.1), (kinds[0], 2.2))
    state = State(3.0, [Request(n, instant, kind) for n, (kind, instant) in enumerate(at)])
    policy = PerKind({"a": greedy(4), "b": greedy(4)}, PROFILES)
    assert first_launched(policy, state) == kinds[1], "bin 0 makes model a the first"


def test_while_requests_are_between_stages_the_batch_that_was_formed_first_is_first() -> None:
    started = [Request(9, 1.5, BatchKey("a"), stages=4, stage=2)]
    waiting_b = [Request(n, 2.5, BatchKey("b")) for n in range(4)]
    finishing = FinishSuspended(greedy(4), Drain({"a": 4}))
    policy = PerKind({"a": finishing, "b": greedy(4)}, PROFILES)
    assert first_launched(policy, State(3.0, waiting_b, started)).model == "a"
    assert first_launched(policy, State(3.0, [*waiting_b, Request(9, 2.9, BatchKey("a"))])).model == "b"


CAPACITY = PROFILES["a"].capacity


@pytest.mark.parametrize(("others", "limit"), [(0.0, 1), (0.5, 1), (0.7, 2), (0.88, 3)])
def test_a_table_is_looked_up_at_the_rate_times_the_slowdown_unless_it_was_solved_for_a_bound(
    others: float, limit: int
) -> None:
    rows = [ActionRow(10.0, (0, 1)), ActionRow(40.0, (0, 0, 2)), ActionRow(90.0, (0, 0, 0, 3))]
    plain = lookup(rows, 4)
    for table, expected in ((plain, 1), (replace(plain, uses_slowdown=True), limit)):
        policy = PerKind({"a": table, "b": static(4)}, PROFILES)
        for n in (1, 2, 3):
            at = State(1.0, waiting_of(BatchKey("a"), n), rates={BatchKey("a"): 10.0, BatchKey("b"): others * CAPACITY})
            assert isinstance(policy.decide(at), Launch) == (n >= expected), (n, others)


def test_a_model_with_hardly_any_arrivals_is_launched_at_once_beside_a_busy_one() -> None:
    table = replace(lookup([ActionRow(10.0, (0, 0, 2)), ActionRow(40.0, (0, 0, 2))], 4), uses_slowdown=True)
    policy = PerKind({"a": table, "b": static(4)}, PROFILES)
    for rate, launches in ((4.9, True), (5.1, False)):  # half the lowest rate
        at = State(1.0, waiting_of(BatchKey("a"), 1), rates={BatchKey("a"): rate, BatchKey("b"): 0.9 * CAPACITY})
        assert isinstance(policy.decide(at), Launch) == launches


@pytest.mark.parametrize(("others", "size"), [(0.0, 2), (0.1, 3)])
def test_beside_other_models_a_table_launches_all_that_wait(others: float, size: int) -> None:
    table = replace(lookup([ActionRow(10.0, (0, 1, 2, 2))], 4), uses_slowdown=True)
    policy = PerKind({"a": table, "b": static(4)}, PROFILES)
    at = State(1.0, waiting_of(BatchKey("a"), 3), rates={BatchKey("a"): 10.0, BatchKey("b"): others * CAPACITY})
    action = policy.decide(at)
    assert isinstance(action, Launch)
    assert len(action.requests) == size


@pytest.mark.parametrize(("others", "limit"), [(0.0, 2), (0.1, 2), (0.4, 1)])
def test_a_model_that_others_slow_down_by_c_has_its_power_weighted_by_1_over_c_squared(
    others: float, limit: int
) -> None:
    rows = [ActionRow(10.0, (0, 0, 2)), ActionRow(17.0, (0, 0, 2))]
    table = weighted(lookup(rows, 4), {0.5: [ActionRow(10.0, (0, 1))]})  # limit 1 if power counts half
    policy = PerKind({"a": replace(table, uses_slowdown=True), "b": static(4)}, PROFILES)
    rates = {
        BatchKey("a"): 10.0,
        BatchKey("b"): others * CAPACITY,
    }  # c = 1 / (1 - others); the factors meet at 1 / sqrt(2)
    for n in (1, 2):
        action = policy.decide(State(1.0, waiting_of(BatchKey("a"), n), rates=rates, mean_rates={BatchKey("a"): 10.0}))
        assert isinstance(action, Launch) == (n >= limit)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((0.3, 0.0), (1.0, None)),
        ((0.3, 0.6), (2.5, 1 / 0.7)),
        ((0.01, 0.89), (1 / 0.11, 1 / 0.99)),
        ((0.6, 1.2), (3.0, 1.5)),  # above capacity by the parts of the load
        ((1e-9, 1.5), (100.0, 1.0)),
    ],
)
def test_other_models_leave_the_rest_of_the_time(
    loads: tuple[float, float], expected: tuple[float, float | None]
) -> None:
    found = slowdowns({BatchKey(m): load * CAPACITY for m, load in zip("ab", loads, strict=True)}, PROFILES)
    assert (found.get("a"), found.get("b")) == pytest.approx(expected)


def waiting_of(kind: BatchKey, number: int) -> list[Request]:
    return [Request(n, 0.9, kind) for n in range(number)]


def test_per_kind_uses_each_kinds_own_rate_and_waits_until_the_earliest_instant() -> None:
    a, b = BatchKey("a"), BatchKey("b")
    queue = [Request(0, 0.0, a), Request(1, 0.1, b)]
    action = PerKind({"a": RateMatching(L), "b": timeout(4, 5.0)}, PROFILES).decide(
        State(1.0, queue, rates={a: 150.0, b: 1.0})
    )
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
    kind = BatchKey("m")
    means = {} if mean_rate is None else {kind: mean_rate}
    for n in range(1, 4):
        action = WEIGHTED.decide(State(1.0, waiting(*[0.9] * n), rates={kind: rate}, mean_rates=means))
        assert isinstance(action, Launch) == (n >= limit), n
        if isinstance(action, Wait):
            assert action.until == 1.0 + 3 / rate


def test_a_kind_keeps_its_own_rate_and_its_own_mean() -> None:
    a, b = BatchKey("a"), BatchKey("b")
    both = State(1.0, [Request(0, 0.9, a), Request(1, 0.9, b)], rates={a: 10.0, b: 30.0}, mean_rates={a: 7.0, b: 5.0})
    assert (both.arrival_rate, both.mean_rate) == (40.0, 12.0)
    own, other = both.by_kind()[a], both.among([BatchKey("c")])
    assert (own.arrival_rate, own.mean_rate, own.reevaluate_at) == (10.0, 7.0, 1.0 + 3 / 10)
    assert (other.rates, other.mean_rates) == ({}, {})
    action = PerKind({"a": WEIGHTED, "b": WEIGHTED}, PROFILES).decide(both)
    assert isinstance(action, Launch)
    assert action.requests[0].kind == a, "limit 1 by its own mean; by both means it would be 2"


def test_drain_finishes_suspended_requests_before_it_starts_waiting_ones() -> None:
    started = [Request(0, 0.0, BatchKey("m"), stages=2, stage=1)]
    action = Drain({"m": 4}).decide(State(1.0, waiting(0.5, 0.6), started))
    assert isinstance(action, Launch)
    assert action.requests == started


def test_a_mixed_row_draws_by_the_waiting_ids_and_gives_the_same_action_again() -> None:
    policy = lookup([ActionRow(10.0, (0, 1), Mix(0.25, (0, 0)))], 4)
    states = [State(1.0, [Request(i, 0.5)], rates={BatchKey(): 10.0}) for i in range(4000)]
    waits = [isinstance(policy.decide(s), Wait) for s in states]
    assert waits == [isinstance(policy.decide(s), Wait) for s in states]
    # a share of 4000 draws at p = 0.25 has a standard deviation of 0.0068; four of them
    assert sum(waits) / len(waits) == pytest.approx(0.25, abs=0.028)


@pytest.mark.parametrize(("levels", "urgent_from", "first"), [((2, 1), inf, 1), ((2, 2), inf, 0), ((2, 1), 5.0, 0)])
def test_of_two_kinds_the_one_with_the_first_level_is_launched(
    levels: tuple[int, int], urgent_from: float, first: int
) -> None:
    kinds = [BatchKey("m", 0), BatchKey("m", 1)]
    waiting = [Request(0, 1.0, kinds[0], level=levels[0], urgent_from=urgent_from)]
    waiting.append(Request(1, 2.0, kinds[1], level=levels[1]))
    action = PerKind({"m": greedy(4)}).decide(State(6.0, waiting, by_level=True))
    assert isinstance(action, Launch)
    assert action.requests[0].kind.bin == first
