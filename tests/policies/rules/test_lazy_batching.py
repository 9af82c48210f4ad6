"""LazyBatching and catch-up: tables of (state, action), and properties of any run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, factorial, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import choose
from policies.planning.simulation import Simulation
from policies.profile import Profile
from policies.queue.arrivals import poisson
from policies.queue.batcher import Batcher
from policies.queue.monitor import ForgettingMonitor, NoMonitor
from policies.queue.simulator import simulate
from policies.rules.catch_up import CatchUp, catch_up, greedy_value
from policies.rules.co_located import CoLocated
from policies.rules.lazy_batching import LazyBatching, Slack, stack_of
from policies.solver.model import Problem
from policies.solver.solver import evaluate
from policies.types import Action, BatchKey, Launch, Policy, Request, State, Wait

M, LOOSE, TIGHT = BatchKey("m"), BatchKey("loose"), BatchKey("tight")
# four stages; 1 s alone, 0.25 s more for each further request: exact in binary
FOUR = Profile("four", (1.0, 1.25, 1.5, 1.75)).in_stages(4)
# an eighth longer stage by stage than in one launch
DEAR = replace(FOUR, stage_service_times=tuple((1.125 * t / 4,) * 4 for t in FOUR.service_times))
A_LITTLE = replace(FOUR, stage_service_times=tuple((1.001 * t / 4,) * 4 for t in FOUR.service_times))
PRINTED, REMAINING, ORACLE = (LazyBatching(FOUR, slack) for slack in ("printed", "remaining", "oracle"))


def suspended(id_: int, stage: int, started: float = 0.0, deadline: float = inf, kind: BatchKey = M) -> Request:
    return Request(id_, started, kind, deadline, stages=4, stage=stage, started=started)


def arrivals(*deadlines: float, kind: BatchKey = M) -> list[Request]:
    return [Request(100 + i, 0.0, kind, deadline, stages=4) for i, deadline in enumerate(deadlines)]


def launched(policy: Policy, at: State) -> list[int]:
    action = policy.decide(at)
    assert isinstance(action, Launch)
    assert action.stages == 1
    return [request.id for request in action.requests]


@pytest.mark.parametrize(
    ("policy", "in_flight", "waiting", "expected"),
    [
        # an idle device takes all waiting requests, late or not, up to the maximum
        (PRINTED, [], arrivals(inf, inf), [100, 101]),
        (PRINTED, [], arrivals(*[1.0] * 5), [100, 101, 102, 103]),
        # the active batch is the topmost sub-batch: neighbours at one stage are merged
        (PRINTED, [suspended(0, 2), suspended(1, 2)], [], [0, 1]),
        (PRINTED, [suspended(0, 3), suspended(1, 1)], [], [1]),
        (PRINTED, [suspended(0, 2), suspended(1, 1), suspended(2, 1)], [], [1, 2]),
        (
            PRINTED,
            [suspended(n, 2) for n in range(6)],
            [],
            [2, 3, 4, 5],
        ),  # never above the maximum: the latest run first
        # equation (2) at now = 2: the new request has 3 s left, and two take 2 s alone
        (PRINTED, [suspended(0, 2)], arrivals(5.0), [100]),
        (PRINTED, [suspended(0, 2)], arrivals(4.0), [100]),  # slack 0
        (PRINTED, [suspended(0, 2)], arrivals(3.999), [0]),
        (PRINTED, [suspended(0, 3)], arrivals(3.999), [0]),  # printed: a request at its last stage counts in full
        (PRINTED, [suspended(0, 2)], arrivals(5.0, 5.0, 5.0), [100, 101]),  # as many as the slack allows
        (PRINTED, [suspended(0, 2, 0.0, 2.0)], arrivals(inf), [100]),  # only the wait before its start counts
        (PRINTED, [suspended(0, 2, 0.5, 2.0)], arrivals(inf), [0]),
        (PRINTED, [suspended(0, 2, 0.0, 3.0), suspended(1, 1)], arrivals(inf), [100]),  # of all requests in flight
        (PRINTED, [suspended(0, 2, 0.0, 2.5), suspended(1, 1)], arrivals(inf), [1]),
        (PRINTED, [suspended(n, 2) for n in range(3)], arrivals(inf, inf), [100]),  # room for one
        (PRINTED, [suspended(n, 2) for n in range(4)], arrivals(inf), [0, 1, 2, 3]),
        (PRINTED, [*(suspended(n, 2) for n in range(3)), suspended(3, 1)], arrivals(inf, inf), [100, 101]),
        # what remains, and all time since arrival
        (REMAINING, [suspended(0, 3)], arrivals(3.25), [100]),
        (REMAINING, [suspended(0, 3)], arrivals(3.24), [0]),
        (REMAINING, [suspended(0, 3, 0.0, 2.0)], arrivals(inf), [0]),
        # measured: two stages alone, two together
        (ORACLE, [suspended(0, 2)], arrivals(2.0 + 0.5 + 0.625), [100]),
        (ORACLE, [suspended(0, 2)], arrivals(2.0 + 0.5 + 0.624), [0]),
        (ORACLE, [suspended(0, 2)], arrivals(*[2.0 + 0.625 + 0.75] * 3), [100, 101]),
    ],
)
def test_lazy_batching_decides(
    policy: Policy, in_flight: list[Request], waiting: list[Request], expected: list[int]
) -> None:
    assert launched(policy, State(2.0, waiting, in_flight)) == expected


@pytest.mark.parametrize(
    ("in_flight", "waiting", "rate", "expected"),
    [
        ([], arrivals(inf, inf), 0.0, [100, 101]),
        # without further arrivals: 2 x 0.75 + 1 to follow, 2 x (0.25 + 3 x 0.3125) to catch up
        ([suspended(0, 1)], arrivals(inf), 0.0, [100]),
        # 2 x 0.5 + 1 to follow, 2 x (0.5 + 2 x 0.3125) to catch up
        ([suspended(0, 2)], arrivals(inf), 0.0, [0]),
        # later arrivals find the device free sooner if one batch serves all
        ([suspended(0, 2)], arrivals(inf, inf), 0.0, [0]),
        ([suspended(0, 2)], arrivals(inf, inf), 0.5, [100, 101]),
        ([suspended(0, 3)], arrivals(inf, inf), 0.5, [0]),
        # requests lower in the stack are delayed as well, and count
        ([suspended(8, 2), suspended(9, 2), suspended(0, 1)], arrivals(inf), 0.0, [0]),
        # a request that could not be merged does not catch up
        ([suspended(n, 1) for n in range(4)], arrivals(inf), 0.5, [0, 1, 2, 3]),
        ([suspended(n, 1) for n in range(2)], arrivals(inf, inf, inf, inf), 1.0, [100, 101]),
        # nor when the slack does not allow it
        ([suspended(0, 1)], arrivals(3.75), 0.0, [100]),
        ([suspended(0, 1)], arrivals(3.74), 0.0, [0]),
        # beyond what greedy can serve the rate counts as just below
        ([suspended(0, 1)], arrivals(inf), 1e9, [100]),
    ],
)
def test_catch_up_preempts_when_it_pays(
    in_flight: list[Request], waiting: list[Request], rate: float, expected: list[int]
) -> None:
    assert launched(catch_up(FOUR), State(2.0, waiting, in_flight, {M: rate})) == expected


@pytest.mark.parametrize(
    ("profile", "waiting", "rate", "stages"),
    [
        (FOUR, 1, 0.0, 1),  # stages add no overhead
        (DEAR, 1, 0.0, None),  # no arrivals to come
        (DEAR, 1, 0.8, None),
        (A_LITTLE, 1, 0.8, 1),
        (A_LITTLE, 1, 1e-4, None),
        (DEAR, 4, 0.8, None),  # no request could be merged
    ],
)
def test_a_batch_is_launched_whole_where_stages_cost_more_than_merging_gains(
    profile: Profile, waiting: int, rate: float, stages: int | None
) -> None:
    action = catch_up(profile).decide(State(2.0, arrivals(*[inf] * waiting), rates={M: rate}))
    assert isinstance(action, Launch)
    assert (len(action.requests), action.stages) == (waiting, stages)


def test_beside_another_model_in_flight_a_batch_goes_stage_by_stage() -> None:
    both = CoLocated({"loose": LazyBatching(FOUR), "tight": catch_up(DEAR)})
    start = [Request(7, 0.0, TIGHT, 9.0)]
    alone, beside = both.decide(State(2.0, start)), both.decide(State(2.0, start, [suspended(0, 2, 0.0, 20.0, LOOSE)]))
    assert isinstance(alone, Launch)
    assert isinstance(beside, Launch)
    assert (alone.stages, beside.stages) == (None, 1)
    assert beside.requests == start


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0, 2.5])
def test_greedys_relative_value_solves_its_equation(rate: float) -> None:
    """h(n) = n l + rate l^2 / 2 - g l + E[h(N)], summed over a Poisson distribution instead of its moments."""
    slope, intercept = 0.3, 1.1
    value = greedy_value(slope, intercept, rate)

    def h(n: int) -> float:
        return value.quadratic * n * n + value.linear * n

    for n in (0, 1, 5):
        time = intercept + slope * n
        mean = rate * time
        after = sum(exp(-mean) * mean**k / factorial(k) * h(k) for k in range(80))
        expected = n * time + rate * time**2 / 2 - value.gain * time + after
        if rate or n:  # without arrivals an idle device does not serve empty batches
            assert h(n) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_gain_is_greedys_mean_number_in_the_system(load: float) -> None:
    """Where it is seldom idle and the largest batch seldom full: 0.6 and 2.4 per cent off here."""
    profile = Profile("line", tuple(0.020 + 0.002 * b for b in range(1, 65)))
    problem = Problem(profile, load * profile.capacity)
    exact = evaluate(problem, (*range(65),), None)
    value = greedy_value(0.002, 0.020, problem.arrival_rate)
    assert value.gain / problem.arrival_rate == pytest.approx(exact.mean_response_time, rel=0.03)


def test_a_merged_batch_is_one_sub_batch() -> None:
    assert stack_of([suspended(0, 3), suspended(1, 2), suspended(2, 2), suspended(3, 0)]) == [(3, 1), (2, 2), (0, 1)]
    assert stack_of([]) == []


def test_figure_10_of_the_paper() -> None:
    """Eight nodes; Req2 comes during Req1's node B, Req3 during Req2's A: they merge at B, and with Req1 at C."""
    eight = Profile("eight", (8.0, 8.0, 8.0)).in_stages(8)
    requests = [Request(i, at, M, at + 100.0, stages=8) for i, at in enumerate((2.0, 3.5, 4.5), 1)]
    batcher = Batcher(LazyBatching(eight), {"m": 3}, NoMonitor())
    ran = [
        (s.start, "ABCDEFGH"[s.first_stage], [r.id for r in s.launch.requests])
        for s in simulate(batcher, requests, lambda _: 1.0)
    ]
    assert ran[:7] == [
        (2.0, "A", [1]),
        (3.0, "B", [1]),
        (4.0, "A", [2]),
        (5.0, "A", [3]),
        (6.0, "B", [2, 3]),
        (7.0, "C", [1, 2, 3]),
        (8.0, "D", [1, 2, 3]),
    ]
    assert ran[-1] == (12.0, "H", [1, 2, 3])


# several models on one device

BOTH = CoLocated({"loose": LazyBatching(FOUR), "tight": LazyBatching(Profile("quick", (0.5, 0.5)).in_stages(2))})


@pytest.mark.parametrize(
    ("in_flight", "waiting", "expected"),
    [
        # none in flight: the model of least slack, by full times (deadlines 10 - 1, 9 - 0.5), starts
        ([], [*arrivals(10.0, kind=LOOSE), Request(7, 0.0, TIGHT, 9.0)], [7]),
        ([], [*arrivals(9.0, kind=LOOSE), Request(7, 0.0, TIGHT, 9.0)], [100]),
        # another model's new request preempts if the slack of all allows: now = 2, 1 + 0.5 s of work
        ([suspended(0, 2, 0.0, 10.0, LOOSE)], [Request(7, 0.0, TIGHT, 3.5)], [7]),
        ([suspended(0, 2, 0.0, 10.0, LOOSE)], [Request(7, 0.0, TIGHT, 3.4)], [0]),
        ([suspended(0, 2, 8.9, 10.0, LOOSE)], [Request(7, 0.0, TIGHT, 9.0)], [0]),  # it would be late itself
        # with more slack than the requests in flight it waits
        ([suspended(0, 2, 0.0, 10.0, LOOSE)], [Request(7, 0.0, TIGHT, 90.0)], [0]),
        # each model has its own stack
        ([suspended(0, 2, 0.0, 50.0, LOOSE), suspended(1, 1, 0.0, 60.0, TIGHT)], arrivals(70.0, kind=LOOSE), [100]),
        (
            [suspended(0, 1, 0.0, 50.0, LOOSE), suspended(1, 1, 0.0, 60.0, TIGHT), suspended(2, 1, 0.0, 70.0, LOOSE)],
            [],
            [0, 2],
        ),
    ],
)
def test_co_located_models_share_the_slack_and_the_least_slack_is_launched_first(
    in_flight: list[Request], waiting: list[Request], expected: list[int]
) -> None:
    assert launched(BOTH, State(2.0, waiting, in_flight)) == expected


# properties of any run


@dataclass(frozen=True)
class AnyStage:
    """Launches any requests of one kind and stage, for one or two stages, in no sensible order."""

    draws: Sequence[int]

    def decide(self, state: State, /) -> Action:
        candidates = [*state.waiting, *state.suspended]
        draw = self.draws[(len(candidates) + int(8 * state.now)) % len(self.draws)]
        first = candidates[draw % len(candidates)]
        batch = [r for r in candidates if (r.kind, r.stage) == (first.kind, first.stage)]
        return Launch(batch[: 1 + draw % 4], 1 + draw % 2)


@dataclass
class EventReplay:
    """A batcher under a sequence of events, and what happened to each request.

    Attributes:
        passed: by request, the stages that it passed, in order.
        arrived: all requests.
        gone: requests cancelled or expired.
        finished: requests that were served.
    """

    batcher: Batcher
    slo: float
    passed: dict[int, list[int]] = field(default_factory=dict)
    arrived: list[Request] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    now: float = 0.0

    def event(self, what: str, n: int) -> None:
        self.now += 0.125 * n
        if what == "a":
            now = self.now
            self.arrived.append(Request(len(self.arrived), now, M, now + self.slo, now + 40.0, stages=4))
            self.batcher.arrive(self.arrived[-1])
        elif what == "c" and self.arrived:
            self.cancel(self.arrived[n % len(self.arrived)])
        elif what == "x":
            self.gone |= {r.id for r in self.batcher.expire(self.now)}
        elif len(self.batcher):
            self.serve(n == 3)

    def cancel(self, request: Request) -> None:
        if self.batcher.cancel(request):
            self.gone.add(request.id)

    def serve(self, cancel_one: bool) -> None:
        action = self.batcher.decide(self.now)
        assert isinstance(action, Launch)
        assert 1 <= len(action.requests) <= 4
        first = action.requests[0].stage
        last = 4 if action.stages is None else min(first + action.stages, 4)
        for request in action.requests:
            self.passed.setdefault(request.id, []).extend(range(first, last))
        if cancel_one:
            self.cancel(action.requests[-1])
        self.finished += [r.id for r in self.batcher.complete(action)]


def slack_policies() -> list[Policy]:
    rules: tuple[Slack, ...] = ("printed", "remaining", "oracle")
    return [*(LazyBatching(FOUR, rule) for rule in rules), catch_up(FOUR), catch_up(DEAR)]


POLICIES = st.sampled_from(slack_policies()) | st.lists(st.integers(0, 30), min_size=1, max_size=9).map(AnyStage)
EVENTS = st.lists(st.tuples(st.sampled_from("aaacdddddx"), st.integers(0, 7)), max_size=120)


@settings(max_examples=150)
@given(policy=POLICIES, events=EVENTS, slo=st.sampled_from([0.5, 3.0, inf]))
def test_every_request_passes_every_stage_once_and_in_order(
    policy: Policy, events: list[tuple[str, int]], slo: float
) -> None:
    replay = EventReplay(Batcher(policy, {"m": 4}, ForgettingMonitor(1.0)), slo)
    for what, n in events:
        replay.event(what, n)
    while len(replay.batcher):
        replay.event("d", 1)
    assert sorted([*replay.finished, *replay.gone]) == [r.id for r in replay.arrived], "each leaves exactly once"
    assert all(replay.passed[i] == [0, 1, 2, 3] for i in replay.finished)


@settings(max_examples=100)
@given(gaps=st.lists(st.sampled_from([0.0, 0.1, 0.4, 3.0]), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_co_located_models_serve_every_request(gaps: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [("loose", 4, 50.0), ("tight", 2, 2.0)]
    requests = []
    for i, at in enumerate(np.cumsum(gaps).tolist()):
        model, stages, slo = models[int(rng.integers(2))]
        requests.append(Request(i, at, BatchKey(model), at + slo, stages=stages))
    batcher = Batcher(BOTH, {"loose": 4, "tight": 2}, NoMonitor())
    passed: dict[int, list[int]] = {}
    for service in simulate(batcher, requests, lambda _: 0.2):
        for request in service.launch.requests:
            passed.setdefault(request.id, []).append(service.first_stage)
    assert passed == {r.id: list(range(r.stages)) for r in requests}


@pytest.mark.parametrize("slack", ["printed", "remaining", "oracle"])
def test_a_request_with_more_stages_than_predicted_is_served_to_its_end(slack: Slack) -> None:
    policy = LazyBatching(FOUR, slack, predicted=2)
    requests = [Request(i, 0.3 * i, M, 0.3 * i + 4.0, stages=1 + i % 4) for i in range(20)]
    served = list(simulate(Batcher(policy, {"m": 4}, NoMonitor()), requests, lambda _: 0.25))
    passed: dict[int, list[int]] = {}
    for service in served:
        for request in service.launch.requests:
            passed.setdefault(request.id, []).append(service.first_stage)
    assert passed == {r.id: list(range(r.stages)) for r in requests}


def mean_response(spec: str, profile: Profile, load: float) -> float:
    rate = load * profile.capacity
    instants = poisson(rate, 6000 / rate, np.random.default_rng(1))
    return float(Simulation(profile, spec).run(instants).responses.mean())


@pytest.mark.parametrize(
    ("times", "load", "at_most"),
    [
        (
            [1 + 0.3 * b for b in range(1, 65)],
            0.5,
            0.97,
        ),  # a gain of 5 per cent; its standard error over 6,000 requests is about 1
        (
            [max(1.0, b / 16) for b in range(1, 65)],
            0.9,
            1.005,
        ),  # not affine: one line through all sizes loses 5 per cent
    ],
)
def test_catch_up_is_no_slower_than_greedy(times: list[float], load: float, at_most: float) -> None:
    profile = Profile("net", tuple(1e-3 * t for t in times)).in_stages(8)
    greedy = mean_response("greedy", profile, load)
    assert mean_response("catch-up:slo_ms=1000", profile, load) < at_most * greedy
    assert mean_response("lazy:slo_ms=1000", profile, load) > 1.2 * greedy


def test_batches_are_launched_whole_where_stages_add_overhead_and_gain_little() -> None:
    """At load 0.8 catching up gains almost nothing; 5 per cent of overhead would cost 20 per cent of response time."""
    whole = Profile("net", tuple(1e-3 * (0.9 + 0.2 * b) for b in range(1, 65)))
    dear = replace(whole, stage_service_times=tuple((1.05 * t / 8,) * 8 for t in whole.service_times))
    assert mean_response("catch-up:slo_ms=1000", dear, 0.8) < 1.005 * mean_response("greedy", dear, 0.8)


def test_a_spec_makes_the_rule() -> None:
    lazy = choose("lazy:slo_ms=100,slack=oracle", FOUR)
    assert (lazy.policy, lazy.slo) == (LazyBatching(FOUR, "oracle"), 0.1)
    pays = choose("catch-up:slo_ms=50", FOUR)
    assert isinstance(pays.policy, CatchUp)
    assert pays.policy.lazy == REMAINING
    assert pays.slo == 0.05
    assert pays.policy.decide(State(0.0, [])) == Wait()
