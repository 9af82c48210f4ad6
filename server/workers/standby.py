"""The standby launch of a worker: a message in shared memory, which exactly one side takes.

The token is an eventfd that counts to one. To offer, the main process writes the message and then the token. The
side that reads the token has the message: the worker when a batch ends, or the main process, which withdraws it.
"""

import mmap
import os
import struct
from typing import Any

from server.workers.channel import packed, unpacked
from server.workers.shared_memory import SharedMemory

_SIZE = 2**20  # bytes; a larger message is not offered
_LENGTH = struct.Struct("<Q")


class StandbyMemory:
    """One end of the place.

    Attributes:
        files: descriptors of the memory and of the token.
    """

    def __init__(self, files: tuple[int, int] | None = None, shared: SharedMemory | None = None) -> None:
        """Make a place, or use one with these descriptors, which are then owned; `shared` as in `Channel`."""
        if files is None:
            memory = os.memfd_create("batchwright-standby", os.MFD_CLOEXEC)
            os.ftruncate(memory, _SIZE)
            files = memory, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self.files = files
        self._shared = shared
        self._memory = mmap.mmap(files[0], _SIZE)

    def offer(self, message: Any) -> bool:
        """Offer a message, after the former one was taken or withdrawn; False if it is too large."""
        data = packed(message, _SIZE - _LENGTH.size, self._shared)
        if data is None:
            return False
        _LENGTH.pack_into(self._memory, 0, len(data))
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = bytes(data)
        os.eventfd_write(self.files[1], 1)
        return True

    def withdraw(self) -> bool:
        """Take the token back; False if the other side has it."""
        try:
            os.eventfd_read(self.files[1])
        except BlockingIOError:
            return False
        return True

    def take(self) -> Any:
        """Take the message, a copy; None without one."""
        if not self.withdraw():
            return None
        (length,) = _LENGTH.unpack_from(self._memory)
        data = bytearray(self._memory[_LENGTH.size : _LENGTH.size + length])
        return unpacked(memoryview(data), self._shared)

    def close(self) -> None:
        """Close this end."""
        self._memory.close()
        for file in self.files:
            os.close(file)
