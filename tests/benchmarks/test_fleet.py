"""The policies and the table of the benchmark of two devices."""

from pathlib import Path

import pytest

from benchmarks.fleet import CELLS, PACES, policies, ranges, slowed
from policies.profile import load_profile
from policies.solver.model import Problem
from policies.solver.solver import solve


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
def test_the_same_policy_which_is_not_greedy_is_solved_at_every_pace(load: float, tmp_path: Path) -> None:
    tables = []
    for pace in PACES:
        profile = load_profile(str(slowed(pace, tmp_path)))
        w2 = float(policies(pace)[1].partition("=")[2])
        tables.append(solve(Problem(profile, load * profile.capacity, 1.0, w2)).batch_size)
    assert tables[0] == tables[1] == tables[2]
    assert tables[0][:6] == (0,) * 6  # greedy launches with one waiting request


def test_the_range_of_differences_is_given_for_each_pace_in_the_record() -> None:
    cells = [key for key, cell in CELLS.items() if cell[0] == PACES[0]][:2]
    found = [
        {"live": {"mean_ms": live, "p95_ms": 100.0}, "simulated": {"mean_ms": 100.0, "p95_ms": 100.0}}
        for live in (110.0, 95.0)
    ]
    assert (
        ranges(dict(zip(cells, found, strict=True)))
        == "Differences: -5.0% to +10.0% at pace 1 (greedy and smdp:w2=16)."
    )
