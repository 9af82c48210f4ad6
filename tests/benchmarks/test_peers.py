"""The computations of benchmarks/peers.py on a made-up run."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_servers.emulated_batch import EmulatedBatches
from benchmarks.support.idle_gaps import LoggedBatch, idle_gaps, read_batches
from benchmarks.support.peer_tables import BARE, BODIES, CONNECTIONS, IN_PLACE, LOADS, draw, tables

OURS = "Batchwright, one process"
BATCHES = [LoggedBatch(1.0, 1.5, 1), LoggedBatch(1.501, 2.0, 2), LoggedBatch(2.25, 3.0, 1), LoggedBatch(3.01, 4.0, 1)]


def test_a_gap_counts_only_where_a_request_waited_at_the_end_of_the_batch() -> None:
    sent = [1.0, 1.2, 1.3, 2.2, 2.6]  # none waits at 2.0
    assert idle_gaps(BATCHES, sent) == [pytest.approx(0.001), pytest.approx(0.01)]


def test_a_request_that_was_sent_just_before_the_end_of_the_batch_is_not_taken_as_waiting() -> None:
    sent = [1.0, 1.2, 1.3, 2.2, 2.995]
    assert idle_gaps(BATCHES, sent) == [pytest.approx(0.001)]
    assert idle_gaps(BATCHES, sent, margin=0.0) == [pytest.approx(0.001), pytest.approx(0.01)]


def test_the_log_has_all_batches_but_the_last_and_is_read_from_the_start_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "log"))
    batches = EmulatedBatches([0.0] * 3)
    for size in (2, 3, 1):
        batches.run(size)
    first, second = read_batches(tmp_path / "log", 0.0)
    assert (first.size, second.size) == (2, 3)
    assert first.start <= first.end <= second.start <= second.end
    assert read_batches(tmp_path / "log", first.end) == [second]
    assert read_batches(tmp_path / "none", 0.0) == []


def _record() -> dict[str, Any]:
    gap = {"gaps": 10, "median_ms": 0.1, "mean_ms": 0.2}
    loads = {
        name: [
            {
                "load": load,
                "ideal_ms": 10.0,
                "mean_ms": 10.0 + factor * excess,
                "p99_ms": 100.0 * factor,
                "cpu_s_per_1000": 0.5 * factor,
                "idle_gap": None if name == OURS else gap,
                "idle_gap_by_metric": {**gap, "median_ms": 0.05} if name == OURS else None,
            }
            for load, excess in product(LOADS, (2.0, 4.0))
        ]
        for name, factor in ((OURS, 1.0), (BARE, 2.0), (IN_PLACE, 0.5))
    }
    rss = {OURS: 60.0, BARE: 120.0, IN_PLACE: 30.0}
    compared = {name: runs for name, runs in loads.items() if name != IN_PLACE}
    rates = {
        name: [
            {"body": body, "connections": connections, "requests_per_s": rate}
            for body, connections in product(BODIES, CONNECTIONS)
        ]
        for name, rate in ((OURS, 3000.0), (BARE, 2000.0))
    }
    least = {"runs": loads, "rss_mb": rss}
    return {"loads": {"runs": compared, "rss_mb": rss}, "rates": {"runs": rates}, "least": least}


def test_the_tables_have_means_and_the_ratios_of_our_server_to_the_others() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables(_record()).splitlines() if "|" in line]
    open_loop = next(row for row in cells if row[0] == OURS)
    assert open_loop[1:] == ["+3.00"] * 3 + ["100.0"] * 3 + ["0.050", "0.200", "0.50", "60"]
    ratios = {row[0]: row[1] for row in cells if len(row) == 2}
    assert ratios["above ideal at 0.9"] == "0.50"
    assert ratios["idle gap at 0.9, median, ms"] == "0.50"
    assert ratios["JPEG, 128"] == "1.50"
    assert next(row for row in cells if row[0] == IN_PLACE)[1] == "+1.50"


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw(_record(), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000
