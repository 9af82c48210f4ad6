"""A channel: messages of any size between two processes, over a socket of packets.

A message is pickled. Large arrays are not copied by pickle: their bytes follow, or their place in the shared memory.
A message of more than `INLINE` bytes is written into memory of its own, which is sent as a file descriptor.
Both ends are processes of one server and trust each other: pickle would let one run code in the other.
"""

import mmap
import os
import pickle
import select
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from server.workers.shared_memory import SharedMemory

INLINE = 2**15  # bytes; less than a third of a socket's default buffer
_NUMBER = struct.Struct("<Q")  # of the parts; size and place of each follow
_ELSEWHERE = b"\0"  # what is sent of a message that is in memory of its own
_SMALL = 2**12  # bytes of an array that is copied by pickle
_FILE = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(_FILE.size)
_ALIGNMENT = 64  # bytes; numerical libraries expect aligned arrays


class Channel:
    """One end of a channel; a thread at a time may send, and another one receive."""

    def __init__(self, connection: socket.socket, maps: bool = False, shared: SharedMemory | None = None) -> None:
        """Use one end of a pair of SOCK_SEQPACKET sockets, which the channel then owns.

        Args:
            connection: the socket.
            maps: whether large messages are mapped, and not copied. Each mapping keeps a file open as long as an array
                of the message lives.
            shared: the memory in which arrays need not be sent.
        """
        self._socket = connection
        self._maps = maps
        self._shared = shared
        self._close = weakref.finalize(self, connection.close)

    def send(self, message: Any, file: int | None = None, wait: bool = True) -> None:
        """Send a message, and with a small one a file descriptor.

        Raises:
            BlockingIOError: there is no room in the socket, and this does not wait.
            OSError: the other end is gone.
        """
        message_parts = _parts(message, self._shared)
        data = _joined(message_parts, INLINE)
        if data is not None:
            self._send(data, [] if file is None else [file], wait)
            return
        assert file is None
        memory = _written(message_parts)
        try:
            self._send(_ELSEWHERE, [memory], wait)
        finally:
            os.close(memory)

    def _send(self, data: bytes | bytearray, files: list[int], wait: bool) -> None:
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        while True:
            try:
                if files:  # not by socket.send_fds, which ignores the flags
                    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(map(_FILE.pack, files))
                    self._socket.sendmsg([data], [rights], flags)
                else:
                    self._socket.send(data, flags)
            except BlockingIOError:
                if not wait:
                    raise
                self._await(select.POLLOUT)
            else:
                return

    def _await(self, event: int) -> None:
        """Wait for an event; a socket that an event loop has watched does not wait by itself any more."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll()

    def receive(self, wait: bool = True) -> tuple[Any, int | None]:
        """Wait for a message; return it, and the file descriptor that came with it.

        Raises:
            EOFError: the other end is closed, or its process has ended.
            BlockingIOError: there is no message, and this does not wait.
        """
        try:
            if wait:
                self._await(select.POLLIN)
            data, extra, _, _ = self._socket.recvmsg(INLINE, _ROOM, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except (OSError, ValueError) as error:  # it may have been closed
            raise EOFError from error
        if not data:
            raise EOFError
        file = _FILE.unpack(extra[0][2])[0] if extra else None
        if data != _ELSEWHERE:
            return unpacked(memoryview(bytearray(data)), self._shared), file
        assert file is not None
        memory = file
        try:
            whole = mmap.mmap(memory, 0, mmap.MAP_PRIVATE) if self._maps else _read(memory)
            return unpacked(memoryview(whole), self._shared), None
        finally:
            os.close(memory)

    def fileno(self) -> int:
        """The descriptor to wait on for a message."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """End the channel, so that a thread that waits on either end gets EOFError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close this end, which also happens when nothing refers to it."""
        self._close()


def channel_pair(shared: SharedMemory | None = None) -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end; `shared` as in `Channel`."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one, shared=shared), other


def packed(message: Any, most: int, shared: SharedMemory | None = None) -> bytearray | None:
    """A message as bytes for `unpacked`; None if they are more than `most`."""
    return _joined(_parts(message, shared), most)


def unpacked(data: memoryview, shared: SharedMemory | None = None) -> Any:
    """The message again; its arrays are views of the data, or of the shared memory."""
    (count,) = _NUMBER.unpack_from(data)
    numbers = struct.unpack_from(f"<{2 * count}Q", data, _NUMBER.size)
    pickled, *buffers = _places(data, numbers, shared)
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (of our own process)


def _places(data: memoryview, numbers: Sequence[int], shared: SharedMemory | None) -> Iterator[memoryview]:
    """The parts of a message; `numbers` are the size of each, and its place as in `_Part`."""
    at = _NUMBER.size * (1 + len(numbers))
    for size, place in zip(numbers[::2], numbers[1::2], strict=True):
        if place:
            assert shared is not None
            yield shared.at(place - 1, size)
        else:
            at = _aligned(at)
            yield data[at : at + size]
            at += size


class _Part(NamedTuple):
    """A part of a message: its bytes; 0 if they follow, or 1 + where they are in the shared memory."""

    data: memoryview
    place: int = 0


def _parts(message: Any, shared: SharedMemory | None) -> list[_Part]:
    parts = list[_Part]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer goes into the pickle."""
        raw = buffer.raw()
        if raw.nbytes <= _SMALL:
            return True
        offset = None if shared is None else shared.find(raw)
        parts.append(_Part(raw, 0 if offset is None else 1 + offset))
        return False

    pickled = pickle.dumps(message, protocol=5, buffer_callback=keep)
    return [_Part(memoryview(pickled)), *parts]


def _layout(parts: Sequence[_Part]) -> tuple[list[tuple[int, memoryview]], int]:
    """The bytes of a message, each with its start, and the end of the last."""
    numbers = [number for part in parts for number in (part.data.nbytes, part.place)]
    head = memoryview(struct.pack(f"<{1 + len(numbers)}Q", len(parts), *numbers))
    placed, end = [(0, head)], len(head)
    for data, place in parts:
        if not place:
            start = _aligned(end)
            placed.append((start, data))
            end = start + data.nbytes
    return placed, end


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


def _joined(parts: Sequence[_Part], most: int) -> bytearray | None:
    placed, end = _layout(parts)
    if end > most:
        return None
    data = bytearray(end)
    for start, part in placed:
        data[start : start + len(part)] = part
    return data


def _written(parts: Sequence[_Part]) -> int:
    """Write a message into memory of its own, and return its file descriptor."""
    placed, end = _layout(parts)
    memory = os.memfd_create("batchwright-message", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, end)
        for start, part in placed:
            _write(memory, part, start)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _read(file: int) -> bytearray:
    data, at = bytearray(os.fstat(file).st_size), 0
    while at < len(data):
        at += os.preadv(file, [memoryview(data)[at:]], at)
    return data
