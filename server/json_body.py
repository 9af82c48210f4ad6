"""JSON objects from clients."""

from typing import Any

import orjson

from server.errors import BadInputError, quote

_NO_NUMBERS = "NaN", "Infinity"
NO_NUMBER = "send NaN and infinities in a binary tensor of the Open Inference Protocol (binary_data_size)"


def parse_object(text: bytes, name: str, expected: str) -> dict[str, Any]:
    """Parse a JSON text that has to be an object; `transport.json_limits` has checked its size.

    Args:
        text: the whole document.
        name: the document's name in error messages.
        expected: the content that a client should send, for error messages.

    Raises:
        BadInputError: the text is not valid JSON, or not an object.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        number = next((word for word in _NO_NUMBERS if word.encode() in text), None)
        remedy = f"JSON has no {number}; {NO_NUMBER}" if number else f"send {expected}"
        raise BadInputError(f"the {name} is not valid JSON ({error}); {remedy}") from error
    if type(document) is not dict:
        raise BadInputError(f"the {name} is {quote(document)}; send {expected}")
    return document
