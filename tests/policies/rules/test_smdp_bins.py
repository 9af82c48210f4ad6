"""One decision for all bins: the batch that is launched, the row of the rate, and the policy once sizes are known."""

from dataclasses import replace

import numpy as np
import pytest

from policies.catalog import ModelPolicy, choose
from policies.planning.simulation import RequestSizes, Simulation
from policies.profile import Profile
from policies.rules import smdp_bins
from policies.rules.multi_bin import Bins
from policies.rules.smdp_bins import SmdpBins, solve_smdp_bins
from policies.sizing.size_distributions import longest_request_profile
from policies.solver.several_bins import BinnedSolution
from policies.types import BatchKey, Launch, Request, SpecError, State, Wait

SIZES = np.linspace(1.0, 20.0, 500)
PROFILE = longest_request_profile(SIZES, 4)
M = BatchKey("m")


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single load, since each is solved."""
    monkeypatch.setattr(smdp_bins, "_LOADS", (0.7,))


def table(launch: tuple[int, int]) -> BinnedSolution:
    """A table that launches this at two requests of each bin, and waits elsewhere."""
    batch = np.zeros((3, 3, 2), dtype=int)
    batch[2, 2] = launch
    return BinnedSolution(batch, 0.0, 0.0, 0.0, 1)


POLICY = SmdpBins((10.0,), (1.0, 3.0), (table((1, 2)), table((2, 0))), 4)


def state(sizes: list[float], rate: float | None = None) -> State:
    waiting = [Request(i, float(i), M, size=size) for i, size in enumerate(sizes)]
    return State(100.0, waiting, rates={} if rate is None else {M: rate})


def launched(policy: SmdpBins, sizes: list[float], rate: float | None = None) -> list[int]:
    action = policy.decide(state(sizes, rate))
    return [request.id for request in action.requests] if isinstance(action, Launch) else []


def test_the_oldest_requests_of_each_bin_are_launched_in_order_of_arrival() -> None:
    assert launched(POLICY, [12.0, 3.0, 15.0, 2.0]) == [0, 1, 2]
    assert launched(POLICY, [3.0, 12.0, 2.0, 10.0]) == [0, 1, 3], "a size on the edge is in the bin above"


@pytest.mark.parametrize(("rate", "expected"), [(None, [0, 1, 2]), (0.6, [0, 1, 2]), (1.9, [0, 1, 2]), (2.1, [1, 3])])
def test_the_row_is_that_of_the_nearest_rate(rate: float | None, expected: list[int]) -> None:
    assert launched(POLICY, [12.0, 3.0, 15.0, 2.0], rate) == expected


def test_a_wait_ends_once_the_rate_has_decayed_and_then_all_are_launched() -> None:
    assert POLICY.decide(state([12.0], 1.5)) == Wait(100.0 + 3.0 / 1.5)
    assert launched(POLICY, [12.0, 3.0, 15.0, 2.0, 1.0], 0.4) == [0, 1, 2, 3]


def test_a_batch_takes_the_time_of_its_longest_request_by_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smdp_bins, "_LOADS", (0.1,))
    texts = Profile("texts", (0.5, 0.6), lengths=(10, 20), length_service_times=((1.0, 1.5), (1.2, 1.9)))
    policy = solve_smdp_bins([1.0, 1.25, 1.5] * 20, texts, 2, 0.0)
    slower = solve_smdp_bins(
        [1.0, 1.25, 1.5] * 20, replace(texts, length_service_times=((1.0, 1.5), (2.0, 3.0))), 2, 0.0
    )
    assert policy.max_batch_size == 2
    assert policy.rates[-1] > 1.3 * slower.rates[-1], "the batches of two take longer"


def test_each_table_is_solved_for_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smdp_bins, "_LOADS", (0.1, 0.7))
    policy = solve_smdp_bins(SIZES.tolist(), PROFILE.truncated(2), 2, 0.0)
    assert policy.rates[1] == pytest.approx(7 * policy.rates[0])
    light, heavy = (solution.mean_response_time for solution in policy.tables)
    assert heavy > 1.1 * light


def simulated(spec: str, rate: float, seed: int) -> float:
    sizes = np.random.default_rng(seed).choice(SIZES, 2000)
    instants = np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0 / rate, len(sizes)))
    return float(Simulation(PROFILE, spec, sizes=RequestSizes(sizes)).run(instants).responses.mean())


def test_response_times_are_below_those_of_greedy_bins() -> None:
    means = {
        spec: [simulated(f"{spec},max_wait_ms=inf", 0.19, seed) for seed in range(3)]
        for spec in ("smdp-bins:2", "multi-bin:2,inner=greedy")
    }
    together, apart = means.values()
    assert all(a < 0.98 * b for a, b in zip(together, apart, strict=True))


def test_until_sizes_are_known_the_policy_is_greedy_and_all_requests_are_of_one_kind() -> None:
    chosen = choose("smdp-bins:2", PROFILE)
    assert isinstance(chosen.policy.decide(state([12.0, 3.0])), Launch)
    assert chosen.arriving("m", 12.0) == chosen.arriving("m", 3.0) == M
    solved = chosen.with_sizes(SIZES.tolist())
    assert solved.kind("m", 19.0) == solved.kind("m", 1.0) == M


def learning(sizes: list[float], chosen: ModelPolicy) -> ModelPolicy:
    for size in sizes:
        chosen.arriving("m", size)
    return chosen


def test_the_policy_is_solved_for_enough_sizes_and_again_when_their_batch_time_changes() -> None:
    drawn = np.random.default_rng(0).choice(SIZES, 2512)
    chosen = learning(drawn[:255].tolist(), choose("smdp-bins:2", PROFILE))
    assert not chosen.unsolved_sizes()
    sizes = learning(drawn[255:512].tolist(), chosen).unsolved_sizes()
    assert len(sizes) == 512
    solved = chosen.with_solved_sizes(sizes)
    assert isinstance(solved.bins, Bins)
    assert solved.solved_sizes == tuple(sizes)
    assert not solved.unsolved_sizes()
    assert learning((1.2 * drawn[512:]).tolist(), solved).unsolved_sizes()


def test_errors_of_sizes_are_not_simulated() -> None:
    sizes = RequestSizes(SIZES, bin_error=0.1)
    with pytest.raises(SpecError, match="--bin-error is for policies that keep bins apart"):
        Simulation(PROFILE, "smdp-bins:2", sizes=sizes).run(np.arange(1.0, 501.0))


def test_larger_batches_than_can_be_solved_need_a_bound() -> None:
    large = longest_request_profile(SIZES, 64)
    with pytest.raises(SpecError, match="batches go up to 64 here; write batch_size=32 or less"):
        choose("smdp-bins:2", large)
    with pytest.raises(SpecError, match="batches go up to 64 here; write batch_size=16 or less"):
        choose("smdp-bins:3", large)
    assert choose("smdp-bins:2,batch_size=16", large).bins is not None
    with pytest.raises(SpecError, match=r"4 is not a whole number within 1\.\.3"):
        choose("smdp-bins:4", large)
