"""What the live benchmark of percentiles computes from the answers."""

import pytest

from benchmarks.objective import BOUND_MS, seen_by_clients
from policies.profile import load_profile


def answer(at: float, response_ms: float, status: int = 200) -> dict[str, float]:
    return {"scheduled_s": at, "response_ms": response_ms, "status": status, "energy_mj": 200.0}


def test_a_failed_request_is_not_within_the_bound_and_others_times_do_not_count() -> None:
    answers = [answer(0.5, 5 * BOUND_MS), *[answer(1.0 + 0.1 * i, 50.0) for i in range(8)]]
    answers += [answer(1.9, 2 * BOUND_MS), answer(1.95, 1.0, 503), answer(2.0, 5 * BOUND_MS)]
    seen = seen_by_clients(answers, 1.0, 2.0, 0.5)
    assert (seen["requests"], seen["failed"], seen["share"]) == (10, 1, 0.8)
    capacity = load_profile("googlenet-tesla-p4-x10").capacity
    assert seen["power_w"] == pytest.approx(0.2 * 0.5 * capacity, abs=1e-3)
