"""Continuous batching with a weight of power: which requests join, and what the simulation says of energy."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.simulated import Simulation
from loadgen.sizes import RequestSizes
from policies.catalog import check_spec, choose
from policies.profile import Profile
from policies.rules import continuous_batching
from policies.rules.continuous_batching import ContinuousBatching, SolvedContinuousBatching
from policies.sizing.size_models import lengths_of
from policies.smdp.decode_steps import DecodeSolution
from policies.types import Kind, Launch, Request, SpecError, State, Wait

M = Kind("m")
SIZES = 8
ROWS = tuple((0.03 + 0.004 * b, 0.03 + 0.004 * b + 99 * (0.02 + 0.0004 * b)) for b in range(1, SIZES + 1))
PROFILE = Profile("texts", tuple(row[1] / 2 for row in ROWS), lengths=(1, 100), length_service_times=ROWS)
METERED = replace(PROFILE, energies=tuple((180.0 + 6.0 * b) * t for b, t in enumerate(PROFILE.service_times, 1)))


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few loads, since each is solved."""
    monkeypatch.setattr(continuous_batching, "_LOADS", (0.2, 0.4))


def table(joins: list[list[int]]) -> DecodeSolution:
    return DecodeSolution(np.array(joins), 0.0, 0.0, 0.0)


POLICY = SolvedContinuousBatching(
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
    assert isinstance(weighted.with_solved_sizes([0.5] * 300).policy, SolvedContinuousBatching)


def test_a_profile_without_energies_is_an_error() -> None:
    with pytest.raises(SpecError, match="profile 'texts' has no energies; leave w2 out"):
        choose("joining:4,w2=20", PROFILE)


def test_energy_is_saved_at_low_load() -> None:
    rng = np.random.default_rng(0)
    sizes = RequestSizes(np.ceil(rng.exponential(40.0, 600)))
    instants = np.cumsum(rng.exponential(1.0 / 0.8, 600))
    plain, solved = (
        Simulation(METERED, f"{spec},max_wait_ms=inf", sizes=sizes).run(instants)
        for spec in ("joining:8", "joining:8,w2=30")
    )
    assert plain.mean_power is not None
    assert solved.mean_power is not None
    assert solved.mean_power < 0.93 * plain.mean_power
    assert solved.responses.mean() > plain.responses.mean()


def test_the_flag_of_the_weight_is_for_the_policy_itself() -> None:
    assert isinstance(
        choose("joining:4", METERED, {"w2": "20"}).with_solved_sizes([0.5] * 300).policy, SolvedContinuousBatching
    )
    check_spec("joining:4", 8, {"w2": "20"}, has_lengths=True)


def test_a_weighted_policy_cannot_decide_within_a_bin() -> None:
    for check in (lambda spec: choose(spec, METERED), lambda spec: check_spec(spec, 8, has_lengths=True)):
        with pytest.raises(SpecError, match="solved for sizes cannot be used within a bin; leave w2 out"):
            check("multi-bin:2,inner=joining:w2=20")


def test_the_maximum_wait_holds() -> None:
    chosen = choose("joining:4,w2=20,max_wait_ms=100", METERED).with_solved_sizes([0.5] * 300)
    assert isinstance(chosen.policy, SolvedContinuousBatching)
    waits = replace(POLICY, max_wait=chosen.policy.max_wait)
    early, late = (
        waits.decide(State(50.0 + after, [Request(0, 50.0, M, stages=9)], (), {M: 1.0})) for after in (0.05, 0.1)
    )
    assert early == Wait(50.1)
    assert isinstance(late, Launch)


def test_a_policy_that_is_solved_for_sizes_is_not_simulated_without_them() -> None:
    with pytest.raises(SpecError, match="is solved for the sizes of requests; simulate it with --sizes"):
        Simulation(replace(METERED, energies=None), "smdp-bins:2").run(np.arange(1.0, 9.0))


def test_lengths_follow_from_sizes_also_where_service_times_do_not_grow() -> None:
    flat = replace(PROFILE, length_service_times=((0.5, 0.5),) * SIZES)
    assert np.isfinite(lengths_of([0.4, 0.5, 0.6], flat)).all()
    assert lengths_of([PROFILE.service_time(1, 150.0)], PROFILE).tolist() == pytest.approx([150.0])
