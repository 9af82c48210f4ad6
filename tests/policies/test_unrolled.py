"""Unrolled dynamic graphs: Algorithm 1 as a profile by stage."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import choose, in_stages
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.simulator import simulate
from policies.rules.catch_up import CatchUp
from policies.rules.co_located import CoLocated
from policies.rules.lazy_batching import LazyBatching, Slack
from policies.types import Kind, Launch, Request, SpecError, State
from policies.unrolled import Node, unrolled, with_decode_steps

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


# a prompt takes 0.5 and 0.75 s, a token 0.125 and 0.25 s
TEXTS = Profile("texts", (1.0, 2.0), lengths=(2, 10), length_service_times=((0.75, 1.75), (1.25, 3.25)))


def test_the_first_stage_of_a_text_is_prefill_and_token_and_the_others_are_tokens() -> None:
    staged = with_decode_steps(TEXTS, 4)
    assert staged.stage_service_times == ((0.625, 0.125, 0.125, 0.125), (1.0, 0.25, 0.25, 0.25))
    assert staged.span(1) == TEXTS.service_time(1, 4)


def test_stages_beyond_the_last_take_no_time() -> None:
    staged = with_decode_steps(TEXTS, 4)
    assert staged.span(2, 4) == staged.span(2, 9) == staged.span(2, 7, 9) == 0.0
    assert staged.span(2, 3, 9) == 0.25


@pytest.mark.parametrize(("steps", "alone"), [("", 1.75), (",timesteps=3", 0.875), (",timesteps=12", 2.0)])
def test_a_spec_sets_the_planned_time_steps(steps: str, alone: float) -> None:
    lazy = choose(f"lazy:slo_ms=100,slack=remaining{steps}", TEXTS)
    assert isinstance(lazy.policy, LazyBatching)
    assert lazy.policy.alone == pytest.approx(alone)
    pays = choose(f"catch-up:slo_ms=100{steps}", TEXTS)
    assert isinstance(pays.policy, CatchUp)
    assert pays.policy.lazy == lazy.policy
    assert lazy.profile is pays.profile is TEXTS, "the profile of the dispatcher"


@pytest.mark.parametrize("spec", ["lazy:slo_ms=100", "catch-up:slo_ms=100", "joining", "multi-bin:2,inner=joining"])
def test_a_classifier_has_no_decode_steps(spec: str) -> None:
    with pytest.raises(SpecError, match="use greedy or multi-bin"):
        choose(spec, replace(TEXTS, generates=False))


def test_requests_without_lengths_use_stages_even_if_the_profile_has_lengths() -> None:
    staged = in_stages("lazy:slo_ms=100", TEXTS)
    assert (staged.stages, staged.lengths) == (10, None)
    assert in_stages("catch-up:slo_ms=100", TEXTS, 4).stage_service_times == ((0.25,) * 4, (0.5,) * 4)


def test_a_text_beyond_its_prediction_is_not_preempted_without_slack() -> None:
    """Its least remaining time is one step; with none remaining, the waiting request would preempt it."""
    late = Request(0, 0.0, Kind("text"), 1.5, stages=9, stage=5, started=0.0)
    picture = Request(1, 1.0, Kind("picture"), 99.0, stages=2)
    slacks: tuple[Slack, ...] = ("remaining", "oracle")
    for slack in slacks:
        text = choose(f"lazy:slo_ms=1500,slack={slack},timesteps=2", TEXTS).policy
        assert isinstance(text, LazyBatching)
        both = CoLocated({"text": text, "picture": LazyBatching(Profile("picture", (1.0, 1.0)).in_stages(2), slack)})
        action = both.decide(State(1.0, [picture], [late]))
        assert isinstance(action, Launch)
        assert action.requests == [late], slack


def test_images_have_no_time_steps() -> None:
    with pytest.raises(SpecError, match="leave them out"):
        choose("lazy:slo_ms=100,timesteps=3", Profile("pictures", (1.0,)))


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=30)
GAPS = st.lists(st.sampled_from([0.0, 0.1, 0.6, 5.0]), min_size=30, max_size=30)


@settings(max_examples=100)
@given(
    steps=STEPS,
    gaps=GAPS,
    spec=st.sampled_from(
        [
            "lazy:slo_ms=3000",
            "lazy:slo_ms=9000,slack=remaining,timesteps=2",
            "lazy:slo_ms=9000,slack=oracle,timesteps=5",
            "catch-up:slo_ms=9000,timesteps=4",
        ]
    ),
)
def test_each_text_runs_its_own_steps_once_and_in_order_whatever_was_predicted(
    steps: list[int], gaps: list[float], spec: str
) -> None:
    chosen = choose(spec, TEXTS)
    instants = list(accumulate(gaps))
    here = [Request(i, instants[i], Kind("m"), instants[i] + chosen.slo, stages=n) for i, n in enumerate(steps)]
    batcher = Batcher(chosen.policy, {"m": 2}, chosen.monitor, ("m",))
    ran: dict[int, list[int]] = {}
    for service in simulate(batcher, here, lambda launch: 0.25 * (launch.stages or max(r.stages for r in here))):
        assert len(service.launch.requests) <= 2
        for request in service.launch.requests:
            last = request.stages if service.launch.stages is None else service.first_stage + service.launch.stages
            ran.setdefault(request.id, []).extend(range(service.first_stage, min(last, request.stages)))
    assert ran == {r.id: list(range(r.stages)) for r in here}
