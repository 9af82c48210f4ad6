r"""Slots: rows of device memory into which samples are uploaded when their requests are admitted. Without torch.

    FREE --take--> FILLED --uploaded--> UPLOADED --launch--> IN_BATCH --end--> UPLOADED
      \------------------------- release, once no batch and no copy uses it --------/

A slot stays UPLOADED after its batch, since a failed batch is run again in parts. Each `take` makes a new use of the
slot with a higher generation; a use that was released has no effect any more.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from threading import RLock
from typing import Any, Protocol


class CopyEvent(Protocol):
    """The end of a group of copies to the device."""

    def query(self) -> bool:
        """Whether they have ended."""
        ...

    def synchronize(self) -> None:
        """Wait until they have ended."""
        ...


class SlotState(Enum):
    """What a use of a slot is at."""

    FREE = auto()
    FILLED = auto()  # the sample is in host memory, and not copied yet
    UPLOADED = auto()  # the copy has been started
    IN_BATCH = auto()


class SlotUse:
    """One use of a slot, from `take` to `release`.

    Attributes:
        index: number of the slot.
        generation: how often the slot was used before.
        state: what it is at.
        source: what the sample is copied from; None if that is the slot's own host memory, or after the copy.
        group: number of the group of copies that it was uploaded in.
        copy: end of these copies; None before, and when they are known to have ended.
        released: whether it is released as soon as its batch ends.
    """

    __slots__ = ("copy", "generation", "group", "index", "released", "source", "state")

    def __init__(self, index: int, generation: int, source: Any) -> None:
        self.index = index
        self.generation = generation
        self.source = source
        self.state = SlotState.FILLED
        self.group = 0
        self.copy: CopyEvent | None = None
        self.released = False


class DeviceSlots:
    """The slots of one model; all methods can be called in any thread.

    Attributes:
        lock: held by each method; a use may be released by the garbage collector while its own thread holds it.
    """

    def __init__(self, count: int) -> None:
        """All `count` slots are free."""
        self._free = deque(range(count))  # first in, first out, so that slots in use are consecutive
        self._generations = [0] * count
        self.lock = RLock()

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self, source: Any = None) -> SlotUse | None:
        """Take a free slot, to fill it, or to copy from `source` to it; None if all are in use."""
        with self.lock:
            if not self._free:
                return None
            index = self._free.popleft()
            self._generations[index] += 1
            return SlotUse(index, self._generations[index], source)

    def uploaded(self, uses: Iterable[SlotUse], group: int, copy: CopyEvent) -> None:
        """The copies of these filled slots were started, as the group of this number."""
        with self.lock:
            for use in uses:
                if use.state is not SlotState.FILLED:
                    raise _unexpected(use, SlotState.FILLED)
                use.state, use.group, use.copy = SlotState.UPLOADED, group, copy

    def launch(self, uses: Iterable[SlotUse]) -> None:
        """A batch reads these uploaded slots from now on.

        Raises:
            RuntimeError: one is not uploaded, has been released, or is in another batch; then none is in this batch.
        """
        with self.lock:
            uses = [*uses]
            for use in uses:
                if use.state is not SlotState.UPLOADED:
                    raise _unexpected(use, SlotState.UPLOADED)
            for use in uses:
                use.state = SlotState.IN_BATCH

    def end(self, uses: Iterable[SlotUse], copied: bool = False) -> None:
        """The batch of these slots has ended; `copied` if it has read them, so that their copies had ended before."""
        with self.lock:
            for use in uses:
                if use.state is not SlotState.IN_BATCH:
                    raise _unexpected(use, SlotState.IN_BATCH)
                use.state = SlotState.UPLOADED
                if copied:
                    use.source = use.copy = None
                if use.released:
                    self.release(use)

    def release(self, use: SlotUse) -> None:
        """End a use, at the latest when its batch ends, after the end of its copy; no effect the second time."""
        with self.lock:
            if use.state is SlotState.IN_BATCH:
                use.released = True
                return
            if use.state is SlotState.FREE:
                return
            if use.copy is not None and not use.copy.query():
                use.copy.synchronize()  # it takes microseconds, and its source must not change meanwhile
            use.state, use.source, use.copy = SlotState.FREE, None, None
            self._free.append(use.index)


def _unexpected(use: SlotUse, expected: SlotState) -> RuntimeError:
    return RuntimeError(f"slot {use.index}, use {use.generation}, is {use.state.name}, not {expected.name}")
