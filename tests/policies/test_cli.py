"""solve-policy as its users call it: a process, its output, its exit code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(sys.executable).parent / "solve-policy"


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(COMMAND), *arguments], capture_output=True, text=True, check=False)


def solve(*arguments: str) -> Any:
    done = call("googlenet-tesla-p4", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_answer_has_the_fixed_keys_and_the_reference_cost() -> None:
    answer = solve("--load", "0.9", "--w2", "1")
    assert answer["average_cost"] == pytest.approx(66.130724, abs=1e-6)
    assert set(answer) == {
        *("profile", "arrival_rate_hz", "load", "w1", "w2", "method", "average_cost", "mean_response_time_ms"),
        *("mean_power_w", "energy_per_request_mj", "mean_batch_size", "batch_size", "iterations", "solve_time_ms"),
    }
    cost = answer["mean_response_time_ms"] + answer["mean_power_w"]
    assert answer["average_cost"] == pytest.approx(cost, rel=1e-9)


def test_a_policy_is_evaluated_exactly_and_simulated_alike() -> None:
    answer = solve("--load", "0.7", "--evaluate", "static:8", "--simulate", "100000")
    assert answer["mean_response_time_ms"] == pytest.approx(6.852, abs=5e-4)
    assert answer["mean_power_w"] == pytest.approx(46.287, abs=5e-4)
    # the standard error of 100,000 correlated response times is about 0.5 per cent here
    assert answer["simulated"]["mean_ms"] == pytest.approx(6.852, rel=0.02)
    assert answer["simulated"]["mean_power_w"] == pytest.approx(46.287, rel=0.01)
    assert set(answer["simulated"]) == {
        *("requests", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_power_w")
    }


def test_a_clocked_policy_is_measured_by_simulation_only() -> None:
    answer = solve("--load", "0.5", "--evaluate", "timeout:2", "--simulate", "20000")
    assert answer["method"] == "simulation"
    assert answer["average_cost"] is None
    assert answer["simulated"]["mean_ms"] > 0


def test_a_solved_table_is_simulated_as_it_is() -> None:
    answer = solve("--load", "0.7", "--w2", "1.6", "--simulate", "60000", "--seed", "3")
    assert answer["simulated"]["mean_ms"] == pytest.approx(answer["mean_response_time_ms"], rel=0.02)
    assert answer["simulated"]["mean_power_w"] == pytest.approx(answer["mean_power_w"], rel=0.01)


def test_an_unstable_policy_is_refused_with_its_capacity() -> None:
    done = call("googlenet-tesla-p4", "--load", "0.9", "--evaluate", "static:8")
    assert done.returncode == 2
    assert "0.774" in done.stderr


def test_many_loads_give_rows_and_a_file_that_serves(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    rows = solve("--rates", "0.1:0.9:5", "--w2", "1", "--output", str(path))["rows"]
    assert [row["load"] for row in rows] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    file = json.loads(path.read_text())
    assert file["schema"] == "batchwright.policy/1"
    assert [row["batch_size"] for row in file["rows"]] == [row["batch_size"] for row in rows]
    again = solve("--load", "0.7", "--w2", "1", "--evaluate", str(path))
    assert again["average_cost"] == pytest.approx(rows[3]["average_cost"], rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--load", "0.5"], "no profile 'nowhere'"),
        (["googlenet-tesla-p4"], "--arrival-rate PER_SECOND or --load"),
        (["googlenet-tesla-p4", "--load", "0.5", "--arrival-rate", "3"], "either"),
        (["googlenet-tesla-p4", "--load", "1.2"], "1.2"),
        (["googlenet-tesla-p4", "--load", "nan"], "nan"),
        (["googlenet-tesla-p4", "--load", "half"], "--load"),
        (["googlenet-tesla-p4", "--load", "0.5", "--w1", "0"], "w1"),
        (["googlenet-tesla-p4", "--load", "0.5", "--w2", "-1"], "w2"),
        (["googlenet-tesla-p4", "--load", "0.5", "--max-batch-size", "33"], "33"),
        (["googlenet-tesla-p4", "--load", "0.5", "--min-batch-size", "0"], "0"),
        (["googlenet-tesla-p4", "--load", "0.5", "--evaluate", "timeout:5"], "--simulate"),
        (["googlenet-tesla-p4", "--load", "0.5", "--evaluate", "clever"], "clever"),
        (["googlenet-tesla-p4", "--load", "0.5", "--simulate", "-5"], "-5"),
        (["googlenet-tesla-p4", "--load", "0.5", "--simulate", "5", "--seed", "-1"], "--seed -1"),
        (["googlenet-tesla-p4", "--rates", "0.1:0.9"], "LO:HI:N"),
        (["googlenet-tesla-p4", "--rates", "0.1:1.9:4"], "ascend within"),
        (["googlenet-tesla-p4", "--rates", "0.1:0.9:3", "--load", "0.5"], "--load"),
        (["googlenet-tesla-p4", "--load", "0.5", "--output", "/nowhere/x.json"], "/nowhere/x.json"),
        (["googlenet-tesla-p4", "--laod", "0.5"], "--laod"),
        ([], "profile"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2, done.stderr
    assert says.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
