"""The history of the last ten minutes, fed as by the metrics."""

import pytest

from policies.types import BatchKey, Launch, Request
from server.telemetry.batch_record import BatchRecord
from server.telemetry.history import BATCHES, POINTS, WINDOW, History

M = "m"


def launch(size: int, waited: float = 0.25) -> Launch:
    return Launch([Request(i, 1.0, BatchKey(M), started=1.0 + waited) for i in range(size)], reason="policy")


def batch(policy: str, launch: Launch, service: float, energy: float | None) -> BatchRecord:
    return BatchRecord("d", policy, launch, 0, True, launch.requests, 0.0, service, energy, "nvml")


def test_a_point_has_the_totals_of_its_second_only() -> None:
    history = History()
    history.arrived(M, 3)
    history.arrived(M, 2)
    for service in (0.010, 0.030):
        history.batch_completed(batch("greedy", launch(2), service, 0.5))
    history.batch_completed(batch("greedy", launch(1), 0.005, 0.25))
    history.requests_completed(M, [0.1, 0.2, 0.3, 0.4, 0.5])
    history.tick(M, 1000.0, 7, 42.0)
    history.tick(M, 1001.0, 0, 40.0)
    first, second = history.points(M, 0)
    assert first["sizes"] == [[1, 1, pytest.approx(5.0)], [2, 2, pytest.approx(20.0)]]
    assert (first["arrivals"], first["answered"], first["joules"]) == (5, 5, 1.25)
    assert (first["queue"], first["rate"], first["t"], first["span"]) == (7, 42.0, 1000.0, 1.0)
    assert (first["p50"], first["mean"]) == (pytest.approx(300.0), pytest.approx(300.0))
    assert (second["arrivals"], second["answered"], second["joules"], second["sizes"]) == (0, 0, None, [])


def test_percentiles_cover_the_last_seconds_and_are_none_without_responses() -> None:
    history = History()
    history.requests_completed(M, [0.1])
    history.tick(M, 0.0, 0, 0.0)
    history.requests_completed(M, [0.3])
    for second in range(1, WINDOW + 1):
        history.tick(M, second, 0, 0.0)
    assert [point["p50"] for point in history.points(M, 0)] == pytest.approx(
        [100.0, *[200.0] * (WINDOW - 1), 300.0], abs=1e-9
    )
    history.tick(M, WINDOW + 1, 0, 0.0)
    assert history.points(M, 0)[-1]["p99"] is None


def test_points_are_those_after_a_number_and_all_for_a_number_of_another_run() -> None:
    history = History()
    for second in range(5):
        history.tick(M, second, 0, 0.0)
    assert [point["seq"] for point in history.points(M, 3)] == [4, 5]
    assert history.points(M, 5) == []
    assert len(history.points(M, 9)) == 5
    assert history.seq(M) == 5
    assert History().points(M, 0) == []


def test_memory_is_bounded_over_time_and_load() -> None:
    history = History()
    for second in range(POINTS + 10):
        history.batch_completed(batch("greedy", launch(1), 0.001, None))
        history.tick(M, second, 0, 0.0)
    points = history.points(M, 0)
    assert (len(points), points[0]["seq"], points[-1]["seq"]) == (POINTS, 11, POINTS + 10)
    assert len(history.batches(M)) == BATCHES
    for _ in range(1000):
        history.requests_completed(M, [0.1] * 100)
    assert len(history._of(M).now.responses) < 5000
    assert history._of(M).now.answered == 100_000


def test_a_late_tick_gives_a_longer_span() -> None:
    history = History()
    for now in (0.0, 1.0, 3.5):
        history.tick(M, now, 0, 0.0)
    assert [point["span"] for point in history.points(M, 0)] == [1.0, 1.0, 2.5]


def test_the_last_batches_come_newest_first_with_their_reason() -> None:
    history = History()
    history.batch_completed(batch("smdp", launch(3), 0.02, 0.6))
    history.batch_completed(batch("greedy", launch(1, waited=0.001), 0.01, None))
    newest, oldest = history.batches(M)
    assert (newest["batch_size"], newest["policy"], newest["energy_mj"]) == (1, "greedy", None)
    assert (oldest["batch_size"], oldest["reason"], oldest["waited_ms"]) == (3, "policy", pytest.approx(250.0))
    assert (oldest["service_ms"], oldest["energy_mj"]) == (pytest.approx(20.0), pytest.approx(600.0))


def test_models_have_separate_histories() -> None:
    history = History()
    history.arrived("a", 1)
    history.tick("a", 0.0, 0, 0.0)
    assert history.points("b", 0) == []
