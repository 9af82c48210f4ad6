"""A channel: messages between a gateway and the serving process over a stream socket of the AF_UNIX family.

A message has a header of fixed size, and content. All messages of one turn of the event loop are sent together. asyncio
buffers what the socket does not take, so that neither side ever blocks. `Channel.backlog` is the size of that buffer.
The end of the stream means that the other process has died, or has closed the channel.

A stream is used in place of a socket of packets, since messages may be larger than the largest packet, and since one
call receives all that have arrived.

    kind       from      content, pickled
    SUBMIT     gateway   model, revision, expiry, sizes, shapes, `PackedSamples`: the inputs, and the span's context
    CANCEL     gateway   none; the client is gone
    ANSWER     serving   `PackedSamples`: the outputs; the other facts of each, and links of the span. The slots
                         are not read any more
    FAIL       serving   `ErrorFields`; the slots may still be read
    UNREAD     serving   none; the slots of a failed or cancelled call are not read any more
    CONTROL    both      any small object, for the processes' own use

The header has the length of the content, the kind and the id of the call. The id is never used a second time, so that a
late message is recognised. Both ends are processes of one server and trust each other: pickle would let one run code in
the other.
"""

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

_log = logging.getLogger("batchwright.gateways")
_HEADER = struct.Struct("<QIB")
_CLOSE_TIMEOUT = 5.0  # s
SUBMIT, CANCEL, ANSWER, FAIL, UNREAD, CONTROL = range(6)
OnMessage = Callable[[int, int, memoryview], None]


class Channel(asyncio.Protocol):
    """One end of a channel.

    Attributes:
        loop: the event loop that it runs on.
    """

    def __init__(self, on_message: OnMessage, on_lost: Callable[[], None]) -> None:
        """`on_message` gets kind, id and content; `on_lost` is called once, when the channel has ended."""
        self._on_message = on_message
        self._on_lost = on_lost
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._partial = bytearray()  # the beginning of a message
        self._ended = asyncio.Event()

    async def open(self, sock: socket.socket) -> None:
        """Begin on one end of a pair of stream sockets, which the channel then owns; messages may arrive at once."""
        await self.loop.create_unix_connection(lambda: self, sock=sock)

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None

    def send(self, kind: int, call: int, content: bytes = b"") -> None:
        """Send a message; no effect unless the channel is open."""
        if self._transport is None:
            return
        if not self._outgoing:
            self.loop.call_soon(self._flush)
        self._outgoing += (_HEADER.pack(call, len(content), kind), content)

    @property
    def backlog(self) -> int:
        """The number of bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def close(self) -> None:
        """Send all messages, end the channel, and return when that is done, or after 5 s."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
        try:
            await asyncio.wait_for(self._ended.wait(), _CLOSE_TIMEOUT)
        except TimeoutError:
            self.abort()
            await self._ended.wait()

    def abort(self) -> None:
        """End the channel at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to send."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no base class

    def connection_lost(self, _exc: Exception | None) -> None:
        """Report the end."""
        self._transport = None
        self._outgoing.clear()
        self._ended.set()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Handle the messages that are complete."""
        if not self._partial:
            done = self._handle(data)
            self._partial += memoryview(data)[done:]
            return
        self._partial += data
        whole = bytes(self._partial) if self._is_complete() else b""
        if whole:
            self._partial.clear()
            self._partial += memoryview(whole)[self._handle(whole) :]

    def _is_complete(self) -> bool:
        size = len(self._partial)
        return size >= _HEADER.size and size - _HEADER.size >= _HEADER.unpack_from(self._partial)[1]

    def _handle(self, data: bytes) -> int:
        """Handle the messages at the beginning of the data, and return their size."""
        start, size, view = 0, len(data), memoryview(data)
        while size - start >= _HEADER.size:
            call, length, kind = _HEADER.unpack_from(data, start)
            content = start + _HEADER.size
            if size - content < length:
                break
            start = content + length
            self._on_message(kind, call, view[content:start])
        return start


def handle_control(handle: Callable[[Any], None], content: memoryview) -> None:
    """Handle the content of a CONTROL message; log an exception, which would end the channel and all its calls."""
    try:
        handle(pickle.loads(content))  # noqa: S301  (of our own process)
    except Exception:  # noqa: BLE001  (a bug costs one message)
        _log.exception("a message between a gateway and the serving process failed")
