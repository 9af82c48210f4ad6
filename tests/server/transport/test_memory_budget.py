"""The bound on the bytes of all calls."""

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import TooLargeError
from server.transport.memory_budget import Intake, IntakeFullError


def test_what_finds_no_room_is_refused_and_says_when_to_come_again() -> None:
    intake = Intake(25600, lambda: 7)
    with intake.share() as share, ExitStack() as others:
        share.grow(12000)
        for _ in range(136):
            others.enter_context(intake.share()).grow(100)
        with pytest.raises(IntakeFullError, match=r"no room for 100 bytes: calls hold 25600 of 25600.* in 7 s") as e:
            others.enter_context(intake.share()).grow(100)
        assert e.value.retry_after == 7
    assert intake.held == 0


def test_reaching_counts_what_is_held_already() -> None:
    intake = Intake(200)
    with intake.share() as share:
        share.grow(30)
        share.reach(20)
        assert intake.held == 30
        share.reach(80)
        assert intake.held == 80


@given(st.lists(st.lists(st.integers(0, 50))))
def test_every_call_gives_back_what_it_held_however_it_ends(calls: list[list[int]]) -> None:
    intake = Intake(200)
    for pieces in calls:
        try:
            with intake.share() as share:
                for piece in pieces:
                    share.grow(piece)
                    assert intake.held <= 200
        except TooLargeError:
            assert sum(pieces) > 100
        else:
            assert sum(pieces) <= 100
        assert intake.held == 0


def test_a_call_is_on_its_way_until_it_arrives_or_fails() -> None:
    intake = Intake(200)
    with intake.share() as share:
        share.come("m", 3)
        assert intake.coming["m"] == 3
        share.arrive()
        assert intake.coming["m"] == 0
    with intake.share() as share:
        share.come("m", 2)
    assert intake.coming["m"] == 0


def test_what_never_finds_room_is_not_told_to_come_again() -> None:
    intake = Intake(200)
    with intake.share() as share, pytest.raises(TooLargeError, match=r"takes 101 bytes, over the limit of 100 for one"):
        share.grow(101)
    assert intake.held == 0


def test_large_calls_leave_half_of_the_budget_to_small_ones() -> None:
    intake = Intake(25600)  # large is over 100
    with intake.share() as first, intake.share() as second, ExitStack() as small:
        first.grow(12700)
        second.grow(100)
        with pytest.raises(IntakeFullError, match=r"large ones 12700 of 12800"):
            second.grow(10)
        for _ in range(128):
            small.enter_context(intake.share()).grow(100)
        assert (intake.held, intake.held_by_large) == (25600, 12700)
        first.settle(12690)
        with pytest.raises(IntakeFullError):
            second.grow(11)
        second.grow(10)
        assert (intake.held, intake.held_by_large) == (25600, 12800)
        first.settle(50)
        assert intake.held_by_large == 110
    assert (intake.held, intake.held_by_large) == (0, 0)


def test_more_is_held_only_while_it_is_needed() -> None:
    intake = Intake(200)
    with intake.share() as share:
        share.grow(10)
        with suppress(ZeroDivisionError), share.more(30):
            assert intake.held == 40
            raise ZeroDivisionError
        assert intake.held == 10


def test_settling_gives_back_what_was_held_for_more() -> None:
    intake = Intake(200)
    with intake.share() as share:
        share.reach(90)
        share.settle(20)
        assert intake.held == 20
        share.grow(80)
    assert intake.held == 0
