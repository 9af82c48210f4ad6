"""Samples and outputs in messages: arrays as fields and bytes, or as places in a memory; everything else by pickle.

Arrays and dicts of arrays are all that most models have. As fields they take a third of the time of pickled ones.
"""

import mmap
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[Any]
Place = int | bytearray  # offset in the memory, or the content of the array
Store = Callable[[_Array], Place]
_KINDS = frozenset("biufcSU")  # kinds of dtypes that a string identifies


class PackedSamples(NamedTuple):
    """Samples of one call.

    Attributes:
        arrays: dtype, shape and content of each array in turn, C-contiguous.
        names: the names of each sample's arrays; None if each sample is one array.
        pickled: the samples, whose out-of-band buffers are `arrays`; None if they are nothing but arrays.
    """

    arrays: Sequence[tuple[str, tuple[int, ...], Place]]
    names: tuple[str, ...] | None = None
    pickled: bytes | None = None


def inline(array: _Array) -> bytearray:
    """Store a C-contiguous array in the message."""
    return bytearray(array.data)  # and not bytes, so that the array that is made of it is writable


def pack(samples: Sequence[Any], store: Store) -> PackedSamples:
    """Pack samples; `store` is called with each array, C-contiguous, and raises what it likes."""
    names = tuple(samples[0]) if type(samples[0]) is dict and samples[0] else None
    flat = samples if names is None else [each for sample in samples for each in _values(sample, names)]
    if any(type(array) is not np.ndarray or array.dtype.kind not in _KINDS for array in flat):
        return _pickle(samples, store)
    return PackedSamples([(array.dtype.str, array.shape, store(np.ascontiguousarray(array))) for array in flat], names)


def unpack(packed: PackedSamples, memory: "mmap.mmap | _Array | None" = None) -> tuple[list[Any], list[_Array]]:
    """Make the samples again.

    Args:
        packed: what `pack` returned.
        memory: where the arrays are whose content is an offset.

    Returns:
        The samples, and the arrays in the memory: as long as one of them is referred to, a sample may be read.
    """
    arrays: list[_Array] = []
    stored: list[_Array] = []
    for dtype, shape, content in packed.arrays:
        if isinstance(content, int):
            array: _Array = np.ndarray(shape, dtype, memory, content)
            stored.append(array)
        else:
            array = np.ndarray(shape, dtype, content)
        arrays.append(array)
    if packed.pickled is not None:
        return pickle.loads(packed.pickled, buffers=arrays), stored  # noqa: S301  (of another process of this server)
    names = packed.names
    if names is None:
        return [*arrays], stored
    width = len(names)
    rows = range(0, len(arrays), width)
    return [dict(zip(names, arrays[row : row + width], strict=True)) for row in rows], stored


def _values(sample: Any, names: tuple[str, ...]) -> list[Any]:
    """The arrays of a sample; something else if it has not exactly these names, in this order."""
    return [*sample.values()] if type(sample) is dict and tuple(sample) == names else [None]


def _pickle(samples: Sequence[Any], store: Store) -> PackedSamples:
    arrays: list[tuple[str, tuple[int, ...], Place]] = []

    def add(buffer: pickle.PickleBuffer) -> bool:
        content = np.frombuffer(buffer.raw(), np.uint8)
        place = store(content)
        if isinstance(place, int):
            arrays.append(("|u1", content.shape, place))
            return False
        return True

    return PackedSamples(arrays, None, pickle.dumps(samples, 5, buffer_callback=add))
