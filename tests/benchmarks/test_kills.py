"""The table of benchmarks/kills.py, and what counts as a failure."""

from typing import Any

import pytest

from benchmarks.kills import is_wrong, table


def kill(**changed: Any) -> dict[str, Any]:
    right = {"outcomes": {"200": 9, "no answer": 1}, "first_answer_s": 0.5, "all_answered_s": 0.25, "left_over": 0}
    return right | {"held": [], "starts": 0} | changed


def test_the_table_has_sums_of_calls_and_medians_of_times() -> None:
    kills = [kill(), kill(first_answer_s=1.5), kill(outcomes={"200": 8, "other: 500": 2}, first_answer_s=0.75)]
    assert table({"gateway": kills}).splitlines()[-1] == (
        "| gateway, 3 times | 26 | 0 | 2 | 2 | 0.75, at most 1.50 | 0.25, at most 0.25 | 0 | 0 |"
    )


def test_the_table_says_if_a_server_never_answered_again() -> None:
    assert "| never |" in table({"gateway": [kill(), kill(first_answer_s=None)]})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, False),
        ({"outcomes": {"503 with Retry-After": 10}}, False),
        ({"outcomes": {"200": 9, "other: 503": 1}}, True),  # without Retry-After
        ({"first_answer_s": None}, True),
        ({"left_over": 1}, True),
        ({"held": ["{'bytes_reserved': 1}"]}, True),
    ],
)
def test_what_is_wrong_after_a_kill(changed: dict[str, Any], wrong: bool) -> None:
    assert is_wrong(kill(**changed)) is wrong
