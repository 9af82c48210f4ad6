"""Content encodings of bodies, with limits and hostile input."""

import gzip
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import BadInputError, ServerError, TooLargeError, UnsupportedError
from server.transport.content_encoding import compress, decompress, decompress_in_pieces

TEXT = b'{"inputs": []}' * 100
GZIP = gzip.compress(TEXT, mtime=0)  # by which the ids of tests are the same in each process
ZLIB = zlib.compress(TEXT)


def raw_deflate(plain: bytes, level: int = 6) -> bytes:
    deflater = zlib.compressobj(level, zlib.DEFLATED, -15)
    return deflater.compress(plain) + deflater.flush()


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (TEXT, None),
        (TEXT, ""),
        (TEXT, "identity"),
        (GZIP, "gzip"),
        (GZIP, " GZIP "),
        (GZIP, "x-gzip"),
        (ZLIB, "deflate"),
        (zlib.compress(TEXT, 0), "deflate"),
        (zlib.compress(TEXT, 9), "deflate"),
        (raw_deflate(TEXT), "deflate"),
        (raw_deflate(TEXT, 0), "deflate"),
    ],
)
def test_every_supported_encoding_gives_the_plain_body(body: bytes, encoding: str | None) -> None:
    assert decompress(body, encoding, len(TEXT)) == TEXT


@pytest.mark.parametrize(("body", "encoding"), [(TEXT, None), (GZIP, "gzip"), (ZLIB, "deflate")])
def test_a_body_one_byte_over_the_limit_is_too_large(body: bytes, encoding: str | None) -> None:
    with pytest.raises(TooLargeError, match=f"over {len(TEXT) - 1} bytes"):
        decompress(body, encoding, len(TEXT) - 1)


def test_a_decompression_bomb_is_not_inflated_past_the_limit() -> None:
    bomb = gzip.compress(bytes(64 << 20), 9)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            decompress(bomb, "gzip", 1 << 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=300), st.integers(0, 2**21), st.sampled_from(["gzip", "deflate"]))
@settings(max_examples=30)
def test_pieces_of_at_most_1_mib_make_the_whole_body(start: bytes, zeros: int, encoding: str) -> None:
    plain = start + bytes(zeros)
    packed = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain, 0)
    pieces = [*decompress_in_pieces(packed, encoding, len(plain))]
    assert b"".join(pieces) == plain
    assert max(map(len, pieces), default=0) <= 2**20


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip;q=1", "\u00e9"])
def test_another_encoding_is_unsupported(encoding: str) -> None:
    with pytest.raises(UnsupportedError, match="send gzip, deflate or identity"):
        decompress(TEXT, encoding, 1 << 20)


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (TEXT, "gzip", "not valid gzip"),
        (b"\xff" + TEXT, "deflate", "not valid deflate"),
        (GZIP[:-1], "gzip", "is truncated"),
        (ZLIB[:20], "deflate", "is truncated"),
        (b"", "gzip", "is truncated"),
        (GZIP + b"x", "gzip", "1 bytes follow"),
        (GZIP + GZIP, "gzip", "follow the gzip stream"),
        (GZIP[:-8] + bytes(8), "gzip", "not valid gzip"),
    ],
)
def test_a_corrupt_body_is_bad_input(body: bytes, encoding: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        decompress(body, encoding, 1 << 20)


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        (None, None),
        ("", None),
        ("identity", None),
        ("br", None),
        ("*", None),
        ("gzip", "gzip"),
        ("GZip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0.0, deflate", "deflate"),
        ("gzip; q=0.2, deflate;q=0.8", "deflate"),
        ("gzip;q=0.5, identity", None),
        ("gzip;q=nan", None),
        ("gzip;q=high", None),
        (",;,gzip", "gzip"),
    ],
)
def test_a_response_is_compressed_by_accept_encoding(accept: str | None, encoding: str | None) -> None:
    body, chosen = compress(TEXT, accept)
    assert chosen == encoding
    assert (body == TEXT) == (encoding is None)
    assert decompress(body, chosen, len(TEXT)) == TEXT


def status(body: bytes, encoding: str) -> int:
    try:
        plain = decompress(body, encoding, 100)
    except ServerError as error:
        return error.status
    return 200 if len(plain) <= 100 else 500


@given(st.binary(), st.sampled_from(["gzip", "deflate", "identity"]))
def test_arbitrary_bytes_give_a_body_within_the_limit_or_a_client_error(body: bytes, encoding: str) -> None:
    assert status(body, encoding) in {200, 400, 413}


@given(st.data(), st.sampled_from([(GZIP, "gzip"), (ZLIB, "deflate")]))
def test_a_flipped_byte_gives_a_body_or_a_client_error(data: Any, valid: tuple[bytes, str]) -> None:
    body = bytearray(valid[0])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    assert status(bytes(body), valid[1]) in {200, 400, 413}


@given(st.text())
def test_any_accept_encoding_gives_a_valid_response(accept: str) -> None:
    body, chosen = compress(TEXT, accept)
    assert decompress(body, chosen, len(TEXT)) == TEXT
