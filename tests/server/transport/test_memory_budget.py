"""The memory budget: limits, reservations and pending samples."""

import asyncio
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import TooLargeError
from server.transport.http_call import CHUNK, HttpCall, RequestHead
from server.transport.memory_budget import MemoryBudget, MemoryBudgetError


def test_a_call_over_the_free_budget_is_rejected_with_retry_after() -> None:
    budget = MemoryBudget(25600, lambda: 7)
    with budget.reservation() as memory, ExitStack() as others:
        memory.grow(12000)
        for _ in range(136):
            others.enter_context(budget.reservation()).grow(100)
        with pytest.raises(
            MemoryBudgetError, match=r"no room for 100 bytes: calls reserve 25600 of 25600.* in 7 s"
        ) as e:
            others.enter_context(budget.reservation()).grow(100)
        assert e.value.retry_after == 7
    assert budget.reserved == 0


def test_grow_to_counts_what_is_reserved_already() -> None:
    budget = MemoryBudget(200)
    with budget.reservation() as memory:
        memory.grow(30)
        memory.grow_to(20)
        assert budget.reserved == 30
        memory.grow_to(80)
        assert budget.reserved == 80


@given(st.lists(st.lists(st.integers(0, 50))))
def test_every_reservation_is_released_when_its_call_ends(calls: list[list[int]]) -> None:
    budget = MemoryBudget(200)
    for pieces in calls:
        try:
            with budget.reservation() as memory:
                for piece in pieces:
                    memory.grow(piece)
                    assert budget.reserved <= 200
        except TooLargeError:
            assert sum(pieces) > 100
        else:
            assert sum(pieces) <= 100
        assert budget.reserved == 0


def test_samples_are_pending_until_they_are_queued_or_dropped() -> None:
    budget = MemoryBudget(200)
    with budget.reservation() as memory:
        memory.begin_pending("m", 3)
        assert budget.pending["m"] == 3
        memory.end_pending()
        assert budget.pending["m"] == 0
    with budget.reservation() as memory:
        memory.begin_pending("m", 2)
    assert budget.pending["m"] == 0


def test_a_call_over_the_limit_of_one_call_is_too_large() -> None:
    budget = MemoryBudget(200)
    with (
        budget.reservation() as memory,
        pytest.raises(TooLargeError, match=r"takes 101 bytes, over the limit of 100 for one"),
    ):
        memory.grow(101)
    assert budget.reserved == 0


def test_large_calls_leave_half_of_the_budget_to_small_ones() -> None:
    budget = MemoryBudget(25600)  # large is over 100
    with budget.reservation() as first, budget.reservation() as second, ExitStack() as small:
        first.grow(12700)
        second.grow(100)
        with pytest.raises(MemoryBudgetError, match=r"large ones 12700 of 12800"):
            second.grow(10)
        for _ in range(128):
            small.enter_context(budget.reservation()).grow(100)
        assert (budget.reserved, budget.reserved_by_large) == (25600, 12700)
        first.resize(12690)
        with pytest.raises(MemoryBudgetError):
            second.grow(11)
        second.grow(10)
        assert (budget.reserved, budget.reserved_by_large) == (25600, 12800)
        first.resize(50)
        assert budget.reserved_by_large == 110
    assert (budget.reserved, budget.reserved_by_large) == (0, 0)


def test_a_temporary_reservation_is_released_after_an_exception() -> None:
    budget = MemoryBudget(200)
    with budget.reservation() as memory:
        memory.grow(10)
        with suppress(ZeroDivisionError), memory.temporarily(30):
            assert budget.reserved == 40
            raise ZeroDivisionError
        assert budget.reserved == 10


def test_resize_releases_the_difference() -> None:
    budget = MemoryBudget(200)
    with budget.reservation() as memory:
        memory.grow_to(90)
        memory.resize(20)
        assert budget.reserved == 20
        memory.grow(80)
    assert budget.reserved == 0


@pytest.mark.parametrize("size", [10, CHUNK, 3 * CHUNK, 3 * CHUNK + 1])
def test_a_call_reserves_nothing_when_its_last_piece_is_sent(size: int) -> None:
    """Its client may send the next call as soon as it has that piece."""
    budget = MemoryBudget(2**20)
    reserved: list[int] = []

    def write(_: bytes) -> None:
        reserved.append(budget.reserved)

    async def respond() -> None:
        with budget.reservation() as memory:
            memory.grow(1000)
            connection: Any = SimpleNamespace(
                transport=SimpleNamespace(write=write),
                can_write=True,
                app=SimpleNamespace(response_headers=lambda _: []),
                response_completed=lambda _: None,
            )
            call = HttpCall(connection, RequestHead("POST", b"/", "/", b"", [], {}, 0, "1.1", True), 0.0)
            call.memory = memory
            await call.respond(200, bytes(size), [])
            assert budget.reserved == 0

    asyncio.run(respond())
    assert len(reserved) == max(1, -(-size // CHUNK))
    assert reserved[-1] == 0
    assert set(reserved[:-1]) <= {1000}
