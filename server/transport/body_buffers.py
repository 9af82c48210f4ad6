"""Buffers that request bodies are received into, reused so that a large body needs no fresh pages of memory."""

import sys
from collections import defaultdict

_LEAST = 2**16  # bytes; a smaller buffer comes from the heap, without a page fault for each page
_MOST = 2**20  # bytes; larger bodies are rare
_STEP = 2**16  # bytes by which buffers differ in size
_MAX_IDLE = 2**25  # bytes of all buffers that are kept for reuse


class BodyBuffers:
    """A pool of buffers.

    A sample is a view of the body that it came in, and the device may read it even after its call has ended, such as
    after a disconnect. A buffer is therefore reused only if nothing refers to it any more.
    """

    def __init__(self) -> None:
        """Start without buffers."""
        self._idle: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._idle_bytes = 0

    def take(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes, with any content."""
        if not _LEAST <= size <= _MOST:
            return bytearray(size)
        rounded = -(-size // _STEP) * _STEP
        idle = self._idle[rounded]
        if not idle:
            return bytearray(rounded)
        self._idle_bytes -= rounded
        return idle.pop()

    def give_back(self, owner: list[bytearray]) -> None:
        """Empty `owner`, which holds one buffer, and keep this for reuse if nothing else refers to it."""
        buffer = owner.pop()
        size = len(buffer)
        alone = sys.getrefcount(buffer) == _ALONE
        if alone and _LEAST <= size <= _MOST and not size % _STEP and self._idle_bytes + size <= _MAX_IDLE:
            self._idle[size].append(buffer)
            self._idle_bytes += size


def _references_of_a_local() -> int:
    buffer = [bytearray()].pop()
    return sys.getrefcount(buffer)


_ALONE = _references_of_a_local()  # references to an object that only a local variable refers to
