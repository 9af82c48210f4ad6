"""Continuous batching with a weight of power: which requests join, and what the simulation says of energy."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.simulated import Simulation
from loadgen.sizes import RequestSizes
from policies.catalog import choose
from policies.profile import Profile
from policies.rules.continuous_batching import ContinuousBatching, SolvedJoining
from policies.smdp.decode_steps import DecodeSolution
from policies.types import Kind, Launch, Request, SpecError, State, Wait

M = Kind("m")
SIZES = 8
ROWS = tuple((0.03 + 0.004 * b, 0.03 + 0.004 * b + 99 * (0.02 + 0.0004 * b)) for b in range(1, SIZES + 1))
PROFILE = Profile("texts", tuple(row[1] / 2 for row in ROWS), lengths=(1, 100), length_service_times=ROWS)
METERED = replace(PROFILE, energies=tuple((180.0 + 6.0 * b) * t for b, t in enumerate(PROFILE.service_times, 1)))


def table(joins: list[list[int]]) -> DecodeSolution:
    return DecodeSolution(np.array(joins), 0.0, 0.0, 0.0)


POLICY = SolvedJoining(
    (1.0, 3.0), (table([[0, 0, 2], [0, 0, 1], [0, 0, 0]]), table([[0, 1, 2], [0, 1, 1], [0, 0, 0]])), 2
)


def decided(active: int, waiting: int, rate: float) -> list[int] | None:
    """The ids that a step runs; None for a wait."""
    running = [Request(i, float(i), M, stages=9, stage=1) for i in range(active)]
    queued = [Request(active + i, 50.0 + i, M, stages=9) for i in range(waiting)]
    action = POLICY.decide(State(100.0, queued, running, {M: rate}))
    if isinstance(action, Wait):
        assert action.until == pytest.approx(100.0 + 3.0 / rate)
        return None
    assert isinstance(action, Launch)
    assert action.stages == 1
    return [request.id for request in action.requests]


@pytest.mark.parametrize(
    ("active", "waiting", "rate", "expected"),
    [
        (0, 1, 1.0, None),
        (0, 2, 1.0, [0, 1]),
        (1, 1, 1.0, [0]),
        (1, 9, 1.0, [0, 1]),
        (1, 1, 2.9, [0, 1]),
        (2, 5, 2.9, [0, 1]),
        (0, 1, 0.4, [0]),
    ],
)
def test_the_table_of_the_nearest_rate_says_how_many_join(
    active: int, waiting: int, rate: float, expected: list[int] | None
) -> None:
    assert decided(active, waiting, rate) == expected


def test_without_a_weight_of_power_all_that_fit_join_and_with_it_until_sizes_are_known() -> None:
    assert choose("joining:4", METERED).policy == ContinuousBatching(4)
    weighted = choose("joining:4,w2=20", METERED)
    assert weighted.policy == ContinuousBatching(4)
    assert isinstance(weighted.solved_for([0.5] * 300).policy, SolvedJoining)


def test_a_profile_without_energies_is_an_error() -> None:
    with pytest.raises(SpecError, match="profile 'texts' has no energies; leave w2 out"):
        choose("joining:4,w2=20", PROFILE)


def test_energy_is_saved_at_low_load() -> None:
    rng = np.random.default_rng(0)
    sizes = RequestSizes(np.ceil(rng.exponential(40.0, 2000)))
    instants = np.cumsum(rng.exponential(1.0 / 0.8, 2000))
    plain, solved = (
        Simulation(METERED, f"{spec},max_wait_ms=inf", sizes=sizes).run(instants)
        for spec in ("joining:8", "joining:8,w2=30")
    )
    assert plain.mean_power is not None
    assert solved.mean_power is not None
    assert solved.mean_power < 0.93 * plain.mean_power
    assert solved.responses.mean() > plain.responses.mean()
