"""The memory that workers share: what is free, when it is free again, and arrays in messages."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.workers.channel import packed, unpacked
from server.workers.shared_memory import FreeSpace, SharedMemory

SIZE = 1000
PAGE = 2**12


@given(st.lists(st.one_of(st.integers(1, 400), st.integers(-8, -1)), max_size=60))
def test_parts_never_overlap_and_all_is_one_again_in_the_end(steps: list[int]) -> None:
    space, used = FreeSpace(SIZE), list[tuple[int, int]]()
    for step in steps:
        if step < 0:
            if used:
                space.give_back(*used.pop(step % len(used)))
            continue
        start = space.take(step)
        if start is None:
            holes = largest_hole(used)
            assert holes < step
        else:
            assert 0 <= start <= SIZE - step
            assert all(start + step <= other or other + size <= start for other, size in used)
            used.append((start, step))
        assert space.free == SIZE - sum(size for _, size in used)
    for part in used:
        space.give_back(*part)
    assert space.take(SIZE) == 0


def largest_hole(used: list[tuple[int, int]]) -> int:
    ends = [0, *(start + size for start, size in sorted(used))]
    starts = [*(start for start, _ in sorted(used)), SIZE]
    return max(start - end for end, start in zip(ends, starts, strict=True))


@given(st.lists(st.tuples(st.booleans(), st.integers(2**14, 2**16), st.integers(0, 9)), max_size=40))
def test_memory_is_free_when_nothing_refers_to_it_and_not_before(steps: list[tuple[bool, int, int]]) -> None:
    memory, held = SharedMemory(size=2**18), list[tuple[np.ndarray, int]]()
    for takes, size, which in steps:
        if takes:
            found = memory.take(size)
            if found is not None:
                found[:] = which
                held.append((found[1:], which))  # a view keeps it
            del found
        elif held:
            del held[which % len(held)]
        assert all((view == value).all() for view, value in held)
        assert memory.used == sum(-(-(len(view) + 1) // PAGE) * PAGE for view, _ in held)
    held.clear()
    assert memory.used == 0


def test_an_array_is_placed_once_and_a_small_one_or_one_without_room_stays_where_it_is() -> None:
    memory = SharedMemory(size=2**18)
    image = np.arange(2**15, dtype=np.int32).reshape(2, -1)
    placed = memory.place(image)
    assert memory.contains(placed)
    assert placed is memory.place(placed)
    assert (placed == image).all()
    for other in (np.zeros(10), np.zeros(2**18), np.array([b"text"] * 9999, object), np.zeros((0, 5))):
        assert memory.place(other) is other


def test_a_buffer_is_in_the_memory_if_it_is_neither_small_nor_without_room() -> None:
    memory = SharedMemory(size=2**18)
    buffer = memory.buffer(2**17)
    buffer[:3] = b"abc"
    assert memory.contains(np.frombuffer(buffer, np.uint8))
    for size in (100, 2**18):
        other = memory.buffer(size)
        assert len(other) == size
        assert not memory.contains(np.frombuffer(other, np.uint8))


def test_a_message_has_the_place_of_an_array_that_both_ends_share() -> None:
    memory = SharedMemory(size=2**20)
    theirs = SharedMemory(memory.file)
    image = memory.place(np.arange(2**16, dtype=np.float32).reshape(16, -1))
    own = np.arange(5000.0)
    message: Any = {"images": [image, image[3:5]], "own": own, "small": 1}
    data = packed(message, 2**17, memory)
    assert data is not None
    assert len(data) < own.nbytes + 1000
    found = unpacked(memoryview(data), theirs)
    assert (found["images"][0] == image).all()
    assert (found["images"][1] == image[3:5]).all()
    assert (found["own"] == own).all()
    image[3] = -1
    assert (found["images"][1][0] == -1).all(), "it is the same memory"


@pytest.mark.parametrize("locked", [False, True])
def test_the_pages_of_free_parts_are_given_back_unless_a_worker_has_locked_them(locked: bool) -> None:
    memory = SharedMemory(size=2**22)
    memory.keeps_pages = locked
    held, freed = memory.take(2**20), memory.take(2**21)
    assert held is not None
    assert freed is not None
    held[:] = 7
    freed[:] = 1
    del freed
    before = os.fstat(memory.file).st_blocks
    memory.release_free()
    assert os.fstat(memory.file).st_blocks == before - (0 if locked else 2**21 // 512)
    assert (held == 7).all()
