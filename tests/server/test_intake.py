"""The bound on the bytes of all calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import TooLargeError
from server.intake import Intake, IntakeFullError


def test_what_finds_no_room_is_refused_and_says_when_to_come_again() -> None:
    intake = Intake(100, lambda: 7)
    with intake.share() as share:
        share.grow(60)
        with pytest.raises(IntakeFullError, match=r"for 41 bytes: calls hold 60 of 100; come again in 7 s") as e:
            share.grow(41)
        assert e.value.retry_after == 7
        with intake.share() as other:
            other.grow(40)
    assert intake.held == 0


def test_reaching_counts_what_is_held_already() -> None:
    intake = Intake(100)
    with intake.share() as share:
        share.grow(30)
        share.reach(20)
        assert intake.held == 30
        share.reach(80)
        assert intake.held == 80


@given(st.lists(st.lists(st.integers(0, 50))))
def test_every_call_gives_back_what_it_held_however_it_ends(calls: list[list[int]]) -> None:
    intake = Intake(100)
    for pieces in calls:
        try:
            with intake.share() as share:
                for piece in pieces:
                    share.grow(piece)
                    assert intake.held <= 100
        except IntakeFullError:
            assert sum(pieces) > 100
        else:
            assert sum(pieces) <= 100
        assert intake.held == 0


def test_a_call_is_on_its_way_until_it_arrives_or_fails() -> None:
    intake = Intake(100)
    with intake.share() as share:
        share.come("m", 3)
        assert intake.coming["m"] == 3
        share.arrive()
        assert intake.coming["m"] == 0
    with intake.share() as share:
        share.come("m", 2)
    assert intake.coming["m"] == 0


def test_what_never_finds_room_is_not_told_to_come_again() -> None:
    intake = Intake(100)
    with pytest.raises(TooLargeError, match=r"takes 101 bytes, all calls together may hold 100"):
        intake.take(101)
    assert intake.held == 0


def test_settling_gives_back_what_was_held_for_more() -> None:
    intake = Intake(100)
    with intake.share() as share:
        share.reach(90)
        share.settle(20)
        assert intake.held == 20
        share.grow(80)
    assert intake.held == 0
