"""Tensors of calls: from binary data or JSON values to arrays, and back.

A claimed shape is compared with the size of the body before memory is allocated for it.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.errors import BadInputError, quote

# numpy has no bfloat16; a BF16 tensor is kept as bit patterns
_NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
# JSON types by numpy's kind (O: BYTES); bool is not a number
_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str}}


def from_binary(body: bytes, start: int, datatype: str, shape: tuple[int, ...]) -> NDArray[Any] | list[bytes]:
    """Read a binary tensor that takes the body from `start` to its end, without copying numbers.

    Raises:
        BadInputError: The bytes do not fit datatype and shape.
    """
    if datatype == "BYTES":
        return _split_elements(body, start, math.prod(shape))
    dtype = _NUMPY[datatype]
    expected, size = math.prod(shape) * dtype.itemsize, len(body) - start
    if size != expected:
        raise BadInputError(f"{datatype} {[*shape]} takes {expected} bytes; {size} bytes follow the JSON")
    array = np.frombuffer(body, dtype, offset=start).reshape(shape)
    if datatype == "BOOL" and array.view(np.uint8).max() > 1:
        raise BadInputError("a BOOL element is neither 0 nor 1; send one byte 0 or 1 each")
    return array


def _split_elements(body: bytes, start: int, count: int) -> list[bytes]:
    """Split length-prefixed elements; an excessive count raises at the end of the body."""
    elements: list[bytes] = []
    for index in range(count):
        stop = start + 4 + int.from_bytes(body[start : start + 4], "little")
        if stop > len(body):
            raise BadInputError(f"BYTES element {index} of {count} is cut off; prefix each with its length as uint32")
        elements.append(body[start + 4 : stop])
        start = stop
    if start != len(body):
        raise BadInputError(f"{len(body) - start} bytes follow the last of {count} BYTES elements; send none")
    return elements


def from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> NDArray[Any] | list[bytes]:
    """Read a tensor from JSON values, nested as its shape or flat, row-major.

    Raises:
        BadInputError: The values do not fit datatype and shape, or the datatype can only be sent as binary.
    """
    if datatype in ("FP16", "BF16"):
        raise BadInputError(f"{datatype} cannot be sent as JSON; send it as a binary tensor")
    flat = _flatten(data, shape)
    kinds = set(map(type, flat))
    allowed = _JSON_TYPES["O" if datatype == "BYTES" else _NUMPY[datatype].kind]
    if not kinds <= allowed:
        raise BadInputError(f"`data` of {datatype} holds {_names(kinds - allowed)}; send {_names(allowed)}")
    return [text.encode() for text in flat] if datatype == "BYTES" else _to_array(flat, datatype).reshape(shape)


def _names(kinds: set[type]) -> str:
    return " or ".join(sorted(kind.__name__ for kind in kinds))


def _flatten(data: Any, shape: tuple[int, ...]) -> list[Any]:
    """Flatten `data`, nested as the shape or flat, and check that it has as many values as the shape."""
    nested = type(data) is list and len(data) > 0 and type(data[0]) is list
    level = [data]
    for size in shape if nested else (math.prod(shape),):
        if any(type(row) is not list or len(row) != size for row in level):
            found = len(data) if type(data) is list else quote(data)
            raise BadInputError(f"`data` ({found}) does not fit shape {[*shape]}; nest it so, or send a flat array")
        level = list(chain.from_iterable(level))
    return level


def _to_array(flat: list[Any], datatype: str) -> NDArray[Any]:
    dtype = _NUMPY[datatype]
    if dtype.kind in "ui":
        bounds = np.iinfo(dtype)
        if min(flat) < bounds.min or max(flat) > bounds.max:
            raise BadInputError(f"a value is outside {datatype}; send {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        array = np.array(flat, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise BadInputError(f"a value is too large for {datatype}: send at most {np.finfo(dtype).max:g}")
    return array


def join_elements(texts: Sequence[str]) -> bytes:
    """Write BYTES elements, each prefixed with its length."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for element in encoded for part in (len(element).to_bytes(4, "little"), element)])
