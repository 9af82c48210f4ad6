"""Channels on an event loop: order, a full socket, and the end."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import numpy as np
import pytest

from server.workers.channel import Channel, channel_pair
from server.workers.loop_channel import LoopChannel


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (it is polled)
        await asyncio.sleep(0.001)


def pair() -> tuple[Channel, Channel]:
    one, other = channel_pair()
    return one, Channel(other, maps=True)


@pytest.mark.parametrize("size", [10, 20_000, 200_000])
@on_a_loop
async def test_messages_arrive_in_order_both_ways_though_the_socket_is_full(size: int) -> None:
    one, other = pair()
    found: list[list[Any]] = [[], []]
    ends = [LoopChannel(each, found[index].append, lambda: None) for index, each in enumerate((one, other))]
    array = np.arange(size, dtype=np.uint8)
    for number in range(300):
        for end in ends:
            end.send((number, array))
    await until(lambda: min(map(len, found)) == 300)
    for each in found:
        assert [number for number, _ in each] == [*range(300)]
        assert all((sent == array).all() for _, sent in each)
    for end in ends:
        end.close()


@on_a_loop
async def test_the_end_of_the_other_side_is_told_once_and_later_messages_have_no_effect() -> None:
    one, other = pair()
    ended = list[bool]()
    end = LoopChannel(one, lambda _: None, lambda: ended.append(True))
    other.close()
    await until(lambda: bool(ended))
    end.send("late")
    await asyncio.sleep(0.01)
    assert ended == [True]


@on_a_loop
async def test_no_function_is_called_after_a_side_was_closed_in_one() -> None:
    one, other = pair()
    found = list[Any]()

    def on_message(message: Any) -> None:
        found.append(message)
        end.close()

    end = LoopChannel(one, on_message, lambda: found.append("end"))
    for number in range(3):
        other.send(number)
    await until(lambda: bool(found))
    await asyncio.sleep(0.01)
    assert found == [0]


@on_a_loop
async def test_a_message_that_cannot_be_sent_raises_and_the_next_one_is_sent() -> None:
    one, other = pair()
    found = list[Any]()
    end, reader = LoopChannel(one, found.append, lambda: None), LoopChannel(other, found.append, lambda: None)
    with pytest.raises(AttributeError, match="lambda"):
        end.send(lambda: None)
    end.send("next")
    await until(lambda: bool(found))
    assert found == ["next"]
    end.close()
    reader.close()
