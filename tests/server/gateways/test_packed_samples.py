"""Packed samples are the same after unpacking, whether their arrays are in a memory or in the message."""

import mmap
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from server.gateways.packed_samples import PackedSamples, Place, inline, pack, unpack
from server.models.texts.samples import TextSample

MEMORY = 2**20
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.floating_dtypes(),
        hnp.byte_string_dtypes(),
        hnp.unicode_string_dtypes(),
        st.just(np.dtype([("a", "<i4"), ("b", "<f4")])),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
SAMPLES = st.one_of(
    st.lists(ARRAYS, min_size=1, max_size=4),
    st.lists(st.fixed_dictionaries({"x": ARRAYS, "y": ARRAYS}), min_size=1, max_size=3),
    st.lists(st.dictionaries(st.sampled_from("xyz"), ARRAYS), min_size=1, max_size=3),
    st.lists(st.one_of(ARRAYS, st.floats(allow_nan=False), st.just(TextSample([1, 2], 3))), min_size=1, max_size=4),
)


class Memory:
    """Stores arrays of an odd number of bytes."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, MEMORY)
        self.used = 0

    def store(self, array: NDArray[Any]) -> Place:
        assert array.flags.c_contiguous
        if array.nbytes % 2 == 0:
            return inline(array)
        begin, self.used = self.used, self.used + array.nbytes
        self.map[begin : self.used] = array.tobytes()
        return begin


def check_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [*one] == [*other]
        for name in one:
            check_equal(one[name], other[name])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


@given(SAMPLES)
def test_samples_are_the_same_after_unpacking(samples: list[Any]) -> None:
    memory = Memory()
    packed = pickle.loads(pickle.dumps(tuple(pack(samples, memory.store)), 5))
    unpacked, stored = unpack(PackedSamples(*packed), memory.map)
    check_equal(samples[0], unpacked[0])
    assert len(samples) == len(unpacked)
    for one, other in zip(samples, unpacked, strict=True):
        check_equal(one, other)
    assert sum(array.nbytes for array in stored) == memory.used


def test_arrays_that_are_not_contiguous_are_copied() -> None:
    planes = np.arange(24, dtype=np.int32).reshape(2, 3, 4).transpose(2, 0, 1)
    memory = Memory()
    packed = pack([planes, {"x": planes}], memory.store)
    (one, two), _ = unpack(packed, memory.map)
    check_equal(planes.copy(), one)
    assert (two["x"] == planes).all()


def test_outputs_can_be_changed_in_place_as_in_one_process() -> None:
    (output,), _ = unpack(pack([np.zeros(3, np.float32)], inline))
    output += 1.0
    assert output.tolist() == [1.0, 1.0, 1.0]


def test_the_error_of_a_store_is_raised() -> None:
    def store(_: NDArray[Any]) -> Place:
        raise MemoryError("no slot")

    for samples in ([np.zeros(3)], [{"x": np.zeros(3)}], ["text", np.zeros(3)]):
        with pytest.raises(MemoryError):
            pack(samples, store)
