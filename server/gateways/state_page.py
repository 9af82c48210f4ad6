"""The state that the serving process publishes in shared memory, for gateways to read without messages.

A page has a sequence number, which is odd while the serving process writes, a checksum, and the pickled state. A reader
takes what it has read only if the sequence number was even and the same before and after, and the checksum is right,
since a processor may write to memory in another order. Otherwise it reads again, and in the end uses the state it had.
"""

import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from server.gateways.error_fields import ErrorFields

_HEADER = struct.Struct("<II")  # length of the state, and checksum of it and the sequence number
_HEADER_AT = 8  # after the sequence number
_STATE_AT = _HEADER_AT + _HEADER.size
_BYTES_PER_MODEL = 4096
_ATTEMPTS = 100


class ModelState(NamedTuple):
    """The state of one model.

    Attributes:
        revision: revision that new calls use.
        unloaded: the error of new calls if the model is unloaded, else None.
        rejected: the error of a new call of one sample if it would be rejected, else None.
        ready: whether new calls of the model should be sent to this server.
        least_response: the least time in which one more sample would be answered, s.
    """

    revision: int
    unloaded: ErrorFields | None
    rejected: ErrorFields | None
    ready: bool
    least_response: float


class FleetState(NamedTuple):
    """The state of the serving process.

    Attributes:
        published: instant of publication, s of the serving process's clock.
        shutting_down: whether the shutdown has begun.
        ready: whether new calls should be sent to this server.
        alive: whether the devices serve.
        waiting: number of waiting requests.
        capacity: maximum number of waiting requests.
        backlog: the least time in which a device serves all its requests, s.
        models: by name.
    """

    published: float
    shutting_down: bool
    ready: bool
    alive: bool
    waiting: int
    capacity: int
    backlog: float
    models: Mapping[str, ModelState]


def create_page(models: int) -> int:
    """Create a page for this number of models, and return its file descriptor."""
    page = os.memfd_create("batchwright-state")
    os.ftruncate(page, mmap.PAGESIZE + _BYTES_PER_MODEL * models)
    return page


class StatePage:
    """A page, of which one process is the writer."""

    def __init__(self, page: int) -> None:
        """Map the page with this file descriptor, which `create_page` made; it may be closed."""
        self._map = mmap.mmap(page, 0)
        self._sequence = memoryview(self._map)[:8].cast("Q")
        self._read = 0  # sequence number of the state below
        self._state: FleetState | None = None

    def write(self, state: FleetState) -> None:
        """Publish a state.

        Raises:
            ValueError: it is larger than the page.
        """
        content = pickle.dumps(state, 5)
        if _STATE_AT + len(content) > len(self._map):
            raise ValueError(f"the state takes {len(content)} bytes, over the page's {len(self._map)}")
        sequence = self._sequence[0] | 1  # odd already if the writer before died while it wrote
        self._sequence[0] = sequence
        _HEADER.pack_into(self._map, _HEADER_AT, len(content), _checksum(content, sequence + 1))
        self._map[_STATE_AT : _STATE_AT + len(content)] = content
        self._sequence[0] = sequence + 1

    def read(self) -> FleetState | None:
        """Return the latest state; None if none was published yet."""
        sequence = self._sequence[0]
        for _ in range(_ATTEMPTS):
            if sequence == self._read:
                break
            length, checksum = _HEADER.unpack_from(self._map, _HEADER_AT)
            content = self._map[_STATE_AT : _STATE_AT + length]
            before, sequence = sequence, self._sequence[0]
            if sequence == before and sequence % 2 == 0 and _checksum(content, sequence) == checksum:
                self._state, self._read = pickle.loads(content), sequence  # noqa: S301  (of our own process)
        return self._state


def _checksum(content: bytes, sequence: int) -> int:
    return zlib.crc32(content, sequence & 0xFFFFFFFF)
