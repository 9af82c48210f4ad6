"""Priority levels: which level a request is of, and the places that it may take."""

from math import inf

import pytest

from server.errors import BadInputError
from server.scheduling.levels import ONE_LEVEL, Levels, levels_of

TWO, FIVE = Levels(2, 0.1), Levels(5, 0.25, (inf, 1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize(
    ("priority", "header", "least", "of_two", "of_five"),
    [
        (0, None, 1, 2, 5),
        (1, None, 1, 1, 1),
        (2, None, 1, 2, 2),
        (0, b"u=0", 1, 1, 1),
        (0, b"u=1", 1, 1, 2),
        (0, b"u=2", 1, 1, 3),
        (0, b"u=3", 1, 2, 5),
        (0, b"u=7, i", 1, 2, 5),
        (0, b"i, u=0", 1, 1, 1),
        (0, b"u=0;a", 1, 1, 1),
        (0, b"i", 1, 2, 5),
        (0, b"u=x", 1, 2, 5),
        (2, b"u=0", 1, 2, 2),  # the protocol's parameter counts
        (1, None, 2, 2, 2),  # the key has no level before 2
        (0, b"u=0", 7, 2, 5),
    ],
)
def test_the_level_follows_from_parameter_header_and_key(
    priority: int, header: bytes | None, least: int, of_two: int, of_five: int
) -> None:
    assert TWO.level(priority, header, least) == of_two
    assert FIVE.level(priority, header, least) == of_five
    assert ONE_LEVEL.level(min(priority, 1), header, least) == 1


@pytest.mark.parametrize(
    ("levels", "priority", "remedy"),
    [(ONE_LEVEL, 2, "has 1 levels; send 0 or 1"), (TWO, 3, "`priority` is 3, and the model has 2 levels; send 1 to 2")],
)
def test_a_level_beyond_the_last_is_refused(levels: Levels, priority: int, remedy: str) -> None:
    with pytest.raises(BadInputError, match=remedy):
        levels.level(priority, None, 1)


def test_a_part_of_the_queue_is_reserved_for_the_first_level() -> None:
    assert [TWO.places(100, level) for level in (1, 2)] == [100, 90]
    assert FIVE.places(100, 5) == 75
    assert FIVE.places(1, 5) == 1
    assert ONE_LEVEL.places(100, 1) == 100


def test_each_level_has_a_longest_wait() -> None:
    assert [FIVE.max_wait(level) for level in (1, 2, 5)] == [inf, 1.0, 4.0]
    assert TWO.max_wait(2) == inf
    assert levels_of({"m": TWO}, "m") is TWO
    assert levels_of({"m": TWO}, "other") is ONE_LEVEL
