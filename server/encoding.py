"""Content encodings of HTTP bodies: gzip and deflate, with a bound on what a body inflates to."""

import reprlib
import zlib

from server.errors import BadInputError, TooLargeError, UnsupportedError

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's wbits: 31 reads and writes the gzip wrapper, 15 the zlib wrapper


def decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Undo the body's Content-Encoding, inflating at most one byte more than `max_bytes`.

    Raises:
        UnsupportedError: The encoding is not identity, gzip or deflate.
        TooLargeError: The plain body is over `max_bytes`.
        BadInputError: The compressed body is corrupt, cut off, or followed by something else.
    """
    encoding = (content_encoding or "identity").strip().lower().replace("x-gzip", "gzip") or "identity"
    if encoding == "identity":
        plain = body
    elif encoding in _WINDOW:
        plain = _inflate(body, encoding, max_bytes + 1)
    else:
        raise UnsupportedError(f"Content-Encoding is {reprlib.repr(content_encoding)}; send gzip, deflate or identity")
    if len(plain) > max_bytes:
        raise TooLargeError(f"the body is over {max_bytes} bytes when decompressed; send fewer samples per call")
    return plain


def _inflate(body: bytes, encoding: str, most: int) -> bytes:
    inflater = zlib.decompressobj(_WINDOW[encoding])
    if encoding == "deflate" and not _has_zlib_header(body):
        inflater = zlib.decompressobj(-15)  # some clients send the bare stream
    try:
        plain = inflater.decompress(body, most)
    except zlib.error as error:
        raise BadInputError(f"the body is not valid {encoding}: {error}") from error
    if len(plain) < most and not inflater.eof:
        raise BadInputError(f"the {encoding} body ends too early after {len(body)} bytes; send all of it")
    if inflater.unused_data:
        # Also refuses gzip of many members: inflating millions of empty ones would take quadratic time.
        raise BadInputError(f"{len(inflater.unused_data)} bytes follow the {encoding} stream; send one stream")
    return plain


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0


def compress(body: bytes, accept_encoding: str | None) -> tuple[bytes, str | None]:
    """Compress an answer if the client asks for it.

    Returns:
        The body and its Content-Encoding; None when it is left as it is.
    """
    if not accept_encoding:
        return body, None
    weights = dict(_weight(item) for item in accept_encoding.split(","))
    best = max((*_WINDOW, "identity"), key=lambda name: weights.get(name, 0.0))
    if best == "identity" or not weights.get(best, 0.0) > 0:
        return body, None
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[best])  # level 1: this runs on the event loop
    return deflater.compress(body) + deflater.flush(), best


def _weight(item: str) -> tuple[str, float]:
    """Read one item of Accept-Encoding, such as `gzip;q=0.5`; a weight that cannot be read counts as a refusal."""
    name, _, weight = item.partition(";")
    value = weight.strip().lower().removeprefix("q=")
    try:
        return name.strip().lower(), float(value) if value else 1.0
    except ValueError:
        return name.strip().lower(), 0.0
