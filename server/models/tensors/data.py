"""Tensors of calls: from binary data or JSON values to arrays, and back.

A claimed shape is compared with the size of the body before memory is allocated for it.
"""

import math
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.errors import BadInputError, TooLargeError, quote
from server.json_body import NO_NUMBER
from server.models.signature import DTYPES

_MAX_ELEMENTS = 2**15  # of BYTES in one input; splitting them takes milliseconds
_BF16_BITS = np.dtype("<u2")

_AS_BINARY = "request it with binary_data by the Open Inference Protocol, or let the model's own render encode it"
# JSON types by numpy's kind (O: BYTES); bool is not a number
_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str}}


def from_binary(
    body: bytes | memoryview, start: int, datatype: str, shape: tuple[int, ...], max_elements: float = _MAX_ELEMENTS
) -> NDArray[Any] | list[bytes]:
    """Read a binary tensor that takes the body from `start` to its end, without copying numbers.

    Raises:
        BadInputError: The bytes do not fit datatype and shape.
        TooLargeError: There are more than `max_elements` elements of BYTES.
    """
    if datatype == "BYTES":
        return _split_elements(bytes(body), start, math.prod(shape), max_elements)
    dtype = _BF16_BITS if datatype == "BF16" else DTYPES[datatype]
    expected, size = math.prod(shape) * dtype.itemsize, len(body) - start
    if size != expected:
        raise BadInputError(f"{datatype} {[*shape]} takes {expected} bytes; {size} bytes follow the JSON")
    array = np.frombuffer(body, dtype, offset=start).reshape(shape)
    if datatype == "BF16":
        return (array.astype("<u4") << 16).view(DTYPES[datatype])
    if datatype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise BadInputError("a BOOL element is neither 0 nor 1; send one byte 0 or 1 each")
    return array


def _split_elements(body: bytes, start: int, count: int, max_elements: float) -> list[bytes]:
    """Split length-prefixed elements; an excessive count raises at the end of the body."""
    if count > max_elements:
        raise TooLargeError(f"{count} BYTES elements, over {max_elements} of one input; send fewer samples per call")
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
        BadInputError: The values do not fit datatype and shape.
    """
    flat = _flatten(data, shape)
    kinds = set(map(type, flat))
    allowed = _JSON_TYPES[DTYPES[datatype].kind]
    if type(None) in kinds and float in allowed:
        raise BadInputError(f"`data` of {datatype} holds null; {NO_NUMBER}")
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
    dtype = DTYPES[datatype]
    if dtype.kind in "ui" and flat:
        bounds = np.iinfo(dtype)
        if min(flat) < bounds.min or max(flat) > bounds.max:
            raise BadInputError(f"a value is outside {datatype}; send {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        array = np.array(flat, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise BadInputError(f"a value is too large for {datatype}: send at most {np.finfo(dtype).max:g}")
    return array


def to_binary(array: NDArray[Any], datatype: str) -> bytes:
    """Write a tensor, row-major; BYTES elements, bytes or str, are each prefixed with their length."""
    if datatype == "BYTES":
        encoded = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
        return b"".join([part for element in encoded for part in (len(element).to_bytes(4, "little"), element)])
    array = np.ascontiguousarray(array, DTYPES[datatype])
    if datatype != "BF16":
        return array.tobytes()
    bits = array.view("<u4")
    rounded = bits + (0x7FFF + (bits >> 16 & 1))  # to the nearest, ties to even
    return np.where(np.isnan(array), 0x7FC0, rounded >> 16).astype(_BF16_BITS).tobytes()


def to_json(name: str, array: NDArray[Any], datatype: str) -> Any:
    """Return the values of an output as a flat array or list that orjson serialises.

    Raises:
        BadInputError: JSON cannot represent a value: bytes that are not UTF-8, NaN or an infinity.
    """
    if datatype == "BYTES":
        return [_to_text(name, item) for item in array.reshape(-1).tolist()]
    flat = np.ascontiguousarray(array, DTYPES[datatype]).reshape(-1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        raise BadInputError(f"output {name} has NaN or infinities, which JSON cannot represent; {_AS_BINARY}")
    return flat


def to_lists(name: str, array: NDArray[Any], datatype: str) -> Any:
    """Return the values of an output as nested lists; raises as `to_json`."""
    flat = to_json(name, array, datatype)
    if isinstance(flat, list):
        flat = as_array(flat, (len(flat),))
    return flat.reshape(array.shape).tolist()


def _to_text(name: str, item: bytes | str) -> str:
    try:
        return item.decode() if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise BadInputError(f"output {name} has bytes that are no UTF-8 text; {_AS_BINARY}") from error


def as_array(data: NDArray[Any] | list[bytes], shape: tuple[int, ...]) -> NDArray[Any]:
    """The data of a tensor as an array; BYTES as an array of objects."""
    if isinstance(data, np.ndarray):
        return data
    array = np.empty(len(data), object)
    array[:] = data
    return array.reshape(shape)
