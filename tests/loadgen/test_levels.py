"""Priority levels of a run's requests."""

from collections import Counter

import numpy as np
import pytest

from loadgen.levels import draw_levels
from loadgen.report import Record, make_report, outcome_from_records
from policies.types import SpecError
from server.scheduling.levels import Levels


@pytest.mark.parametrize("shares", ["0.2,0.8", "0.1,0.3,0.6", "0.25,0.25,0.25,0.25"])
def test_the_server_reads_the_levels_that_are_drawn(shares: str) -> None:
    given = [float(word) for word in shares.split(",")]
    drawn = draw_levels(shares, 20_000, 3)
    server = Levels(len(given))
    assert all(server.level(0, header.encode(), 1) == level for level, header in set(drawn))
    counts = Counter(level for level, _ in drawn)
    assert [counts[level] / 20_000 for level in sorted(counts)] == pytest.approx(given, abs=0.02)
    assert drawn == draw_levels(shares, 20_000, 3)
    assert drawn != draw_levels(shares, 20_000, 4)


@pytest.mark.parametrize("shares", ["1", "0.5,0.6", "0,1", "x,1", "0.2,0.2,0.2,0.2,0.2"])
def test_malformed_shares_are_refused(shares: str) -> None:
    with pytest.raises(SpecError, match="give 2 to 4 numbers above 0 that sum to 1"):
        draw_levels(shares, 10, 0)


def test_a_report_has_the_response_times_of_each_level() -> None:
    records = [Record(float(i), float(i), i + 0.1 * (1 + i % 2), 200, level=1 + i % 2) for i in range(10)]
    records.append(Record(11.0, 11.0, 12.0, 503, level=2))
    report = make_report(outcome_from_records(records), 12.0)
    assert [(each["level"], each["ok"]) for each in report["levels"]] == [(1, 5), (2, 5)]
    assert [each["mean_ms"] for each in report["levels"]] == pytest.approx([100.0, 200.0])
    assert np.isclose(report["levels"][1]["p95_ms"], 200.0)
    assert [each["slo_attainment"] for each in report["levels"]] == [None, None]
    assert "levels" not in make_report(outcome_from_records([Record(0.0, 0.0, 1.0, 200)]), 1.0)
