"""Tests of solve, evaluate and simulate: the commands' results, and what only Python offers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchwright import Launch, Policy, Profile, State, Wait, evaluate, simulate, solve
from policies.command_line.cli import main
from policies.types import PolicyError, SpecError

P4 = Profile.load("googlenet-tesla-p4")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["solve-policy", "googlenet-tesla-p4", *arguments, "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        content = json.loads(capsys.readouterr().out)
        assert isinstance(content, dict)
        content.pop("solve_time_ms")
        return content

    return run


class Halves:
    """Launches half of the queue, from four requests on."""

    def decide(self, state: State, /) -> Launch | Wait:
        n = len(state.waiting)
        return Launch(state.waiting[: n // 2]) if n >= 4 else Wait()


class Limit:
    """static:4, as a policy of one's own."""

    def decide(self, state: State, /) -> Launch | Wait:
        return Launch(state.waiting[:4]) if len(state.waiting) >= 4 else Wait()


class TooLarge:
    """Launches batches above the profile's maximum."""

    def decide(self, state: State, /) -> Launch | Wait:
        return Launch(state.waiting) if len(state.waiting) > P4.max_batch_size else Wait()


@pytest.mark.parametrize(
    ("keywords", "flags"),
    [
        ({"load": 0.7, "w2": 1.6}, "--load 0.7 --w2 1.6"),
        ({"arrival_rate": 1500.0, "slo_mean_ms": 5.0}, "--arrival-rate 1500 --slo-mean-ms 5"),
        ({"load": 0.3, "power_cap_w": 30.0, "no_mix": True}, "--load 0.3 --power-cap-w 30 --no-mix"),
        (
            {"load": 0.6, "w2": 1.0, "method": "rvi", "max_queue_length": 80, "max_batch_size": 16},
            "--load 0.6 --w2 1 --method rvi --max-queue-length 80 --max-batch-size 16",
        ),
        (
            {"load": 0.5, "w1": 2.0, "min_batch_size": 2, "service_distribution": "erlang2"},
            "--load 0.5 --w1 2 --min-batch-size 2 --service-distribution erlang2",
        ),
    ],
    ids=["weight", "mean", "power", "rvi", "others"],
)
def test_solve_gives_what_the_command_gives_to_the_last_digit(
    keywords: dict[str, Any], flags: str, command: Any
) -> None:
    assert solve(P4, **keywords).to_json() == command(*flags.split())


@pytest.mark.slow
def test_a_percentile_is_kept_as_by_the_command(command: Any) -> None:
    expected = command("--load", "0.5", "--slo-p95-ms", "9", "--seed", "2")
    assert solve(P4, load=0.5, slo_p95_ms=9.0, seed=2).to_json() == expected


def test_evaluate_gives_what_the_command_gives_to_the_last_digit(command: Any) -> None:
    expected = command("--load", "0.7", "--evaluate", "static:8", "--w2", "1.6", "--max-batch-size", "16")
    assert evaluate(P4, "static:8", load=0.7, w2=1.6, max_batch_size=16).to_json() == expected


@pytest.mark.parametrize("spec", ["greedy", "timeout:2"])
@pytest.mark.parametrize("service", ["deterministic", "exponential"])
def test_simulate_gives_what_the_command_gives_to_the_last_digit(spec: str, service: str, command: Any) -> None:
    flags = ("--evaluate", spec, "--simulate", "3000", "--seed", "5", "--service-distribution", service)
    expected = command("--load", "0.6", *flags)["simulated"]
    result = simulate(P4, spec, load=0.6, requests=3000, seed=5, service_distribution=service)
    assert result.to_json() == expected


def test_a_solved_policy_is_simulated_as_by_the_command(command: Any) -> None:
    expected = command("--load", "0.6", "--slo-mean-ms", "6", "--simulate", "3000")
    solved = solve(P4, load=0.6, slo_mean_ms=6.0)
    assert solved.mix is not None
    assert simulate(P4, solved, load=0.6, requests=3000).to_json() == expected["simulated"]


