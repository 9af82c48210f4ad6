"""JSON objects from clients."""

from typing import Any

import orjson

from server.errors import BadInputError, quote


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
        raise BadInputError(f"the {name} is not valid JSON ({error}); send {expected}") from error
    if type(document) is not dict:
        raise BadInputError(f"the {name} is {quote(document)}; send {expected}")
    return document
