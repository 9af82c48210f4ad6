"""JSON objects from clients."""

from typing import Any

import orjson

from server.errors import BadInputError, quote


def parse_object(text: bytes, what: str, wanted: str) -> dict[str, Any]:
    """Parse a JSON text that has to be an object; `transport.json_limits` has checked its size.

    Args:
        text: the whole document.
        what: its name in errors.
        wanted: what a client should send.

    Raises:
        BadInputError: it is not valid JSON, or no object.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the {what} is not valid JSON ({error}); send {wanted}") from error
    if type(document) is not dict:
        raise BadInputError(f"the {what} is {quote(document)}; send {wanted}")
    return document
