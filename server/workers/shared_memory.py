"""Memory that the main process and its workers share, into which the inputs of batches are received.

A message between them does not copy an array that lies there. An array may be read by a worker as long as the main
process refers to it, and so the memory of one is free again when nothing refers to it any more.

The memory is a file without a name in no file system: /dev/shm, which a container limits to 64 MiB, has no part in it.
Its pages are allocated at their first use.
"""

import ctypes
import mmap
import os
import weakref
from bisect import bisect_left
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 2**28  # bytes; an array that finds no place is in memory of its own, which takes a copy for its batch
_LEAST = 2**14  # bytes; smaller arrays are copied with their message
_MOST = 2**23  # bytes of a buffer
_ALIGNMENT = 2**12  # bytes, a page


class FreeSpace:
    """Which parts of a memory are free: the first that is large enough is taken; neighbours that are free are one."""

    def __init__(self, size: int) -> None:
        """All `size` bytes are free."""
        self._starts, self._ends = [0], [size]

    def take(self, size: int) -> int | None:
        """Take `size` bytes, and return where they start; None if no free part is large enough."""
        for index, (start, end) in enumerate(self.parts()):
            if end - start >= size:
                self._starts[index] += size
                if start + size == end:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free what was taken."""
        index, end = bisect_left(self._starts, start), start + size
        if index and self._ends[index - 1] == start:
            index -= 1
            self._ends[index] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        if index + 1 < len(self._starts) and self._starts[index + 1] == end:
            self._ends[index] = self._ends.pop(index + 1)
            del self._starts[index + 1]

    def parts(self) -> list[tuple[int, int]]:
        """The free parts, each with its start and end."""
        return [*zip(self._starts, self._ends, strict=True)]

    @property
    def free(self) -> int:
        """The number of free bytes."""
        return sum(self._ends) - sum(self._starts)


class SharedMemory:
    """One end of the memory; all methods can be called in any thread.

    Attributes:
        file: its descriptor.
        memory: the mapping.
        keeps_pages: whether `release_free` does nothing. It would take the pages from under a worker that has them
            page-locked: its device would go on to read them, and the main process write to others.
    """

    keeps_pages = False

    def __init__(self, file: int | None = None, size: int = SIZE) -> None:
        """Make the memory, or map the one with this descriptor, which is then owned."""
        if file is None:
            file = os.memfd_create("batchwright-inputs", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
        self.file = file
        self.memory = mmap.mmap(file, os.fstat(file).st_size)
        whole = np.frombuffer(self.memory, np.uint8)
        self._address: int = whole.__array_interface__["data"][0]
        self._size = len(whole)
        self._space = FreeSpace(self._size)
        self._lock = Lock()
        self._freed: deque[tuple[int, int]] = deque()  # a finalizer may run while its own thread has the lock

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """An array of `size` bytes, which is free again when nothing refers to its memory; None if there is no room."""
        if size < _LEAST:
            return None
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._take_back()
            start = self._space.take(rounded)
        if start is None:
            return None
        part: Any = (ctypes.c_ubyte * size).from_buffer(self.memory, start)
        weakref.finalize(part, self._freed.append, (start, rounded)).atexit = False
        found: NDArray[np.uint8] = np.frombuffer(part, np.uint8)
        return found

    def buffer(self, size: int) -> memoryview:
        """Memory of `size` bytes: a part of this one, or of its own if it is small, very large, or finds no place."""
        found = self.take(size) if size <= _MOST else None
        return memoryview(bytearray(size)) if found is None else found.data

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array of numbers in this memory; the array itself if it is small, there, or finds no place."""
        if array.dtype.hasobject or self.contains(array):
            return array
        found = self.take(array.nbytes)
        if found is None:
            return array
        placed = found.view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed

    def find(self, data: memoryview) -> int | None:
        """Where bytes are in the memory; None if they are not there."""
        return self._offset(np.frombuffer(data, np.uint8))

    def contains(self, array: NDArray[Any]) -> bool:
        """Whether an array is in the memory."""
        return self._offset(array) is not None

    def _offset(self, array: NDArray[Any]) -> int | None:
        address: int = array.__array_interface__["data"][0]
        start = address - self._address
        return start if start >= 0 and start + array.nbytes <= self._size else None

    def at(self, offset: int, size: int) -> memoryview:
        """The bytes from an offset on."""
        return memoryview(self.memory)[offset : offset + size]

    def release_free(self) -> None:
        """Give the pages of the parts that are free back to the system, unless they are kept."""
        if self.keeps_pages:
            return
        with self._lock:
            self._take_back()
            for start, end in self._space.parts():
                self.memory.madvise(mmap.MADV_REMOVE, start, end - start)

    def _take_back(self) -> None:
        while self._freed:
            self._space.give_back(*self._freed.popleft())

    @property
    def used(self) -> int:
        """Number of bytes in use."""
        with self._lock:
            self._take_back()
            return self._size - self._space.free
