"""The objective: moves to faster and slower, and the backoff."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adaptation.objective import FIRST_MARGIN, AgeMargin, Move, Objective, ResponseCounts

GOOD, FAIR, BAD, AWFUL = (ResponseCounts(1000, within, 200) for within in (990, 955, 900, 500))
FEW = ResponseCounts(90, 0, 20)
ANSWERS = st.builds(
    lambda served, share, batch: ResponseCounts(served, round(served * share), max(1, served // batch)),
    st.integers(0, 5000),
    st.floats(0.0, 1.0),
    st.integers(1, 32),
)


def after(*windows: ResponseCounts, start: Objective = Objective(0.1)) -> Objective:  # noqa: B008  (it is frozen)
    for window in windows:
        start = start.after(window)
    return start


@pytest.mark.parametrize(
    ("answers", "move"),
    [
        (FEW, None),
        (GOOD, "slower"),
        (FAIR, "keep"),
        (BAD, "faster"),
        (AWFUL, "faster"),
        (ResponseCounts(200, 200, 50), None),  # too few to be good
        (ResponseCounts(200, 100, 50), "faster"),  # but enough to be bad
        (ResponseCounts(1000, 930, 32), "keep"),  # within two standard errors of so few batches
    ],
)
def test_the_move_of_a_window(answers: ResponseCounts, move: Move | None) -> None:
    assert Objective(0.1).move(answers) == move


def test_a_missed_bound_moves_one_level_or_two_if_missed_by_far() -> None:
    assert after(ResponseCounts(1000, 910, 500)).factor == 0.5
    assert after(AWFUL).factor == 0.25
    assert after(*[AWFUL] * 9).factor == 0.0


def test_a_move_to_slower_takes_four_consecutive_good_windows() -> None:
    fast = after(AWFUL)
    assert after(*[GOOD] * 3, FAIR, *[GOOD] * 3, start=fast).level == fast.level
    assert after(*[GOOD] * 4, start=fast).level == fast.level - 1


def test_a_wrong_move_to_slower_doubles_the_backoff() -> None:
    """Good at one level and bad at the level below: the backoff doubles, up to 64 windows."""
    objective, moves = after(BAD), [0]
    low = objective.level - 1
    for window in range(1, 2000):
        before, objective = objective, objective.after(GOOD if objective.level > low else BAD)
        if objective.level < before.level:
            moves.append(window)
    gaps = np.diff(moves)
    assert gaps[:4].tolist() == [4, 9, 17, 33]  # plus one bad window
    assert set(gaps[5:].tolist()) == {65}


def test_the_backoff_is_reset_at_the_slowest_level() -> None:
    objective = Objective(0.1, backoff=8)
    assert after(*[GOOD] * 8, start=objective).backoff == 4


@given(st.lists(ANSWERS, max_size=40))
def test_an_objective_stays_within_its_levels(windows: list[ResponseCounts]) -> None:
    objective = Objective(0.1)
    for answers in windows:
        move, before = objective.move(answers), objective
        objective = objective.after(answers)
        assert 0.0 <= objective.factor <= 1.0
        assert objective.level >= before.level or move == "slower"
        assert objective.level <= before.level or move == "faster"
        assert (objective is before) == (move is None)


@given(ANSWERS)
def test_fewer_requests_within_the_bound_never_move_to_slower(answers: ResponseCounts) -> None:
    order = ["faster", "keep", "slower"]
    objective = Objective(0.1)
    move = objective.move(answers)
    fewer = objective.move(ResponseCounts(answers.served, answers.within // 2, answers.batches))
    if move is not None and fewer is not None:
        assert order.index(fewer) <= order.index(move)


def measured(*responses: float) -> ResponseCounts:
    """Responses in batches of two."""
    counts = ResponseCounts(batches=len(responses) // 2)
    for response in responses:
        counts.add(response, 1, 0.1)
    return counts


@pytest.mark.parametrize(
    ("slowest", "slow", "others", "change"),
    [
        (0.105, 0.06, 0.05, 0.005),  # what the percentile is above the bound
        (0.500, 0.06, 0.05, 0.010),  # of a larger difference a tenth of the bound is used
        (0.105, 0.045, 0.05, 0.5 * 0.005),  # half of it where the share may differ by chance; 0.04 are aimed at
        (0.110, 0.02, 0.09, -0.010),  # a margin that is too large shrinks
    ],
)
def test_a_margin_follows_the_measured_percentile(slowest: float, slow: float, others: float, change: float) -> None:
    number = round(4000 * slow)
    counts = measured(*[slowest] * number, *[others] * (4000 - number))
    assert AgeMargin(0.1, 0.95, 0.02).after(counts).margin == pytest.approx(0.02 + change)


@pytest.mark.parametrize(
    ("slowest", "others", "requests", "change"),
    [
        (0.094, 0.02, 150, -0.006),  # to the slowest of 75 batches
        (0.094, 0.02, 140, None),  # too few batches: all of 70 are below it with a chance of 0.96 ** 70
        (0.096, 0.02, 150, None),  # not far below the bound
        (0.20, 0.02, 300, -0.010),  # one of 300 is late, which is above the limit; a tenth of the bound at most
        (0.20, 0.094, 300, -0.006),
    ],
)
def test_a_margin_shrinks_early_where_the_percentile_is_clearly_below_the_bound(
    slowest: float, others: float, requests: int, change: float | None
) -> None:
    before = AgeMargin(0.1, 0.95, 0.02)
    after = before.after(measured(slowest, *[others] * (requests - 1)))
    assert after is before if change is None else after.margin == pytest.approx(0.02 + change)


def test_a_margin_is_not_negative() -> None:
    assert AgeMargin(0.1, 0.95, 0.001).after(measured(*[0.02] * 4000)).margin == 0.0


def test_a_margin_is_below_the_bound() -> None:
    margin = AgeMargin(0.1, 0.95, 0.0)
    for _ in range(30):
        margin = margin.after(measured(*[0.5] * 1000))
    assert margin.margin == pytest.approx(margin.in_use) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("late", "requests"),
    [
        (1.0, 60),  # three expected late ones are enough for a margin that is far too small
        (0.15, 130),
        (0.09, 400),  # twenty for a difference that is no chance
        (0.045, 4000),  # a smaller one needs all
        (0.04, 4000),
        (0.0, 146),  # 73 batches, all far below the bound
    ],
)
def test_a_margin_waits_for_enough_requests(late: float, requests: int) -> None:
    before = AgeMargin(0.1, 0.95, 0.01)

    def counts(n: int) -> ResponseCounts:
        number = round(n * late)
        return measured(*[0.2] * number, *[0.05] * (n - number))

    assert before.after(counts(requests - 10)) is before
    assert before.after(counts(requests + 10)) is not before


def test_a_margin_begins_with_half_of_the_bound_and_shrinks_to_what_answers_need() -> None:
    margin, batches = AgeMargin(0.1, 0.95, FIRST_MARGIN * 0.1), 0
    while margin.in_use > 0.0:
        before = margin
        margin = before.after(measured(*[0.08 - before.in_use] * 150))
        assert margin is not before
        batches += 75
    assert batches == 5 * 75


def test_a_margin_in_use_has_steps() -> None:
    assert AgeMargin(0.1, 0.95, 0.01024).in_use == pytest.approx(0.01)
    assert AgeMargin(0.1, 0.95, 0.0106).in_use == pytest.approx(0.011)
