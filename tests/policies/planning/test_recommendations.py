"""Recommended bins and batch sizes for a size distribution, a rate and a bound."""

import json
from functools import cache
from subprocess import CompletedProcess

import numpy as np
import pytest

from policies.command_line.cli import main
from policies.planning import recommendations
from policies.planning.recommendations import BinningProblem, SimulatedCandidate, recommend
from policies.planning.simulation import RequestSizes, Simulation
from policies.profile import Profile
from policies.sizing.size_distributions import longest_request_profile, parse_sizes
from policies.types import SpecError
from tests.support.commands import run_command

PAPER = BinningProblem(0.5, parse_sizes("uniform:1:20"), None, 8)


@pytest.fixture(autouse=True)
def _fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendations, "_SIMULATED", 20_000)


@cache
def recommended(bound: float | None, rate: float = 0.5) -> list[SimulatedCandidate]:
    return recommend(BinningProblem(rate, PAPER.sizes, None, 8), bound)


def test_with_a_bound_the_largest_capacity_that_keeps_it_comes_first() -> None:
    tried = recommended(45.0)
    kept = [each for each in tried if each.keeps(45.0)]
    assert tried[0].candidate.capacity == max(each.candidate.capacity for each in kept)
    assert tried[: len(kept)] == kept
    assert len(kept) < len(tried)
    assert tried[0].response.value + 2 * tried[0].response.standard_error <= 45.0


def test_a_wider_bound_allows_more_bins_and_more_capacity() -> None:
    narrow, wide = (recommended(bound)[0].candidate for bound in (38.5, 90.0))
    assert wide.bins > narrow.bins
    assert wide.capacity > narrow.capacity


def test_without_a_bound_the_least_mean_comes_first() -> None:
    means = [each.response.value for each in recommended(None)]
    assert means == sorted(means)
    assert {each.candidate.batch_size for each in recommended(None, rate=0.05)} == {
        1
    }  # at this rate no request waits for others


def test_the_mean_agrees_with_a_simulation_of_the_recommended_policy() -> None:
    best = recommended(45.0)[0]
    rng = np.random.default_rng(11)
    sizes, arrivals = rng.uniform(1.0, 20.0, 20_000), np.cumsum(rng.exponential(2.0, 20_000))
    run = Simulation(longest_request_profile(sizes, 8), best.candidate.spec, sizes=RequestSizes(sizes)).run(arrivals)
    # 2500 batches, each within 20 s and the queue behind a load of 0.8: 1 per cent is about one standard error
    assert run.responses.mean() == pytest.approx(best.response.value, rel=0.05)
    assert best.response.value > 0.99 * best.candidate.least


def test_an_unstable_rate_is_rejected_with_the_maximum_throughput() -> None:
    with pytest.raises(SpecError, match=r"the maximum is 0\.7"):
        recommended(None, rate=0.9)


def test_an_unreachable_bound_is_rejected_with_the_least_mean() -> None:
    with pytest.raises(SpecError, match=r"1000 ms: the least, by multi-bin:\d"):
        recommended(1.0)


def test_with_a_profile_sizes_are_lengths_and_larger_batches_take_longer() -> None:
    rows = tuple((0.1 + 0.01 * b, 1.1 + 0.01 * b) for b in range(1, 9))
    profile = Profile("small", tuple(row[1] for row in rows), lengths=(1, 101), length_service_times=rows)
    problem = BinningProblem(1.0, lambda number, rng: rng.integers(1, 102, number).astype(float), profile, 8)
    assert problem.times(4, np.array([1.0, 51.0, 101.0])).tolist() == pytest.approx([0.14, 0.64, 1.14])
    capacities = {each.candidate.batch_size: each.candidate.capacity for each in recommend(problem, 8.0)}
    # one bin of 1: 1 / (0.11 + 0.5); of 8 in many bins nearly 8 / (0.18 + 0.5)
    assert capacities[1] == pytest.approx(1.0 / 0.61, rel=0.01)
    assert 1.0 / 0.61 < max(capacities.values()) < 8.0 / 0.68


def test_a_single_size_gives_one_bin() -> None:
    assert {
        each.candidate.bins for each in recommend(BinningProblem(0.5, parse_sizes("uniform:3:3"), None, 4), 60.0)
    } == {1}


def call(*arguments: str) -> "CompletedProcess[str]":
    return run_command(main, "solve-policy", *arguments)


def test_the_command_prints_the_recommended_policy_first() -> None:
    flags = ("longest", "--sizes", "uniform:1:20", "--arrival-rate", "0.5", "--max-batch-size", "8")
    done = call(*flags, "--slo-mean-ms", "45000", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    best = result["rows"][0]
    assert set(best) == {
        *("policy", "bins", "batch_size", "capacity_hz", "load", "least_response_time_ms", "mean_response_time_ms"),
        *("standard_error_ms", "bound_kept"),
    }
    assert best["policy"] == f"multi-bin:{best['bins']},batch_size={best['batch_size']},max_wait_ms=inf"
    assert best["bound_kept"]
    assert result["bound"] == {"slo_mean_ms": 45000.0}
    assert call(*flags, "--slo-mean-ms", "45000").stdout.startswith(f"recommended: {best['policy']}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["longest"], "add --sizes"),
        (["longest", "--sizes", "uniform:1:20"], "--arrival-rate None"),
        (["longest", "--sizes", "uniform:1:20", "--arrival-rate", "0"], "--arrival-rate 0"),
        (["longest", "--sizes", "uniform:1:20", "--load", "0.5"], "leave --load out"),
        (["longest", "--sizes", "uniform:1:20", "--arrival-rate", "1", "--no-mix"], "leave --no-mix out"),
        (["longest", "--sizes", "normal:1:20", "--arrival-rate", "1"], "'normal:1:20' is none of uniform"),
        (["longest", "--sizes", "uniform:20:1", "--arrival-rate", "1"], "20 is above 1"),
        (["longest", "--sizes", "exponential:-1", "--arrival-rate", "1"], "'-1' is not a positive number"),
        (["longest", "--sizes", "exponential:ten", "--arrival-rate", "1"], "'ten' is not a positive number"),
        (["longest", "--sizes", "trace:/nowhere:x", "--arrival-rate", "1"], "no trace file '/nowhere'"),
        (["longest", "--sizes", "uniform:1:2", "--arrival-rate", "1", "--max-batch-size", "0"], "--max-batch-size 0"),
        (["longest", "--sizes", "uniform:1:2", "--arrival-rate", "1", "--slo-mean-ms", "-1"], "--slo-mean-ms -1"),
        (["googlenet-tesla-p4", "--sizes", "uniform:1:2", "--arrival-rate", "1"], "no service times by length"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
