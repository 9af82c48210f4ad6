"""Token buckets of API keys in memory that all gateways share, so that a rate limit holds over all of them together.

A bucket is a row of a table, which is found by a digest of the key's entry. So the gateways agree on the rows without a
message, also when the key file is read again. A row is changed under a lock on its bytes of the file, which the kernel
removes when a process dies.
"""

import fcntl
import hashlib
import mmap
import os
import struct

from policies.types import SpecError

_ROW = struct.Struct("<16sdd")  # digest, tokens that are missing, instant of the last change in s
ROWS = 65536


def create_table() -> int:
    """Create an empty table, and return its file descriptor, which all gateways need."""
    table = os.memfd_create("batchwright-rate-limits")
    os.ftruncate(table, ROWS * _ROW.size)
    return table


class SharedBuckets:
    """The table of buckets."""

    def __init__(self, table: int) -> None:
        """Map the table with this file descriptor, which `create_table` made and which stays open."""
        self.file = table
        self.map = mmap.mmap(table, 0)

    def bucket(self, entry: str, rate: float) -> "SharedTokenBucket":
        """The bucket of a key's entry, which is refilled at a rate, 1/s; a full one if the entry or its rate is new.

        Raises:
            SpecError: the table is full.
        """
        digest = hashlib.sha256(f"{entry} {rate}".encode()).digest()[:16]
        first = int.from_bytes(digest[:4], "little")
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        try:
            for probe in range(ROWS):
                offset = (first + probe) % ROWS * _ROW.size
                found = _ROW.unpack_from(self.map, offset)[0]
                if found == bytes(16):
                    _ROW.pack_into(self.map, offset, digest, 0.0, 0.0)
                if found in (digest, bytes(16)):
                    return SharedTokenBucket(self, offset, rate)
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        raise SpecError(f"over {ROWS} different keys with a rate since the start; restart the server")


class SharedTokenBucket:
    """Token bucket that is refilled at a rate, 1/s, up to one second's tokens and at least one."""

    def __init__(self, buckets: SharedBuckets, offset: int, rate: float) -> None:
        """The bucket in the row at this offset."""
        self._buckets = buckets
        self._offset = offset
        self._rate = rate
        self._capacity = max(1.0, rate)

    def take(self, now: float) -> float:
        """Take a token at `now`, s, and return 0; if there is none, return the time until the next one, s.

        `now` is read from a clock that all gateways share, such as time.monotonic.
        """
        file, memory, offset = self._buckets.file, self._buckets.map, self._offset
        fcntl.lockf(file, fcntl.LOCK_EX, _ROW.size, offset)
        try:
            digest, missing, updated = _ROW.unpack_from(memory, offset)
            now = max(now, updated)
            missing = max(0.0, missing - self._rate * (now - updated))
            wait: float = max(0.0, (missing + 1.0 - self._capacity) / self._rate)
            _ROW.pack_into(memory, offset, digest, missing if wait else missing + 1.0, now)
            return wait
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, _ROW.size, offset)
