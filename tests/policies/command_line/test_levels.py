"""solve-policy with priority levels."""

import json

import pytest

from tests.policies.command_line.test_cli import call

LEVELS = ("googlenet-tesla-p4", "--max-batch-size", "8", "--load", "0.6", "--priority-weights", "16,1")


def test_the_means_of_the_levels_are_printed() -> None:
    found = json.loads(call(*LEVELS, "--priority-shares", "0.1,0.9", "--json").stdout)
    assert found["average_cost"] == pytest.approx(7.336, abs=2e-3)
    assert found["greedy_average_cost"] == pytest.approx(7.804, abs=2e-3)
    first, second = found["mean_response_time_ms"]
    assert 16 * 0.1 * first + 0.9 * second == pytest.approx(found["average_cost"], rel=1e-6)
    assert found["batch_size"][0][0] == 0
    assert found["priority_weights"] == [16.0, 1.0]


def test_the_largest_batch_with_bulk_is_printed() -> None:
    arguments = (*LEVELS, "--priority-shares", "0.1,0.9", "--slo-p95-ms", "6")
    found = json.loads(call(*arguments, "--json").stdout)
    rows = {size: (share, throughput) for size, share, throughput in found["by_largest_batch"]}
    chosen = found["largest_batch_with_bulk"]
    assert rows[chosen] == (found["share_within"], found["bulk_throughput_hz"])
    assert found["share_within"] >= 0.95
    assert all(each[1] <= found["bulk_throughput_hz"] for each in rows.values() if each[0] >= 0.95)
    printed = call(*arguments).stdout
    assert "largest_batch_with_bulk" in printed
    assert len(printed.splitlines()) > len(rows)


@pytest.mark.slow
def test_the_fewest_devices_are_planned() -> None:
    model, weights = "googlenet-tesla-p4", ("--priority-weights", "8,1", "--priority-shares", "0.1,0.9")
    load = ("--plan", "--rate", "9600", *weights)
    arguments = (model, *load, "--slo-p95-ms", "8", "--spare", "1", "--simulate", "40000")
    found = json.loads(call(*arguments, "--json").stdout)
    rows = found["candidates"]
    assert [row["bound_kept"] for row in rows[-3:]] == [False, True, True]
    assert [row["devices"] for row in rows[-3:]] == [found["devices"] - n for n in (2, 1, 0)]
    assert found["simulated"]["share_within"] >= 0.95
    assert found["simulated"]["bound_kept"]
    printed = call(*arguments).stdout
    assert "Without 1 of the" in printed
    assert "of level 1 in time" in printed
    assert "plans one model" in call(f"{model}:1,{model}:6", *load, "--slo-p95-ms", "40").stderr
    few = call(model, *load, "--slo-p95-ms", "8", "--simulate", "3")
    assert "--simulate 3 has no requests of one of the levels" in few.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--priority-shares is missing"),
        (["--priority-shares", "0.1,0.8"], "--priority-shares 0.1,0.8: give 2 numbers above 0 that sum to 1"),
        (["--priority-shares", "0.1,0.9", "--simulate", "10"], "--simulate: add --plan, or leave"),
        (["--priority-shares", "0.1,0.9", "--slo-p95-ms", "2"], "cannot be kept beside bulk: the most is"),
        (["--priority-shares", "0.1,0.9", "--slo-mean-ms", "9"], "--priority-weights does not take --slo-mean-ms"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = call(*LEVELS, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
