"""Buffers that request bodies are received into, reused so that a large body needs no fresh pages of memory."""

import sys
from collections import defaultdict
from typing import Protocol

_LEAST = 2**16  # bytes; a smaller buffer comes from the heap, without a page fault for each page
_MOST = 2**20  # bytes; larger bodies are rare
_STEP = 2**16  # bytes by which buffers differ in size
_MAX_IDLE = 2**25  # bytes of all buffers that are kept for reuse


class BodyBuffer(Protocol):
    """Memory for one body.

    Attributes:
        view: the memory, of the size that was asked for.
    """

    view: memoryview

    def release(self) -> None:
        """End the use by the connection; views of the memory stay valid."""
        ...


class BodyBuffers:
    """A pool of buffers.

    A sample is a view of the body that it came in, and the device may read it even after its call has ended, such as
    after a disconnect. A buffer is therefore reused only if nothing refers to it any more.
    """

    def __init__(self) -> None:
        """Start without buffers."""
        self._idle: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._idle_bytes = 0

    def take(self, size: int) -> BodyBuffer:
        """Return a buffer of `size` bytes, with any content."""
        if not _LEAST <= size <= _MOST:
            return _PooledBuffer(self, [bytearray(size)], size)
        rounded = -(-size // _STEP) * _STEP
        idle = self._idle[rounded]
        if not idle:
            return _PooledBuffer(self, [bytearray(rounded)], size)
        self._idle_bytes -= rounded
        return _PooledBuffer(self, [idle.pop()], size)

    def give_back(self, owner: list[bytearray]) -> None:
        """Empty `owner`, which holds one buffer, and keep this for reuse if nothing else refers to it."""
        buffer = owner.pop()
        size = len(buffer)
        alone = sys.getrefcount(buffer) == _ALONE
        if alone and _LEAST <= size <= _MOST and not size % _STEP and self._idle_bytes + size <= _MAX_IDLE:
            self._idle[size].append(buffer)
            self._idle_bytes += size


class _PooledBuffer:
    __slots__ = ("_owner", "_pool", "view")

    def __init__(self, pool: BodyBuffers, owner: list[bytearray], size: int) -> None:
        self._pool = pool
        self._owner = owner
        self.view = memoryview(owner[0])[:size]

    def release(self) -> None:
        del self.view
        self._pool.give_back(self._owner)


def _references_of_a_local() -> int:
    buffer = [bytearray()].pop()
    return sys.getrefcount(buffer)


_ALONE = _references_of_a_local()  # references to an object that only a local variable refers to
