"""Requests are answered the same, however their bytes arrive."""

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.inference_server import LOOPS, App, Response, exchange, post, run, serving

pytestmark = pytest.mark.usefixtures("quiet")

TRACE = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SIZES = (0, 1, 5, 8000, 8192, 65535, 65536, 65537, 100_000, 100_001, 2**18 - 1, 2**18, 2**18 + 1, 300_000)
PATHS = [f"/predict/{name}" for name in ("echo", "limited", "rejected", "early", "late", "large", "broken")]
HEADERS = (
    *(b"X-Request-Id: own", b"X-Request-Id: not valid", b"X-REQUEST-ID: upper", TRACE, b"traceparent: wrong"),
    *(b"Connection: close", b"Connection: keep-alive", b"Content-Encoding: identity", b"A: b", b"A: c", b"Empty:"),
    *(b"authorization: Bearer user", b"authorization: Bearer admin", b"authorization: Bearer slow"),
    *(b"Authorization: Bearer none", b"Authorization: user", b"Folded: a\r\n b"),
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: x", b"Transfer-Encoding: chunked"),
    *(b"Upgrade: h2c", b"Connection: Upgrade", b"no colon", b"Nul: \0", b"Bytes: \xff", b"long: " + b"x" * 9000),
)
USER = b"Authorization: Bearer user"


def chunked(path: str, body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n" % (path.encode(), USER)
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else head + b"0\r\n\r\n"


bodies = st.builds(
    lambda size, byte: bytes([byte]) * size, st.sampled_from(SIZES) | st.integers(0, 3000), st.integers(0, 255)
)
paths = st.sampled_from(PATHS)
calls = st.builds(
    lambda path, body, more: post(path, body, USER, *more),
    paths,
    bodies,
    st.lists(st.sampled_from(HEADERS[:11]), max_size=2),
)
unusual = st.builds(
    lambda path, body, more: post(path, body, *more), paths, bodies, st.lists(st.sampled_from(HEADERS), max_size=4)
)
others = st.sampled_from(
    [
        b"GET /predict/echo HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % USER,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /predict/echo HTTP/1.0\r\nContent-Length: 3\r\n%b\r\n\r\nabc" % USER,
        b"POST /predict/echo HTTP/1.1\r\n%b\r\n\r\n" % USER,
        b"POST /predict/%%65cho HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\r\nabc" % USER,
        b"POST /predict/echo?a=b HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\r\nabc" % USER,
        b"POST /predict/echo#a HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\r\nabc" % USER,
        b"POST /predict/echo HTTP/1.1\r\n%b\r\ncontent-length: 03 \r\n\r\nabc" % USER,
        b"POST /predict/echo HTTP/1.1\n%b\nContent-Length: 3\n\nabc" % USER,
        b"POST /predict/echo HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\nabc" % USER,
        b"POST /predict/echo HTTP/9.9\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /predict/echo HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\nabc",
        b"POST  /predict/echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"post /predict/echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"POST //predict/echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST /predict/nothing HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\r\nabc" % USER,
        b"POST http://x/predict/echo HTTP/1.1\r\n%b\r\nContent-Length: 3\r\n\r\nabc" % USER,
        post("/predict/echo", b"", USER, *[b"A: b"] * 210),
        post("/predict/echo", b"", USER, b"A: " + b"x" * 70_000),
        b"\r\n",
        b"nonsense\r\n\r\n",
    ]
)
requests = calls | calls | unusual | others | st.builds(chunked, paths, bodies)


class Sent(tuple[bytes, ...]):
    """The pieces that a client sends."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Sent({[piece if len(piece) < 300 else piece[:200] + b'...%d' % len(piece) for piece in self]})"


@st.composite
def connections(draw: st.DrawFn) -> Sent:
    """The bytes of some requests, in pieces."""
    sent = b"".join(draw(st.lists(requests, min_size=1, max_size=5)))
    if draw(st.booleans()):
        sent += draw(st.binary(max_size=20))
    cuts = draw(st.lists(st.integers(0, 600) | st.integers(0, len(sent)), max_size=4))
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    return Sent(sent[a:b] for a, b in pairwise(places))


def answers(pieces: Sequence[bytes], loop: str = "uvloop") -> Any:
    async def serve() -> Any:
        app = App()
        async with serving(keys=True, app=app) as server:
            responses, closed = await exchange(await server.pair(), pieces, server.busy)
            return [*map(_comparable, responses)], closed, app.seen, sorted(app.outcomes)

    return run(serve(), loop)


def _comparable(response: Response) -> Any:
    """Leave out what differs by chance: ids that the server makes, and times."""
    headers = dict(response.headers)
    headers["x-request-id"] = re.sub(r"^[\da-f]{12}-", "own-", headers.get("x-request-id", ""))
    headers["traceparent"] = re.sub(r"-[\da-f]{16}-", "-", headers.get("traceparent", ""))
    return response.status, headers, response.body


@pytest.mark.slow
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(connections())
@example(Sent([post("/predict/echo", b"", USER)]))
@example(Sent([post("/predict/echo", b"abc", USER, b"no colon")]))
@example(Sent([b"POST /predict/echo HTTP/1.1\nA: b\n\nabc\r\n\r\nmore"]))
def test_answers_do_not_depend_on_how_the_bytes_arrive(pieces: Sent) -> None:
    assert answers(pieces) == answers([b"".join(pieces)])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", SIZES)
def test_a_body_arrives_whole_on_both_event_loops(size: int, loop: str) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    sent = b"".join(post(path, body[:size], USER) for path in PATHS)
    responses, closed, _, _ = answers([sent], loop)
    assert not closed
    assert [one[0] for one in responses] == [200, 200 if size <= 100_000 else 413, 503, 200, 200, 200, 500]
    assert (
        json.loads(responses[0][2])["sha256"]
        == json.loads(responses[4][2])["sha256"]
        == sha256(body[:size]).hexdigest()
    )
