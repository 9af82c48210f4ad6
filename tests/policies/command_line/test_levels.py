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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--priority-shares is missing"),
        (["--priority-shares", "0.1,0.8"], "--priority-shares 0.1,0.8: give 2 numbers above 0 that sum to 1"),
        (["--priority-shares", "0.1,0.9", "--simulate", "10"], "--priority-weights does not take --simulate"),
        (["--priority-shares", "0.1,0.9", "--slo-p95-ms", "2"], "cannot be kept beside bulk: the most is"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = call(*LEVELS, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
