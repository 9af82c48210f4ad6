r"""Slots: the memory in which a gateway receives bodies and keeps the arrays that the serving process reads.

One memory belongs to one gateway, which alone allocates, without locks. Slots have one size and start on page borders.
The slot that became free last is taken first, since its pages are in the cache.

A slot has two users. The gateway holds it from `Slots.take` to `Slot.release`, while it fills it and uses what is in
it. The serving process may read it from `Slot.lend` to `Slot.end_reading`: from the submission of a call until its
answer, or until the confirmation that nothing reads the inputs of a failed or cancelled call any more. The slot is free
again when neither uses it.

    FREE --take--> HELD --lend--> HELD | READ --release--> READ --end_reading--> FREE
                     \--release--> FREE    \--end_reading--> HELD --release--> FREE

Each `take` makes a new `Slot`, the generation of that use. One of an earlier use has no users and no effect any more.
"""

import fcntl
import mmap
import os

import numpy as np

_HELD, _READ = 1, 2  # the users of a slot


def create_memory(slot_size: int, count: int) -> int:
    """Create the memory of one gateway, of `count` slots of `slot_size` bytes, and return its file descriptor."""
    memory = os.memfd_create("batchwright-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, count * _stride(slot_size))
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # reading beyond the end would be a bus error
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def _stride(slot_size: int) -> int:
    return -(-slot_size // mmap.PAGESIZE) * mmap.PAGESIZE


class Slots:
    """The slots of a gateway.

    Attributes:
        slot_size: size of a slot, bytes.
        count: number of slots.
    """

    def __init__(self, memory: int, slot_size: int) -> None:
        """Map the memory with this file descriptor, which `create_memory` made for this slot size; it may be closed."""
        mapped = mmap.mmap(memory, 0)
        whole = memoryview(mapped)
        self.slot_size = slot_size
        self._stride = _stride(slot_size)
        self.count = len(mapped) // self._stride
        self._address: int = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        starts = range(0, self.count * self._stride, self._stride)
        self._views = [whole[start : start + slot_size] for start in starts]
        self._slots: list[Slot | None] = [None] * self.count  # the latest use of each
        self._free = [*range(self.count)]

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self) -> "Slot | None":
        """Take a free slot, which the gateway then holds; None if all are in use."""
        if not self._free:
            return None
        index = self._free.pop()
        slot = self._slots[index] = Slot(index, self._views[index], self._free)
        return slot

    def find(self, address: int, size: int) -> "tuple[Slot, int] | None":
        """The slot in use that contains `size` bytes from a memory address on, and their offset in the memory.

        None if they are not in a slot, or not within a single one.
        """
        offset = address - self._address
        index, start = divmod(offset, self._stride)
        if not 0 <= index < self.count or start + size > self.slot_size:
            return None
        slot = self._slots[index]
        return None if slot is None else (slot, offset)

    def offset_of(self, slot: "Slot") -> int:
        """The offset of a slot in the memory, bytes."""
        return slot.index * self._stride


class Slot:
    """One use of a slot.

    Attributes:
        index: number of the slot.
        view: its memory, writable, uint8 [slot size].
    """

    __slots__ = ("_free", "_users", "index", "view")

    def __init__(self, index: int, view: memoryview, free: list[int]) -> None:
        """A use by the gateway; the index is appended to `free` when it ends."""
        self.index = index
        self.view = view
        self._free = free
        self._users = _HELD

    @property
    def held(self) -> bool:
        """Whether the gateway holds it, and the serving process may not read it."""
        return self._users == _HELD

    def lend(self) -> None:
        """Begin the use by the serving process; the gateway must hold the slot, and the serving process not read it."""
        assert self.held
        self._users = _HELD | _READ

    def release(self) -> None:
        """End the use by the gateway; no effect the second time."""
        self._end(_HELD)

    def end_reading(self) -> None:
        """End the use by the serving process; no effect the second time."""
        self._end(_READ)

    def _end(self, user: int) -> None:
        if self._users & user:
            self._users ^= user
            if not self._users:
                self._free.append(self.index)
