"""Dynamic graphs: Algorithm 1 as a profile by stage."""

import pytest

from policies.profile import Profile
from policies.rules.lazy_batching import LazyBatching
from policies.unrolled import Node, timesteps, unrolled

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


@pytest.mark.parametrize(("coverage", "steps"), [(0.1, 1), (0.5, 5), (0.51, 6), (0.9, 9), (1.0, 30)])
def test_time_steps_cover_a_share_of_the_lengths(coverage: float, steps: int) -> None:
    assert timesteps([30, 9, 8, 7, 6, 5, 4, 3, 2, 1], coverage) == steps
