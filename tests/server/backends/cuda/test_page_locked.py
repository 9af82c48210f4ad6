"""Samples in page-locked memory, from which the device copies without a copy on the host."""

import logging
import mmap

import numpy as np
import pytest
from numpy.typing import NDArray

from server.backends.cuda import uploads
from server.backends.cuda.graph import GraphDevice
from server.backends.cuda.page_locked import PageLocked
from server.backends.cuda.uploads import UploadedSample
from server.backends.executor import Batch
from tests.server.backends.cuda.test_graph import CODEC, MODEL, listed, logits, network, sample
from tests.support.fake_graphs import FakeRuntime


class Locks:
    """Records what is page-locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> None:
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def memories(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> PageLocked:
    made = PageLocked(locks.lock, locks.unlock)
    monkeypatch.setattr(uploads, "page_locked", made)
    return made


def mapped_sample(mapped: mmap.mmap, at: int, mark: int) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = np.ndarray(CODEC.shape, np.uint8, mapped, at)
    array[:] = sample(mark)
    return array


def test_a_sample_in_page_locked_memory_is_copied_from_there(memories: PageLocked, locks: Locks) -> None:
    mapped, runtime = mmap.mmap(-1, 8192), FakeRuntime()
    device = GraphDevice(MODEL, network, runtime)
    remove = memories.add(mapped)
    assert [*locks.locked.values()] == [8192]
    locked, other = mapped_sample(mapped, 4099, 1), sample(2)
    uploaded = [device.upload(locked), device.upload(other)]
    assert all(isinstance(each, UploadedSample) for each in uploaded)
    locked[0, 0, 0] = 5  # not copied yet, which only a test could tell
    assert listed(device.serve(Batch("m", uploaded))) == logits(5, 2)
    remove()
    assert not locks.locked
    assert memories.find(locked) is None


def test_the_source_is_kept_until_its_copy_has_ended(memories: PageLocked) -> None:
    mapped, runtime = mmap.mmap(-1, 4096), FakeRuntime()
    device = GraphDevice(MODEL, network, runtime)
    memories.add(mapped)

    cancelled = device.upload(mapped_sample(mapped, 0, 1))
    device._uploads.flush()
    assert len(runtime.copies) == 1
    del cancelled  # another body may be received there from now on
    assert not runtime.copies, "the copy has ended"


def test_arrays_across_the_end_or_not_contiguous_are_not_found(memories: PageLocked) -> None:
    mapped = mmap.mmap(-1, 4096)
    memories.add(mapped)
    whole = np.frombuffer(mapped, np.uint8)
    assert memories.find(whole) is not None
    assert memories.find(whole[::2]) is None
    assert memories.find(np.zeros(10, np.uint8)) is None


def test_memory_that_cannot_be_page_locked_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_address: int, _size: int) -> None:
        raise RuntimeError("cudaHostRegister failed with error 801")

    memories, mapped = PageLocked(refuse, lambda _: None), mmap.mmap(-1, 4096)
    with caplog.at_level(logging.WARNING):
        memories.add(mapped)()
    assert "cudaHostRegister failed with error 801" in caplog.text
    assert memories.find(np.frombuffer(mapped, np.uint8)) is None
