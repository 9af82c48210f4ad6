"""The standby launch in shared memory: exactly one side takes each offer."""

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from server.workers.standby import StandbyMemory


@pytest.fixture
def ends() -> Iterator[tuple[StandbyMemory, StandbyMemory]]:
    ours = StandbyMemory()
    theirs = StandbyMemory((os.dup(ours.files[0]), os.dup(ours.files[1])))
    yield ours, theirs
    ours.close()
    theirs.close()


def test_an_offer_is_taken_or_withdrawn(ends: tuple[StandbyMemory, StandbyMemory]) -> None:
    ours, theirs = ends
    assert theirs.take() is None
    assert ours.offer([{"x": np.arange(5)}])
    assert theirs.take()[0]["x"].tolist() == [0, 1, 2, 3, 4]
    assert not ours.withdraw()
    assert ours.offer(["second"])
    assert ours.withdraw()
    assert theirs.take() is None
    assert not ours.offer([np.zeros(2**20, np.uint8)]), "too large"
    assert theirs.take() is None


@pytest.mark.slow
def test_no_offer_is_lost_or_taken_twice_however_often_it_is_replaced(
    ends: tuple[StandbyMemory, StandbyMemory],
) -> None:
    ours, theirs = ends
    taken, stop = list[int](), threading.Event()

    def take() -> None:
        while not stop.is_set():
            found = theirs.take()
            if found is not None:
                taken.append(found)

    thread = threading.Thread(target=take)
    thread.start()
    withdrawn, offered = list[int](), 20_000
    for number in range(1, offered + 1):
        assert ours.offer(number)
        if number % 2 and ours.withdraw():
            withdrawn.append(number)
        while len(taken) + len(withdrawn) < number:
            time.sleep(0)
    stop.set()
    thread.join()
    assert sorted([*taken, *withdrawn]) == [*range(1, offered + 1)]