def test_a_policy_of_ones_own_gives_what_the_same_spec_gives() -> None:
    own: Policy = Limit()
    mine, spec = (simulate(P4, each, load=0.4, requests=2000, seed=3) for each in (own, "static:4"))
    assert mine == spec
    assert mine.run.batch_sizes.tolist() == spec.run.batch_sizes.tolist()


def test_a_policy_of_ones_own_decides_the_batches() -> None:
    result = simulate(P4, Halves(), load=0.4, requests=1000)
    assert result.requests == len(result.run.responses) == 1000
    assert int(result.run.batch_sizes.sum()) == 1000
    assert min(result.run.batch_sizes[:-1]) >= 2  # the last batch is what is left at the end


def test_a_policy_of_ones_own_sees_the_measured_arrival_rate() -> None:
    rates = []

    class Watching:
        def decide(self, state: State, /) -> Launch | Wait:
            rates.append(state.arrival_rate)
            return Launch(state.waiting[:32])

    simulate(P4, Watching(), arrival_rate=1000.0, requests=5000)
    assert np.mean(rates[len(rates) // 2 :]) == pytest.approx(1000.0, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve(P4), "give either --arrival-rate PER_SECOND or --load RHO"),
        (lambda: solve(P4, load=1.2), "load 1.2 is 1 or more"),
        (lambda: solve(P4, load=0.5, w2=1.0, slo_mean_ms=5.0), "--slo-mean-ms and --w2 each choose the weight"),
        (lambda: solve(P4, load=0.5, no_mix=True), "--no-mix applies to a bound"),
        (lambda: evaluate(P4, "timeout:5", load=0.5), "'timeout:5' is not a function of the queue length"),
        (lambda: evaluate(P4, "serial", load=0.9), "policy 'serial': "),
        (lambda: simulate(P4, "fastest", load=0.5), "unknown policy 'fastest'"),
        (lambda: simulate(P4, "greedy", load=0.5, requests=0), "requests is 0; give 1 or more"),
        (lambda: simulate(P4, "greedy", load=0.5, seed=-1), "seed is -1; give 0 or more"),
        (lambda: simulate(P4, 8, load=0.5), "policy 8 is neither a spec nor a result"),  # type: ignore[arg-type]
        (lambda: simulate(P4, "greedy", load=0.5, max_batch_size=64), "max_batch_size=64 is outside 1..32"),
    ],
)
def test_an_invalid_argument_is_one_line(call: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_invalid_action_of_a_policy_is_reported() -> None:
    with pytest.raises(PolicyError, match="above the maximum 32"):
        simulate(P4, TooLarge(), load=0.4, requests=1000)


def test_without_energies_power_is_none() -> None:
    profile = Profile.from_measurements("mine", [1, 4], [0.010, 0.022])
    assert solve(profile, load=0.5).mean_power_w is None
    assert simulate(profile, "greedy", load=0.5, requests=100).mean_power_w is None


def test_a_profile_is_loaded_by_path_and_made_of_measurements(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    profile = Profile.from_measurements("mine", np.array([1, 2, 4]), np.array([0.01, 0.012, 0.02]), [0.5, 0.6, 1.0])  # type: ignore[arg-type]
    path.write_text(profile.to_json())
    assert profile.service_times == (0.01, 0.012, 0.016, 0.02)
    assert Profile.load(path) == profile == Profile.load(str(path))


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [([1, 2], [0.01], "service_time_s has 1 values for 2 batch sizes"), ([2, 4], [0.01, 0.02], "must ascend from 1")],
)
def test_measurements_are_checked(sizes: list[int], times: list[float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Profile.from_measurements("mine", sizes, times)


def test_averages_are_of_the_resource_that_is_named() -> None:
    exact = evaluate(P4, "greedy", load=0.5, resource="busy_time")
    found = simulate(P4, "greedy", load=0.5, resource="busy_time")
    assert exact.mean_power_w is None
    assert found.mean_power_w is None
    assert found.mean_resource == pytest.approx(exact.mean_resource, rel=0.01)
