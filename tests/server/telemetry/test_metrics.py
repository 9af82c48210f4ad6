"""Requests that miss the objective, as they are counted."""

from math import inf

import pytest

from server.telemetry.metrics import Metrics


def exported(metrics: Metrics, name: str) -> float | None:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(f'{name}{{model="m"}}')]
    return float(lines[0].split()[-1]) if lines else None


@pytest.mark.parametrize(
    ("outcome", "seconds", "late"),
    [
        ("ok", 0.1, 0),
        ("ok", 0.11, 2),
        ("expired", 0.05, 0),
        ("expired", 0.2, 2),
        ("cancelled", 0.05, 0),
        ("cancelled", 0.2, 2),
        ("failed", 0.01, 2),
        ("failed", -inf, 2),
        ("rejected", 9.0, 0),
        ("bad_input", 9.0, 0),
    ],
)
def test_a_request_is_late_if_the_objective_passes_before_its_end_or_if_it_fails(
    outcome: str, seconds: float, late: int
) -> None:
    metrics = Metrics()
    metrics.watch("m", lambda: 0.0, lambda: 0.0, lambda: 0.0)
    metrics.objective("m", 0.1, 0.95)
    metrics.outcome("m", outcome, 2, seconds)
    assert exported(metrics, "batchwright_deadline_missed_total") == late


def test_no_request_is_late_without_an_objective() -> None:
    metrics = Metrics()
    metrics.watch("m", lambda: 0.0, lambda: 0.0, lambda: 0.0)
    assert exported(metrics, "batchwright_deadline_missed_total") == 0, "rate() misses the first count of a new series"
    metrics.outcome("m", "failed", 1, 9.0)
    assert exported(metrics, "batchwright_deadline_missed_total") == 0


def test_the_objective_is_exported_until_it_is_removed() -> None:
    metrics = Metrics()
    metrics.objective("m", inf, 0.95)
    assert exported(metrics, "batchwright_objective_seconds") is None
    metrics.objective("m", 0.03, 0.95)
    assert exported(metrics, "batchwright_objective_seconds") == 0.03
    assert exported(metrics, "batchwright_objective_share") == 0.95
    metrics.objective("m", inf, 0.95)
    assert exported(metrics, "batchwright_objective_seconds") is None
    assert exported(metrics, "batchwright_objective_share") is None
