"""A channel: messages of any size between two processes, over a socket of packets.

A message is pickled. Its arrays are not copied by pickle: their bytes follow. A message of more than `_INLINE` bytes is
written into memory of its own, which is sent as a file descriptor. Both ends are processes of
one server and trust each other: pickle would let one run code in the other.
"""

import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

_INLINE = 2**15  # bytes; less than a third of a socket's default buffer
_NUMBER = struct.Struct("<Q")  # of the parts, before their sizes
_ELSEWHERE = b"\0"  # what is sent of a message that is in memory of its own
_ALIGNMENT = 64  # bytes; numerical libraries expect aligned arrays


class Channel:
    """One end of a channel; a thread at a time may send, and another one receive."""

    def __init__(self, connection: socket.socket, maps: bool = False) -> None:
        """Use one end of a pair of SOCK_SEQPACKET sockets, which the channel then owns.

        With `maps` large messages are mapped, and not copied. Each mapping keeps a file open as long as an array of
        the message lives.
        """
        self._socket = connection
        self._maps = maps
        self._close = weakref.finalize(self, connection.close)

    def send(self, message: Any, file: int | None = None) -> None:
        """Send a message, and with a small one a file descriptor.

        Raises:
            OSError: the other end is gone.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        head, starts, end = _layout(sizes)
        if end <= _INLINE:
            data = bytearray(end)
            for start, part in zip((0, *starts), (head, *parts), strict=True):
                data[start : start + len(part)] = part
            socket.send_fds(self._socket, [data], [] if file is None else [file], socket.MSG_NOSIGNAL)
            return
        assert file is None
        memory = os.memfd_create("batchwright-message", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, end)
            for start, part in zip((0, *starts), (memoryview(head), *parts), strict=True):
                _write(memory, part, start)
            socket.send_fds(self._socket, [_ELSEWHERE], [memory], socket.MSG_NOSIGNAL)
        finally:
            os.close(memory)

    def receive(self) -> tuple[Any, int | None]:
        """Wait for a message; return it, and the file descriptor that came with it.

        Raises:
            EOFError: the other end is closed, or its process has ended.
        """
        try:
            data, files, _, _ = socket.recv_fds(self._socket, _INLINE, 1)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if data != _ELSEWHERE:
            return _loaded(memoryview(bytearray(data))), next(iter(files), None)
        (memory,) = files
        try:
            return _loaded(memoryview(mmap.mmap(memory, 0, mmap.MAP_PRIVATE) if self._maps else _read(memory))), None
        finally:
            os.close(memory)

    def shut_down(self) -> None:
        """End the channel, so that a thread that waits on either end gets EOFError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close this end, which also happens when nothing refers to it."""
        self._close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), other


def _layout(sizes: Sequence[int]) -> tuple[bytes, list[int], int]:
    """The head of a message with parts of these sizes, the start of each part, and the end of the last."""
    head, starts = struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes), list[int]()
    end = len(head)
    for size in sizes:
        starts.append(start := -(-end // _ALIGNMENT) * _ALIGNMENT)
        end = start + size
    return head, starts, end


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _read(file: int) -> bytearray:
    data, at = bytearray(os.fstat(file).st_size), 0
    while at < len(data):
        at += os.preadv(file, [memoryview(data)[at:]], at)
    return data


def _loaded(data: memoryview) -> Any:
    (count,) = _NUMBER.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _NUMBER.size)
    _, starts, _ = _layout(sizes)
    pickled, *buffers = (data[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (of our own process)
