"""Channels: messages arrive whole and in order, however the stream is split and however small the buffers are."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.gateways.channel import CONTROL, SUBMIT, Channel

Message = tuple[int, int, bytes]


class Received:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lost = 0
        self.changed = asyncio.Event()

    def on_message(self, kind: int, call: int, content: memoryview) -> None:
        self.messages.append((kind, call, bytes(content)))
        self.changed.set()

    def on_lost(self) -> None:
        self.lost += 1
        self.changed.set()

    async def wait(self, count: int) -> None:
        while len(self.messages) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10.0)

    async def wait_lost(self) -> None:
        while not self.lost:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def pair(buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if buffer is not None:
        for sock in (one, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return one, other


async def open_channel(sock: socket.socket, received: Received) -> Channel:
    channel = Channel(received.on_message, received.on_lost)
    await channel.open(sock)
    return channel


class Wire(asyncio.Transport):
    """Takes what a channel writes."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += bytes(data)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(1, 60), max_size=20),
)
def test_messages_are_whole_wherever_the_stream_is_split(messages: list[Message], pieces: list[int]) -> None:
    async def scenario() -> None:
        received, wire = Received(), Wire()
        sender, receiver = (Channel(received.on_message, received.on_lost) for _ in range(2))
        sender.connection_made(wire)
        for message in messages:
            sender.send(*message)
        await asyncio.sleep(0)
        rest = wire.data
        for size in [*pieces, len(rest)]:
            if piece := rest[:size]:
                receiver.data_received(piece)
            rest = rest[size:]
        assert received.messages == messages

    run(scenario())


def test_large_and_small_messages_pass_a_tiny_socket_buffer_in_order() -> None:
    async def scenario() -> None:
        one, other = pair(4096)
        sent, received = Received(), Received()
        sender, receiver = await open_channel(one, sent), await open_channel(other, received)
        messages = [(SUBMIT, n, bytes([n % 251]) * (300_000 if n % 10 == 0 else n)) for n in range(50)]
        for message in messages:
            sender.send(*message)
        await asyncio.sleep(0)
        assert sender.backlog > 100_000, "nothing is sent blocking"
        await received.wait(len(messages))
        assert received.messages == messages
        assert sender.backlog == 0
        await sender.close()
        await received.wait_lost()
        assert (sent.lost, received.lost) == (1, 1)
        await receiver.close()

    run(scenario())


def test_messages_of_one_turn_are_sent_together() -> None:
    async def scenario() -> None:
        writes: list[Any] = []

        class Counting(Wire):
            def write(self, data: Any) -> None:
                writes.append(data)

        received = Received()
        channel = Channel(received.on_message, received.on_lost)
        channel.connection_made(Counting())
        for n in range(5):
            channel.send(CONTROL, n, b"x")
        await asyncio.sleep(0)
        assert len(writes) == 1

    run(scenario())


def test_close_sends_what_is_left_and_a_message_after_the_end_is_ignored() -> None:
    async def scenario() -> None:
        one, other = pair()
        sent, received = Received(), Received()
        sender, receiver = await open_channel(one, sent), await open_channel(other, received)
        sender.send(CONTROL, 1, b"y" * 2**20)
        await sender.close()
        sender.send(CONTROL, 2, b"")
        assert sender.backlog == 0
        await received.wait_lost()
        assert [call for _, call, _ in received.messages] == [1]
        await receiver.close()

    run(scenario())


def test_half_a_message_before_the_end_is_dropped() -> None:
    async def scenario() -> None:
        one, other = pair()
        received = Received()
        await open_channel(other, received)
        one.send(b"\x01\x00")
        one.close()
        await received.wait_lost()
        assert received.messages == []

    run(scenario())
