"""Limits on JSON from clients, checked before parsing.

Parsing takes up to 60 times the memory of the text, and holds the interpreter lock meanwhile. The size and the nesting
of a document are therefore measured first, by vectorised passes over its bytes.
"""

from typing import NamedTuple

import numpy as np

from server.errors import BadInputError, TooLargeError

MAX_JSON_BYTES = 8 * 2**20  # by default; an image of 224 x 224 pixels as FP32 takes 3.3 MB
MAX_BRACKETS = 2**16  # an image of 224 x 224 pixels as nested lists has 50,625 opening ones
MAX_NESTING = 32
# Upper bounds on memory, bytes
_LIST = 80  # with the reference to it
_OBJECT = 256  # with one key
_VALUE = 90  # neither list nor object
_VALUES_PER_BYTE = 20  # all such values, per byte of text
_PARSER_PER_BYTE = 17  # the parser itself, per byte of text
_PIECE = 2**18  # bytes of text that are measured at once; this takes twelve times as much memory


class JsonSize(NamedTuple):
    """Size of a JSON text, counted without parsing it.

    Attributes:
        length: bytes of the text.
        lists: upper bound on the number of lists. A text with at most `MAX_NESTING` brackets is not searched for
            strings, so that brackets within strings are counted too.
        objects: upper bound on the number of objects, likewise.
        values: upper bound on the number of other values.
        nesting: upper bound on the depth of lists and objects.
    """

    length: int
    lists: int
    objects: int
    values: int
    nesting: int

    @property
    def memory(self) -> int:
        """Upper bound on the memory of parsing, the parsed document included, bytes."""
        values = min(_VALUE * self.values, _VALUES_PER_BYTE * self.length)
        return _PARSER_PER_BYTE * self.length + _LIST * self.lists + _OBJECT * self.objects + values


def measure_json(text: bytes) -> JsonSize:
    """Count the lists, objects and values of a JSON text without parsing it.

    The result for a text that is not valid JSON is meaningless; parsing it fails later.
    """
    length, lists, objects, values = len(text), text.count(b"["), text.count(b"{"), text.count(b",") + 1
    if lists + objects <= MAX_NESTING:  # within the limit on nesting even if all brackets are outside strings
        return JsonSize(length, lists, objects, values, lists + objects)
    if b"\\" in text:  # remove escaped backslashes first, then escaped quotation marks, which do not end a string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    lists = objects = values = nesting = depth = 0
    within = False  # a string
    for start in range(0, len(text), _PIECE):
        characters = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        outside = np.logical_xor.accumulate(characters == ord('"')) == within
        within = not outside[-1]
        lists_begin, objects_begin = (outside & (characters == ord(each)) for each in "[{")
        ends = outside & ((characters == ord("]")) | (characters == ord("}")))
        depths = np.cumsum((lists_begin | objects_begin).view(np.int8) - ends.view(np.int8), dtype=np.int32)
        lists, objects = lists + int(np.count_nonzero(lists_begin)), objects + int(np.count_nonzero(objects_begin))
        values += int(np.count_nonzero(outside & (characters == ord(","))))
        nesting, depth = max(nesting, depth + int(depths.max())), depth + int(depths[-1])
    return JsonSize(length, lists, objects, values + 1, nesting)


def check_json(text: bytes, remedy: str, most: int = MAX_JSON_BYTES) -> JsonSize:
    """Measure a JSON text and check it against the limits.

    Args:
        text: the whole document.
        remedy: what the client should do if the document is too large, for the error message.
        most: bytes of the longest text.

    Raises:
        TooLargeError: the text is longer than `most`, or has more than `MAX_BRACKETS` lists and objects.
        BadInputError: the text is nested deeper than `MAX_NESTING`.
    """
    if len(text) > most:
        raise TooLargeError(f"the JSON has {len(text)} bytes, over {most}; {remedy}")
    size = measure_json(text)
    if size.lists + size.objects > MAX_BRACKETS:
        raise TooLargeError(
            f"the JSON has {size.lists + size.objects} lists and objects, over {MAX_BRACKETS}; {remedy}"
        )
    if size.nesting > MAX_NESTING:
        raise BadInputError(f"the JSON is nested {size.nesting} deep, over {MAX_NESTING}; send it less nested")
    return size
