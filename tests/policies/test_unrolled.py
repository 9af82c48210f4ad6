"""Unrolled dynamic graphs: Algorithm 1 as a profile by stage."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import NoMonitor
from policies.queue.simulator import simulate
from policies.rules.catch_up import CatchUp, catch_up
from policies.rules.co_located import CoLocated
from policies.rules.lazy_batching import LazyBatching, Slack
from policies.types import BatchKey, Launch, Request, State
from policies.unrolled import Node, unrolled

NODES = [
    Node("static", (1.0, 1.5)),
    Node("encoder", (0.25, 0.5)),
    Node("encoder", (0.5, 0.5)),
    Node("static", (2.0, 2.0)),
    Node("static", (3.0, 4.0)),
    Node("decoder", (0.125, 0.25)),
]


def test_a_recurrent_part_is_a_stage_for_each_time_step() -> None:
    profile = unrolled("net", NODES, 2, 3)
    assert profile.stage_service_times == (
        (1.0, 0.75, 0.75, 2.0, 3.0, 0.125, 0.125, 0.125),
        (1.5, 1.0, 1.0, 2.0, 4.0, 0.25, 0.25, 0.25),
    )
    assert profile.service_times == (7.875, 10.25)


def test_algorithm_1_is_the_sum_up_to_the_predicted_step() -> None:
    longest: Profile = unrolled("net", NODES, 2, 80)
    policy = LazyBatching(longest, predicted=5 + 32)
    assert policy.alone == 1.0 + 2 * (0.25 + 0.5) + 2.0 + 3.0 + 32 * 0.125
    assert LazyBatching(longest).alone == pytest.approx(7.5 + 80 * 0.125)


def test_stages_beyond_the_last_take_no_time() -> None:
    profile = unrolled("net", NODES, 2, 3)
    assert profile.span(2, 8) == profile.span(2, 13) == profile.span(2, 11, 13) == 0.0
    assert profile.span(2, 7, 13) == 0.25


# the first step takes 0.625 and 1 s, each other one 0.125 and 0.25 s
SENTENCES = unrolled("sentences", [Node("static", (0.625, 1.0)), Node("decoder", (0.125, 0.25))], 0, 9)


def test_a_request_beyond_its_prediction_is_not_preempted_without_slack() -> None:
    """Its least remaining time is one step; with none remaining, the waiting request would preempt it."""
    late = Request(0, 0.0, BatchKey("sentence"), 1.5, stages=9, stage=5, started=0.0)
    picture = Request(1, 1.0, BatchKey("picture"), 99.0, stages=2)
    slacks: tuple[Slack, ...] = ("remaining", "oracle")
    for slack in slacks:
        pictures = LazyBatching(Profile("picture", (1.0, 1.0)).in_stages(2), slack)
        both = CoLocated({"sentence": LazyBatching(SENTENCES, slack, 2), "picture": pictures})
        action = both.decide(State(1.0, [picture], [late]))
        assert isinstance(action, Launch)
        assert action.requests == [late], slack


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=30)
GAPS = st.lists(st.sampled_from([0.0, 0.1, 0.6, 5.0]), min_size=30, max_size=30)


@settings(max_examples=100)
@given(
    steps=STEPS,
    gaps=GAPS,
    policy=st.sampled_from(
        [
            LazyBatching(SENTENCES),
            LazyBatching(SENTENCES, "remaining", 2),
            LazyBatching(SENTENCES, "oracle", 5),
            catch_up(SENTENCES, 4),
        ]
    ),
)
def test_each_request_runs_its_own_steps_once_and_in_order_whatever_was_predicted(
    steps: list[int], gaps: list[float], policy: LazyBatching | CatchUp
) -> None:
    instants = list(accumulate(gaps))
    here = [Request(i, instants[i], BatchKey("m"), instants[i] + 9.0, stages=n) for i, n in enumerate(steps)]
    batcher = Batcher(policy, {"m": 2}, NoMonitor())
    ran: dict[int, list[int]] = {}
    for service in simulate(batcher, here, lambda launch: 0.25 * (launch.stages or max(r.stages for r in here))):
        assert len(service.launch.requests) <= 2
        for request in service.launch.requests:
            last = request.stages if service.launch.stages is None else service.first_stage + service.launch.stages
            ran.setdefault(request.id, []).extend(range(service.first_stage, min(last, request.stages)))
    assert ran == {r.id: list(range(r.stages)) for r in here}
