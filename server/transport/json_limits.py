"""JSON from clients: bounded before it is parsed, since parsed values take many times the memory of their text.

Parsing takes up to 60 times the memory of the text, and holds the interpreter meanwhile. So the text is measured first,
by passes over its bytes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from server.errors import BadInputError, TooLargeError

MAX_JSON_BYTES = 2**20
MAX_BRACKETS = 2**16  # a picture of 224 x 224 pixels as nested lists has 50,625 opening ones
MAX_NESTING = 32
# bytes of memory, at most: of a list and its place in another, of an object with one key, of any other value, and of
# all other values for each byte of text; and what the parser takes for itself for each byte
_LIST, _OBJECT, _VALUE, _VALUES_PER_BYTE, _PARSER_PER_BYTE = 80, 256, 90, 20, 17


class JsonSize(NamedTuple):
    """What a JSON text holds, by its bytes.

    Attributes:
        length: of the text, bytes.
        lists: upper bound; brackets in strings are included where there are at most `MAX_NESTING`.
        objects: the same.
        values: other values; upper bound.
        nesting: depth of lists and objects.
    """

    length: int
    lists: int
    objects: int
    values: int
    nesting: int

    @property
    def memory(self) -> int:
        """Bytes that parsing takes at most, the parsed document included."""
        values = min(_VALUE * self.values, _VALUES_PER_BYTE * self.length)
        return _PARSER_PER_BYTE * self.length + _LIST * self.lists + _OBJECT * self.objects + values


def measure_json(text: bytes) -> JsonSize:
    """Count what a JSON text holds without parsing it; brackets and commas within strings are left out.

    A text that is no JSON gets numbers too; parsing it will fail.
    """
    length, lists, objects, values = len(text), text.count(b"["), text.count(b"{"), text.count(b",") + 1
    if lists + objects <= MAX_NESTING:  # too few to be nested too deep, wherever they stand
        return JsonSize(length, lists, objects, values, lists + objects)
    if b"\\" in text:  # an escaped quotation mark ends no string; an escaped backslash escapes nothing
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(text, np.uint8)
    outside = ~np.logical_xor.accumulate(characters == ord('"'))

    def here(character: str) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (characters == ord(character)) & outside
        return found

    lists_begin, objects_begin = here("["), here("{")
    steps = (lists_begin | objects_begin).view(np.int8) - (here("]") | here("}")).view(np.int8)
    lists, objects, values = (int(np.count_nonzero(each)) for each in (lists_begin, objects_begin, here(",")))
    return JsonSize(length, lists, objects, values + 1, int(np.cumsum(steps, dtype=np.int32).max()))


def check_json(text: bytes, remedy: str) -> JsonSize:
    """Measure a JSON text and check it against the bounds.

    Args:
        text: the whole document.
        remedy: what a client should do whose document is too large.

    Raises:
        TooLargeError: it is longer than `MAX_JSON_BYTES`, or has more than `MAX_BRACKETS` lists and objects.
        BadInputError: it is nested deeper than `MAX_NESTING`.
    """
    if len(text) > MAX_JSON_BYTES:
        raise TooLargeError(f"the JSON has {len(text)} bytes, over {MAX_JSON_BYTES}; {remedy}")
    size = measure_json(text)
    if size.lists + size.objects > MAX_BRACKETS:
        raise TooLargeError(
            f"the JSON has {size.lists + size.objects} lists and objects, over {MAX_BRACKETS}; {remedy}"
        )
    if size.nesting > MAX_NESTING:
        raise BadInputError(f"the JSON is nested {size.nesting} deep, over {MAX_NESTING}; send it flatter")
    return size
