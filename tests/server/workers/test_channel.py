"""Messages between processes: any size, in order, with arrays that own their memory."""

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.workers.channel import Channel, channel_pair

ARRAYS = st.builds(
    lambda shape, dtype: np.arange(int(np.prod(shape))).astype(dtype).reshape(shape),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from(["f4", "i8", "u1", "?", "f2"]),
)
VALUES = st.one_of(st.none(), st.text(max_size=20), st.binary(max_size=70_000), ARRAYS)
MESSAGES = st.lists(st.one_of(VALUES, st.dictionaries(st.text(max_size=3), VALUES, max_size=3)), max_size=8)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.booleans())
def test_messages_of_any_size_arrive_as_they_were_sent_and_in_order(messages: list[Any], maps: bool) -> None:
    ours, theirs = channel_pair()
    other = Channel(theirs, maps)
    for message in messages:
        ours.send(message)
    for message in messages:
        found, file = other.receive()
        assert same(message, found)
        assert file is None
    ours.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


@pytest.mark.parametrize(("size", "maps"), [(10, False), (100_000, False), (100_000, True)])
def test_arrays_are_aligned_writable_and_their_own(size: int, maps: bool) -> None:
    ours, theirs = channel_pair()
    other = Channel(theirs, maps)
    sent = np.ones(size, np.float32)
    ours.send([b"odd", sent, sent[::2]])
    _, whole, half = other.receive()[0]
    for array in (whole, half):
        assert array.flags.aligned
        array[:] += 1
        assert (array == 2).all()
    assert (sent == 1).all()
    ours.send([whole])
    assert (other.receive()[0][0] == 2).all()
    for each in (ours, other):
        each.close()


def test_a_file_descriptor_goes_with_a_message_and_none_is_left_open() -> None:
    ours, theirs = channel_pair()
    other = Channel(theirs)
    before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    ours.send("pipe", read)
    os.close(read)
    name, file = other.receive()
    assert name == "pipe"
    assert file is not None
    os.write(write, b"x")
    assert os.read(file, 1) == b"x"
    os.close(file)
    os.close(write)
    ours.send(np.zeros(1_000_000))
    kept = other.receive()
    assert kept[0].shape == (1_000_000,)
    assert len(os.listdir("/proc/self/fd")) == before
    for each in (ours, other):
        each.close()


def test_a_socket_that_an_event_loop_has_watched_is_waited_for_all_the_same() -> None:
    ours, theirs = channel_pair()
    other = Channel(theirs)
    os.set_blocking(ours.fileno(), False)  # as uvloop does
    threading.Timer(0.1, other.send, ("late",)).start()
    assert ours.receive()[0] == "late"
    with pytest.raises(BlockingIOError):
        ours.receive(wait=False)
    reader = threading.Timer(0.1, lambda: [other.receive() for _ in range(100)])
    reader.start()
    for _ in range(100):
        ours.send(bytes(20_000))  # more than its buffer holds
    reader.join()
    for each in (ours, other):
        each.close()


def test_a_thread_that_waits_is_told_of_the_end() -> None:
    ours, theirs = channel_pair()
    other, ended = Channel(theirs), []

    def wait() -> None:
        with pytest.raises(EOFError):
            ours.receive()
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    ours.shut_down()
    thread.join(10)
    assert ended == [True]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(BrokenPipeError):
        other.send("x")
    for each in (ours, other):
        each.close()
