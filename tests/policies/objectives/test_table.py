"""The policy file: written and read, and malformed files."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from policies.objectives.table import (
    default_loads,
    load_table,
    parse_table,
    save_table,
    solve_table,
    to_json,
)
from policies.profile import load_profile
from policies.solver.model import Problem
from policies.solver.solver import solve
from policies.types import MaxAges, SpecError

P4 = load_profile("googlenet-tesla-p4")


def row(**changes: Any) -> dict[str, Any]:
    return {"arrival_rate_hz": 100.0, "load": 0.1, "w2": 1.0, "batch_size": [0, 1, 2]} | changes


def file(*rows: dict[str, Any], **changes: Any) -> str:
    content = {"schema": "batchwright.policy/1", "profile": "p", "policy": "smdp", "w1": 1.0, "w2": 1.0}
    return json.dumps(content | {"max_batch_size": 2, "rows": list(rows) or [row()]} | changes)


def test_the_default_grid_has_49_loads() -> None:
    loads = default_loads()
    assert len(loads) == 49
    assert (loads[0], loads[24], loads[-1]) == (0.02, 0.5, 0.98)


def test_each_row_is_the_solution_at_its_load() -> None:
    problem = Problem(P4, 1.0, w2=1.6)
    table = solve_table(problem, [0.3, 0.7])
    assert (table.profile, table.w1, table.w2, table.max_batch_size) == (P4.name, 1.0, 1.6, 32)
    for found, load in zip(table.rows, (0.3, 0.7), strict=True):
        solution = solve(Problem(P4, load * P4.capacity, w2=1.6))
        assert found.batch_size == solution.batch_size
        assert found.mean_response_time == solution.mean_response_time
        assert found.load == pytest.approx(load, rel=1e-12)  # one division and one multiplication


def test_a_saved_table_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    table = solve_table(Problem(P4, 1.0, w2=1.6), [0.2, 0.9])
    save_table(table, path)
    again = load_table(str(path))
    assert [r.batch_size for r in again.rows] == [r.batch_size for r in table.rows]
    assert [r.mean_power for r in again.rows] == [r.mean_power for r in table.rows]
    # 1e-15: milliseconds at the edge, one rounding each way
    for one, other in zip(again.rows, table.rows, strict=True):
        assert one.mean_response_time == pytest.approx(other.mean_response_time, rel=1e-15)


def test_a_table_of_maximum_ages_is_written_and_read() -> None:
    certificate = {"share_within": [0.95, 0.99], "power_lower_bound_w": 20.5}
    ages = row(max_age_ms=[0, 7.5, 0], mix={"probability": 0.25, "max_age_ms": [0, 20, 0]}, **certificate)
    del ages["batch_size"]
    again = parse_table(to_json(parse_table(file(ages), "a")), "b").rows[0]
    assert again.max_ages == MaxAges((0.0, 0.0075, 0.0), 0.25, (0.0, 0.02, 0.0))
    assert again.batch_size == (0, 0, 2)  # of requests that have just arrived
    assert again.mix is None
    assert (again.share_within, again.power_lower_bound) == ((0.95, 0.99), 20.5)


def test_the_largest_batch_of_a_row_of_ages_is_written_and_read() -> None:
    ages = row(max_age_ms=[0, 7.5, 0], max_batch_size=1)
    del ages["batch_size"]
    again = parse_table(to_json(parse_table(file(ages), "a")), "b").rows[0]
    assert again.max_ages == MaxAges((0.0, 0.0075, 0.0), max_batch_size=1)
    assert again.batch_size == (0, 0, 1)


def test_ages_that_never_launch_are_written_and_read() -> None:
    ages = row(max_age_ms=[0, 1e300, 6, 0])
    del ages["batch_size"]
    read = parse_table(file(ages), "a")
    again = parse_table(to_json(read), "b")
    for table in (read, again):
        max_ages = table.rows[0].max_ages
        assert max_ages is not None
        assert max_ages.max_age == (0.0, inf, 0.006, 0.0)


def test_a_mix_is_written_and_read() -> None:
    mixed = file(row(mix={"probability": 0.25, "batch_size": [0, 0, 2]}))
    again = parse_table(to_json(parse_table(mixed, "a")), "b")
    mix = again.rows[0].mix
    assert mix is not None
    assert (mix.probability, mix.batch_size) == (0.25, (0, 0, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file"),
        (file(schema="batchwright.policy/2"), "schema"),
        (file(rows=[]), "rows"),
        (file(row(batch_size=[0, 1, 3])), "action 3 at queue length 2"),
        (file(row(batch_size=[0, 1, 2, 3])), "action 3 at queue length 3"),
        (file(row(batch_size=[1, 1])), "action 1 at queue length 0"),
        (file(row(batch_size=[0, -1])), "batch_size"),
        (file(row(batch_size=[0, 1, 0])), "last action"),
        (file(row(arrival_rate_hz=float("nan"))), "arrival_rate_hz"),
        (file(row(), row()), "ascend"),
        (file(row(mix={"probability": 1.5, "batch_size": [0, 1]})), "probability"),
        (file(row(max_batch_size=2)), "belongs to max_age_ms"),
        (file(row(mix={"probability": 0.5, "batch_size": [0, 2]})), "action 2 at queue length 1"),
    ],
)
def test_malformed_files_are_rejected_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as rejected:
        parse_table(text, "policy.json")
    assert "\n" not in str(rejected.value)


def test_a_missing_file_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"no policy file 'nowhere\.json'"):
        load_table("nowhere.json")
