"""The computations of benchmarks/ocr.py, without its measurements."""

import numpy as np
import pytest

from benchmarks.ocr import (
    BATCH,
    OVERLOAD,
    Workload,
    accuracy,
    edit_distance,
    simulated,
    table,
    throughput,
    workload,
)
from policies.profile import Profile

ROWS = tuple((0.1 * b, 1.6 * b) for b in range(1, BATCH + 1))  # a millisecond a pixel and row
PROFILE = Profile("p", tuple(b for b, _ in ROWS), lengths=(100, 1600), length_service_times=ROWS)


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("abd", "abc", 1), ("xabc", "abc", 1), ("kitten", "sitting", 3)],
)
def test_edit_distance(found: str, expected: str, distance: int) -> None:
    assert edit_distance(found, expected) == edit_distance(expected, found) == distance


def test_accuracy_is_over_all_characters() -> None:
    assert accuracy(["abcd", ""], ["abcd", "xy"]) == pytest.approx(1 - 2 / 6)


def test_a_workload_repeats_its_lines_faster_than_the_device() -> None:
    work = workload(3, 8, PROFILE)
    assert work.texts[:2] == work.texts[3:5] == work.texts[6:8]
    assert all(5 <= len(text) <= 60 for text in work.texts)
    assert len(work.pictures) == len(work.widths) == 8
    limit = 1e3 / np.mean(work.widths[:3])
    assert 1 / work.instants[1] == pytest.approx(OVERLOAD * limit)


def test_the_simulation_pads_to_the_longest_of_a_bin() -> None:
    widths = np.tile([100.0, 300.0, 700.0, 1500.0], 200)
    work = Workload((), (), widths, np.arange(800) / 10.0)
    assert simulated("greedy", work, PROFILE) == pytest.approx(1 / 1.5, rel=0.05)
    assert simulated("multi-bin:4", work, PROFILE) == pytest.approx(1 / 0.65, rel=0.1)


def test_the_first_eighth_does_not_count_for_throughput() -> None:
    assert throughput([*range(100, 110), *(109.5 + 0.5 * i for i in range(70))]) == pytest.approx(2.0)


def test_the_record_becomes_a_table() -> None:
    cell = {"live_hz": [9.0, 11.0], "gain_live": [1.0, 1.0], "simulated_hz": 12.0, "gain_simulated": 1.0}
    record = {
        "device": "CPU",
        "lines": {"number": 200, "narrowest": 96.0, "widest": 1120.0},
        "package": {"accuracy": 0.97},
        "policies": {"greedy": cell | {"accuracy": 0.96, "differing_lines": 12}},
    }
    assert "| greedy | 9.0, 11.0 | 12.0 | 1.00, 1.00 | 1.00 | 0.9600 | 12 |" in table(record)
