"""Chunked bodies, with httptools as the other implementation."""

from collections.abc import Sequence

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.transport.chunked_body import ChunkedBody, ChunkedBodyError

HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
MORE = b"GET / HTTP/1.1\r\n\r\n"

chunks = st.lists(st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"\n"]), max_size=5)
extensions = st.sampled_from([b"", b";a=b;x", b";x", b';q="0;"'])
trailers = st.sampled_from([b"", b"A: b\r\n", b"A:\r\nB: \tc\xff\r\n"])


def encoded(parts: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    sizes = b"".join(b"%X%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return sizes + b"00\r\n" + trailer + b"\r\n"


def decode(sent: bytes, cuts: Sequence[int] = ()) -> tuple[bytes, bytes, bool]:
    """The body, what follows it, and whether it has ended."""
    parts: list[bytes] = []
    body, following, start = ChunkedBody(parts.append), b"", 0
    for end in (*sorted(cuts), len(sent)):
        following += body.feed(sent[start:end]) if not body.is_whole else sent[start:end]
        start = max(start, end)
    return b"".join(parts), following, body.is_whole


@given(chunks, extensions, trailers, st.lists(st.integers(0, 200), max_size=6))
def test_a_body_is_decoded_however_it_arrives(
    parts: list[bytes], extension: bytes, trailer: bytes, cuts: list[int]
) -> None:
    sent = encoded(parts, extension, trailer) + MORE
    assert decode(sent, [cut for cut in cuts if cut < len(sent)]) == (b"".join(parts), MORE, True)


class Found:
    def __init__(self) -> None:
        self.body, self.ended = b"", False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended = True


@given(
    st.lists(
        st.sampled_from(
            [b"0", b"1", b"a", b"\r\n", b"\r", b"\n", b";", b" ", b"A:", b"\0", b"-", b"=", b'"', b";a=", b'";']
        ),
        max_size=12,
    )
)
def test_what_httptools_refuses_is_refused(pieces: list[bytes]) -> None:
    sent, found = b"".join(pieces) + b"\r\n", Found()
    try:
        ours = decode(sent)
    except ChunkedBodyError:
        return
    parser = httptools.HttpRequestParser(found)
    parser.feed_data(HEAD + sent[: len(sent) - len(ours[1])])
    assert (ours[0], ours[2]) == (found.body, found.ended)


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"zz\r\n",
        b"-1\r\n",
        b"1\n",
        b"1\r\nab\r\n",
        b"1" * 16 + b"\r\n",
        b"0\r\nno colon\r\n",
        b"1;\0\r\n",
        b"1;\r\n",
        b"1 \r\n",
    ],
)
def test_malformed_bodies_are_refused(sent: bytes) -> None:
    with pytest.raises(ChunkedBodyError):
        decode(sent)
