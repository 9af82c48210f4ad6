"""Figures 4 and 5 of the conference paper."""

import numpy as np
import pytest

from research.papers.conference import (
    LOADS_5,
    claims_4,
    claims_5,
    costs_at,
    limit_of,
    policies,
    threshold_of,
)


def test_figure_4_agrees_except_that_control_limits_are_the_rule() -> None:
    claims = claims_4(policies())
    assert [claim.holds for claim in claims] == [True, True, True, True, False]
    assert "13 of 36" in claims[-1].instead
    assert "36 of 36" in claims[0].text


def test_a_policy_that_launches_less_than_all_has_a_threshold_and_no_control_limit() -> None:
    first = policies()[0.0][0]
    assert threshold_of(first) == 1
    assert limit_of(first) is None
    assert first.batch_size[6] == 5


def test_figure_5_agrees() -> None:
    found = [costs_at(load, np.array([0.0, 2.5, 5.25, 12.5, 20.0])) for load in LOADS_5]
    assert [claim.holds for claim in claims_5(found)] == [True] * 4


def test_costs_are_those_of_the_solver() -> None:
    found = costs_at(0.3, np.array([0.0, 4.0]))
    assert found.solved[0] == pytest.approx(policies()[0.0][2].gain)
    assert found.above("greedy")[1] > found.above("static 16")[1] > 0.0


def test_the_thresholds_of_figure_4_by_load() -> None:
    found = [[threshold_of(solution) for solution in row] for row in policies().values()]
    assert found == [
        [1, 1, 1, 1, 1, 1, 2, 2, 2],
        [1, 1, 2, 2, 2, 2, 2, 3, 2],
        [2, 3, 4, 6, 7, 7, 8, 8, 7],
        [32] * 9,
    ]
