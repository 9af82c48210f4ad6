"""Content encodings of HTTP bodies: gzip and deflate, with a limit on the decompressed size."""

import reprlib
import zlib
from collections.abc import Iterator

from server.errors import BadInputError, TooLargeError, UnsupportedError

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's wbits: 31 reads and writes the gzip wrapper, 15 the zlib wrapper
_PIECE = 2**20  # bytes of output at a time
_INPUT = 2**16  # bytes of input at a time


def decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Decompress a body by its Content-Encoding, up to `max_bytes`.

    Raises:
        UnsupportedError: the encoding is not identity, gzip or deflate.
        TooLargeError: the decompressed body is over `max_bytes`.
        BadInputError: the compressed body is corrupt, truncated or followed by other bytes.
    """
    return b"".join(decompress_in_pieces(body, content_encoding, max_bytes))


def decompress_in_pieces(
    body: bytes, content_encoding: str | None, max_bytes: int, remedy: str = "send fewer samples per call"
) -> Iterator[bytes]:
    """Decompress in pieces of at most 1 MiB, so that memory can be reserved for each; raises as `decompress`.

    `remedy` ends the message of TooLargeError.
    """
    encoding = (content_encoding or "identity").strip().lower().replace("x-gzip", "gzip") or "identity"
    size = 0
    for piece in _pieces(body, encoding, min(_PIECE, max_bytes + 1)):
        size += len(piece)
        if size > max_bytes:
            raise TooLargeError(f"the body is over {max_bytes} bytes when decompressed; {remedy}")
        yield piece


def _pieces(body: bytes, encoding: str, max_piece: int) -> Iterator[bytes]:
    if encoding == "identity":
        yield body
    elif encoding in _WINDOW:
        yield from _inflate(body, encoding, max_piece)
    else:
        raise UnsupportedError(f"Content-Encoding is {reprlib.repr(encoding)}; send gzip, deflate or identity")


def _inflate(body: bytes, encoding: str, max_piece: int) -> Iterator[bytes]:
    inflater = zlib.decompressobj(_WINDOW[encoding])
    if encoding == "deflate" and not _has_zlib_header(body):
        inflater = zlib.decompressobj(-15)  # some clients send deflate without the zlib wrapper
    fed, left = 0, b""  # unconsumed input is copied with every piece, so little is passed at a time
    while not inflater.eof:
        if not left:
            left, fed = body[fed : fed + _INPUT], fed + _INPUT
        try:
            piece = inflater.decompress(left, max_piece)
        except zlib.error as error:
            raise BadInputError(f"the body is not valid {encoding}: {error}") from error
        left = inflater.unconsumed_tail
        if piece:
            yield piece
        elif fed >= len(body) and not (left or inflater.eof):
            raise BadInputError(f"the {encoding} body is truncated after {len(body)} bytes; send all of it")
    trailing = len(inflater.unused_data) + max(0, len(body) - fed)
    if trailing:
        # Also rejects gzip with several members: decompressing millions of empty ones would take quadratic time.
        raise BadInputError(f"{trailing} bytes follow the {encoding} stream; send one stream")


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0


def compress(body: bytes, accept_encoding: str | None) -> tuple[bytes, str | None]:
    """Compress a response body by the Accept-Encoding of its call.

    Returns:
        The body and its Content-Encoding, None if it is not compressed.
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
    """Name and weight of one item of Accept-Encoding, such as `gzip;q=0.5`; an invalid weight is 0."""
    name, _, weight = item.partition(";")
    value = weight.strip().lower().removeprefix("q=")
    try:
        return name.strip().lower(), float(value) if value else 1.0
    except ValueError:
        return name.strip().lower(), 0.0
