"""The slots of a gateway: a state machine with calls, cancellations, stale uses and gateways that die."""

import mmap
import os
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from server.gateways.slots import Slot, Slots, create_memory

SIZE, COUNT = 5000, 4


class SlotUses(RuleBasedStateMachine):
    """A gateway fills slots with marks, and a serving process reads them from its own, read-only mapping."""

    @initialize()
    def start(self) -> None:
        self.marks = count(1)
        self.reading: list[tuple[Slot, NDArray[np.uint64], int]] = []
        self.orphaned: list[tuple[NDArray[np.uint64], int]] = []  # arrays of calls of gateways that have died
        self.begin_gateway()

    def begin_gateway(self) -> None:
        memory = create_memory(SIZE, COUNT)
        self.slots, self.mapped = Slots(memory, SIZE), mmap.mmap(memory, 0, prot=mmap.PROT_READ)
        os.close(memory)
        self.held: list[Slot] = []
        self.ended: list[Slot] = []  # whose use has ended: nothing is done with them but what has no effect

    def in_use(self) -> set[int]:
        return {slot.index for slot in self.held} | {slot.index for slot, _, _ in self.reading}

    def end_if_unused(self, slot: Slot) -> None:
        if all(slot is not each for each in [*self.held, *(lent for lent, _, _ in self.reading)]):
            self.ended.append(slot)

    @rule()
    def take(self) -> None:
        before, slot = self.in_use(), self.slots.take()
        assert (slot is None) == (len(before) == COUNT), "a slot is lost, or handed out twice"
        if slot is not None:
            assert slot.index not in before
            assert slot.held
            slot.view[:] = np.full(SIZE // 8, next(self.marks), np.uint64).tobytes()
            self.held.append(slot)

    @precondition(lambda self: any(slot.held for slot in self.held))
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.held if slot.held]))
        slot.lend()
        found = self.slots.find(np.frombuffer(slot.view, np.uint8).__array_interface__["data"][0] + 8, SIZE - 8)
        assert found == (slot, self.slots.offset_of(slot) + 8)
        array: NDArray[np.uint64] = np.ndarray(SIZE // 8, np.uint64, self.mapped, self.slots.offset_of(slot))
        self.reading.append((slot, array, int(array[0])))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def answer_or_confirm_a_cancellation(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.reading))
        self.reading = [each for each in self.reading if each is not reading]
        reading[0].end_reading()
        self.end_if_unused(reading[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.held = [each for each in self.held if each is not slot]
        slot.release()
        slot.release()
        self.end_if_unused(slot)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_a_use_that_has_ended(self, data: st.DataObject) -> None:
        stale = data.draw(st.sampled_from(self.ended))
        assert not stale.held
        stale.release()
        stale.end_reading()
        with pytest.raises(AssertionError):
            stale.lend()

    @precondition(lambda self: self.reading or self.held)
    @rule()
    def die(self) -> None:
        self.orphaned += [(array, mark) for _, array, mark in self.reading]
        self.reading = []
        self.begin_gateway()

    @precondition(lambda self: self.orphaned)
    @rule()
    def end_batch_of_a_dead_gateway(self) -> None:
        self.orphaned.pop(0)

    @invariant()
    def nothing_is_overwritten_while_it_is_read(self) -> None:
        for _, array, mark in self.reading:
            assert (array == mark).all()
            assert not array.flags.writeable
        for array, mark in self.orphaned:
            assert (array == mark).all()

    @invariant()
    def no_slot_is_lost(self) -> None:
        assert self.slots.free == COUNT - len(self.in_use())


TestSlotUses = SlotUses.TestCase
TestSlotUses.settings = settings(max_examples=60, stateful_step_count=40)


def test_the_slot_that_became_free_last_is_taken_first() -> None:
    slots = Slots(create_memory(SIZE, COUNT), SIZE)
    taken = [slot for _ in range(COUNT) if (slot := slots.take()) is not None]
    assert len(taken) == COUNT
    for slot in (taken[2], taken[0]):
        slot.release()
    again = slots.take()
    assert again is not None
    assert again.index == taken[0].index


def test_bytes_outside_of_slots_or_across_two_are_not_found() -> None:
    slots = Slots(create_memory(4096, 2), 4096)
    first = slots.take()
    assert first is not None
    begin = np.frombuffer(first.view, np.uint8).__array_interface__["data"][0] - slots.offset_of(first)
    assert slots.find(begin + slots.offset_of(first), 4096) == (first, slots.offset_of(first))
    assert slots.find(begin + 4000, 200) is None
    assert slots.find(begin - 1, 1) is None
    assert slots.find(begin + 2 * 4096, 1) is None
    assert slots.find(begin + 4096 - slots.offset_of(first), 10) is None, "this one was never taken"


def test_the_memory_cannot_shrink_under_a_reader() -> None:
    memory = create_memory(SIZE, COUNT)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)
    os.close(memory)
