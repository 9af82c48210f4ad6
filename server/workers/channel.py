"""A channel: messages of any size between two processes, over a socket of packets.

A message is pickled. Large arrays are not copied by pickle: their bytes follow. A message of more than `INLINE` bytes
is written into memory of its own, which is sent as a file descriptor. Both ends are processes of
one server and trust each other: pickle would let one run code in the other.
"""

import mmap
import os
import pickle
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

INLINE = 2**15  # bytes; less than a third of a socket's default buffer
_NUMBER = struct.Struct("<Q")  # of the parts, before their sizes
_ELSEWHERE = b"\0"  # what is sent of a message that is in memory of its own
_SMALL = 2**12  # bytes of an array that is copied by pickle
_FILE = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(_FILE.size)
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
        message_parts = _parts(message)
        data = _joined(message_parts, INLINE)
        if data is not None:
            self._send(data, [] if file is None else [file])
            return
        assert file is None
        memory = _written(message_parts)
        try:
            self._send(_ELSEWHERE, [memory])
        finally:
            os.close(memory)

    def _send(self, data: bytes | bytearray, files: list[int]) -> None:
        while True:
            try:
                if files:
                    socket.send_fds(self._socket, [data], files, socket.MSG_NOSIGNAL)
                else:
                    self._socket.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
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
            return unpacked(memoryview(bytearray(data))), file
        assert file is not None
        memory = file
        try:
            return unpacked(memoryview(mmap.mmap(memory, 0, mmap.MAP_PRIVATE) if self._maps else _read(memory))), None
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


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), other


def packed(message: Any, most: int) -> bytearray | None:
    """A message as bytes for `unpacked`; None if they are more than `most`."""
    return _joined(_parts(message), most)


def unpacked(data: memoryview) -> Any:
    """The message again; its arrays are views of the data."""
    (count,) = _NUMBER.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _NUMBER.size)
    _, starts, _ = _layout(sizes)
    pickled, *buffers = (data[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (of our own process)


def _parts(message: Any) -> list[memoryview]:
    parts = list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer goes into the pickle."""
        raw = buffer.raw()
        if raw.nbytes <= _SMALL:
            return True
        parts.append(raw)
        return False

    pickled = pickle.dumps(message, protocol=5, buffer_callback=keep)
    return [memoryview(pickled), *parts]


def _layout(sizes: Sequence[int]) -> tuple[bytes, list[int], int]:
    """The head of a message with parts of these sizes, the start of each part, and the end of the last."""
    head, starts = struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes), list[int]()
    end = len(head)
    for size in sizes:
        starts.append(start := -(-end // _ALIGNMENT) * _ALIGNMENT)
        end = start + size
    return head, starts, end


def _joined(parts: Sequence[memoryview], most: int) -> bytearray | None:
    head, starts, end = _layout([part.nbytes for part in parts])
    if end > most:
        return None
    data = bytearray(end)
    for start, part in zip((0, *starts), (head, *parts), strict=True):
        data[start : start + len(part)] = part
    return data


def _written(parts: Sequence[memoryview]) -> int:
    """Write a message into memory of its own, and return its file descriptor."""
    head, starts, end = _layout([part.nbytes for part in parts])
    memory = os.memfd_create("batchwright-message", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, end)
        for start, part in zip((0, *starts), (memoryview(head), *parts), strict=True):
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
