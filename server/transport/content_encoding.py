"""Content encodings of HTTP bodies: gzip and deflate, with a bound on what a body inflates to."""

import reprlib
import zlib
from collections.abc import Iterator

from server.errors import BadInputError, TooLargeError, UnsupportedError

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's wbits: 31 reads and writes the gzip wrapper, 15 the zlib wrapper
_PIECE, _STEP = 2**20, 2**16  # bytes inflated, and fed, at once


def decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Undo the body's Content-Encoding, inflating little more than `max_bytes`.

    Raises:
        UnsupportedError: The encoding is not identity, gzip or deflate.
        TooLargeError: The plain body is over `max_bytes`.
        BadInputError: The compressed body is corrupt, cut off, or followed by something else.
    """
    return b"".join(decompressing(body, content_encoding, max_bytes))


def decompressing(
    body: bytes, content_encoding: str | None, max_bytes: int, remedy: str = "send fewer samples per call"
) -> Iterator[bytes]:
    """The same in pieces of at most 1 MiB, so that memory is reserved as they come; raises as `decompress`."""
    encoding = (content_encoding or "identity").strip().lower().replace("x-gzip", "gzip") or "identity"
    size = 0
    for piece in _pieces(body, encoding, min(_PIECE, max_bytes + 1)):
        size += len(piece)
        if size > max_bytes:
            raise TooLargeError(f"the body is over {max_bytes} bytes when decompressed; {remedy}")
        yield piece


def _pieces(body: bytes, encoding: str, most: int) -> Iterator[bytes]:
    if encoding == "identity":
        yield body
    elif encoding in _WINDOW:
        yield from _inflate(body, encoding, most)
    else:
        raise UnsupportedError(f"Content-Encoding is {reprlib.repr(encoding)}; send gzip, deflate or identity")


def _inflate(body: bytes, encoding: str, most: int) -> Iterator[bytes]:
    inflater = zlib.decompressobj(_WINDOW[encoding])
    if encoding == "deflate" and not _has_zlib_header(body):
        inflater = zlib.decompressobj(-15)  # some clients send the bare stream
    fed, left = 0, b""  # what the inflater leaves is copied with every piece, so it is fed little at a time
    while not inflater.eof:
        if not left:
            left, fed = body[fed : fed + _STEP], fed + _STEP
        try:
            piece = inflater.decompress(left, most)
        except zlib.error as error:
            raise BadInputError(f"the body is not valid {encoding}: {error}") from error
        left = inflater.unconsumed_tail
        if piece:
            yield piece
        elif fed >= len(body) and not (left or inflater.eof):
            raise BadInputError(f"the {encoding} body ends too early after {len(body)} bytes; send all of it")
    follow = len(inflater.unused_data) + max(0, len(body) - fed)
    if follow:
        # Also refuses gzip of many members: inflating millions of empty ones would take quadratic time.
        raise BadInputError(f"{follow} bytes follow the {encoding} stream; send one stream")


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
