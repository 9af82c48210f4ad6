"""The slots of a device: a state machine with cancellations, failed batches and copies that take time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.backends.cuda.device_slots import DeviceSlots, SlotState, SlotUse

COUNT = 5


class FakeCopy:
    """A copy that ends when the test says so, or when it is waited for."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class SlotUses(RuleBasedStateMachine):
    """Requests are admitted, uploaded in groups, batched, retried, answered and cancelled in any order."""

    @initialize()
    def start(self) -> None:
        self.slots = DeviceSlots(COUNT)
        self.requests: list[SlotUse] = []  # that are neither answered nor cancelled
        self.batches: list[list[SlotUse]] = []
        self.over: list[SlotUse] = []
        self.copies: list[tuple[FakeCopy, list[SlotUse]]] = []
        self.group = 0

    def batched(self) -> list[SlotUse]:
        return [use for batch in self.batches for use in batch]

    @rule()
    def admit(self) -> None:
        in_use = {use.index for use in [*self.requests, *self.batched()]}
        use = self.slots.take("source")
        assert (use is None) == (len(in_use) == COUNT), "a slot is lost, or handed out twice"
        if use is not None:
            assert use.index not in in_use
            assert all(use.index != old.index or use.generation > old.generation for old in self.over)
            self.requests.append(use)

    @precondition(lambda self: any(use.state is SlotState.FILLED for use in self.requests))
    @rule()
    def flush(self) -> None:
        filled = [use for use in self.requests if use.state is SlotState.FILLED]
        self.group, copy = self.group + 1, FakeCopy()
        self.slots.uploaded(filled, self.group, copy)
        self.copies.append((copy, filled))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_a_copy(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.copies))[0].ended = True

    @precondition(lambda self: any(use.state is SlotState.UPLOADED for use in self.requests))
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        ready = [use for use in self.requests if use.state is SlotState.UPLOADED]
        batch = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        self.slots.launch(batch)
        self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), succeeded=st.booleans())
    def end_a_batch(self, data: st.DataObject, succeeded: bool) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        if succeeded:
            for copy, uses in self.copies:
                copy.ended |= any(use in batch for use in uses)
        self.slots.end(batch, copied=succeeded)
        self.over += [use for use in batch if use not in self.requests]
        if succeeded:
            for use in [use for use in batch if use in self.requests]:
                self.leave(use)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.requests)))

    def leave(self, use: SlotUse) -> None:
        self.requests.remove(use)
        self.slots.release(use)
        if use not in self.batched():
            self.over.append(use)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def use_one_that_is_over(self, data: st.DataObject) -> None:
        use, free = data.draw(st.sampled_from(self.over)), self.slots.free
        self.slots.release(use)
        ready = [each for each in self.requests if each.state is SlotState.UPLOADED]
        with pytest.raises(RuntimeError, match="is FREE"):
            self.slots.launch([*ready, use])
        assert all(each.state is SlotState.UPLOADED for each in ready), "a refused batch leaves no slot in it"
        assert self.slots.free == free

    @invariant()
    def no_slot_is_free_in_flight(self) -> None:
        assert all(use.state is SlotState.IN_BATCH for use in self.batched())
        assert all(use.state is SlotState.FREE and use.source is None for use in self.over)
        assert self.slots.free == COUNT - len({use.index for use in [*self.requests, *self.batched()]})

    @invariant()
    def no_slot_is_free_while_it_is_copied(self) -> None:
        for copy, uses in self.copies:
            assert copy.ended or all(use.state is not SlotState.FREE for use in uses)


TestSlotUses = SlotUses.TestCase
TestSlotUses.settings = settings(max_examples=60, stateful_step_count=40)


def test_slots_are_used_in_turn_so_that_uploads_are_consecutive() -> None:
    slots = DeviceSlots(4)
    taken = [slots.take(), slots.take()]
    assert [use.index for use in taken if use] == [0, 1]
    for use in taken:
        assert use is not None
        slots.release(use)
    assert [use.index for use in (slots.take(), slots.take(), slots.take()) if use] == [2, 3, 0]


def test_a_slot_that_was_not_uploaded_cannot_be_launched() -> None:
    slots = DeviceSlots(1)
    use = slots.take()
    assert use is not None
    with pytest.raises(RuntimeError, match="slot 0, use 1, is FILLED, not UPLOADED"):
        slots.launch([use])
