"""A minimal HTTP/1.1 protocol for uvicorn's Server: httptools parses the head, and the body is received in place.

The kernel copies the body into a buffer that exists already. There are no limits, no chunked bodies and no pipelining.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import httptools

_HEAD_BYTES = 4096
_BODY_BYTES = 1 << 18
_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class _Head:
    """Takes what the parser finds in the head of a request."""

    def __init__(self) -> None:
        self.content_length = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 14 and name.lower() == b"content-length":
            self.content_length = int(value)


class ReceivedInPlace(asyncio.BufferedProtocol):
    """One connection of the trivial batcher.

    Attributes:
        start_batcher: on an event loop; its `submit` takes a body, and what is called with the size of its batch.
    """

    start_batcher: ClassVar[Callable[[asyncio.AbstractEventLoop], Any]]

    _batcher: Any = None
    _buffers: list[memoryview] = []  # free ones, the most recently used one last

    def __init__(self, server_state: Any, **_: Any) -> None:
        """Take uvicorn's arguments for a protocol."""
        self._connections = server_state.connections
        self._transport: Any = None
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._body: memoryview | None = None
        self._received = self._length = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the batcher with the first connection."""
        if ReceivedInPlace._batcher is None:
            ReceivedInPlace._batcher = ReceivedInPlace.start_batcher(asyncio.get_running_loop())
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._transport = None
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Close the connection when the server ends."""
        self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        if self._body is None:
            return self._head[self._received :]
        return self._body[self._received : self._length]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the head when it is complete, and submit the body when it is."""
        self._received += nbytes
        if self._body is None and not self._begin_body():
            return
        if self._received == self._length:
            body, self._body, self._received = self._body, None, 0
            assert body is not None and self._batcher is not None  # noqa: PT018
            self._batcher.submit(body[: self._length], lambda size: self._answer(body, size))

    def _begin_body(self) -> bool:
        """Whether the head is complete; what came of the body is then in its buffer."""
        end = bytes(self._head[: self._received]).find(b"\r\n\r\n") + 4
        if end < 4:
            if self._received == _HEAD_BYTES:
                self._transport.abort()
            return False
        head = _Head()
        httptools.HttpRequestParser(head).feed_data(self._head[:end])
        begun = self._received - end
        if not begun <= head.content_length <= _BODY_BYTES:
            self._transport.abort()
            return False
        self._body = self._buffers.pop() if self._buffers else memoryview(bytearray(_BODY_BYTES))
        self._body[:begun] = self._head[end : self._received]
        self._received, self._length = begun, head.content_length
        return True

    def _answer(self, body: memoryview, size: int) -> None:
        self._buffers.append(body)
        if self._transport is not None:
            content = b'{"batch_size":%d}' % size
            self._transport.write(_RESPONSE % (len(content), content))
