"""Multipart forms, valid and hostile."""

from contextlib import suppress
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadInputError, ServerError, TooLargeError
from server.transport.multipart import field_of
from server.transport.request import is_form

TYPE = "multipart/form-data; boundary=x1"


def part(name: str, content: bytes, more: str = '; filename="a.jpg"\r\nContent-Type: image/jpeg') -> bytes:
    return f'--x1\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--x1--\r\n"


@given(st.binary().filter(lambda content: b"--x1" not in content))
def test_the_content_of_a_field_is_what_was_sent(content: bytes) -> None:
    assert field_of(form(part("image", content)), TYPE, "image") == content
    assert field_of(b"preamble\r\n" + form(part("a", b"1"), part("image", content)), TYPE, "image") == content


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="image"',
        "content-disposition: form-data;name=image",
        'CONTENT-DISPOSITION:form-data; filename="a; name=b.jpg"; name="image"',
        'Content-Type: image/png\r\nContent-Disposition: form-data; name="image"; filename="\xe4.png"',
    ],
)
def test_the_header_variants_of_clients_are_read(head: str) -> None:
    assert field_of(b"--x1\r\n" + head.encode() + b"\r\n\r\npicture\r\n--x1--", TYPE, "image") == b"picture"


def test_the_boundary_may_be_quoted_and_the_type_in_capitals() -> None:
    kind = 'Multipart/Form-Data; charset=utf-8; boundary="x1"'
    assert is_form(kind)
    assert field_of(form(part("image", b"p")), kind, "image") == b"p"
    assert not is_form("multipart/form-database")


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (form(part("image", b"p")), "multipart/form-data", "no boundary"),
        (form(part("image", b"p")), "multipart/form-data; boundary=", "no boundary"),
        (form(part("image", b"p")), f"multipart/form-data; boundary={'x' * 71}", "no boundary"),
        (form(part("image", b"p")), "multipart/form-data; boundary=\xe4", "no boundary"),
        (b"", TYPE, "is not in the body"),
        (b"--x2\r\n", TYPE, "is not in the body"),
        (b"--x1", TYPE, "ends within a part"),
        (b"--x1junk\r\n\r\n", TYPE, "form is malformed"),
        (b"--x1\r\nA: b", TYPE, "ends within a part"),
        (b"--x1\r\nA: " + b"b" * 5000 + b"\r\n\r\n", TYPE, "form is malformed"),
        (part("image", b"p"), TYPE, "ends within a part"),
        (form(), TYPE, "no file `image`"),
        (form(part("picture", b"p")), TYPE, "no file `image`"),
        (form(b"--x1\r\nA: b\r\n\r\np\r\n"), TYPE, "no file `image`"),
        (form(part("x", b"1") * 8, part("image", b"p")), TYPE, "over 8 parts"),
    ],
)
def test_a_malformed_form_is_an_error_of_one_line(body: bytes, kind: str, says: str) -> None:
    with pytest.raises((BadInputError, TooLargeError), match=says) as caught:
        field_of(body, kind, "image")
    assert "\n" not in str(caught.value)


@given(st.binary(), st.text())
def test_any_bytes_give_a_field_or_bad_input(body: bytes, kind: str) -> None:
    for content_type in (TYPE, f"multipart/form-data; boundary={kind}"):
        with suppress(BadInputError):  # 400 or 413
            field_of(b"--x1\r\n" + body, content_type, "image")
    if b"--x1" not in body:
        whole = form(part("other", body), part("image", body))
        assert field_of(whole, TYPE, "image") == body, "otherwise a parser that rejects everything would pass"


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        (b"", b"--x1\r\n\r\n\r\n"),
        (b"--x1\r\nA: b\r\n\r\n", b"\r\n--x"),
        (b"--x1\r\nA: b\r\n\r\n", b"\r"),
        (b"", b"-"),
    ],
    ids=["tiny parts", "nearly boundaries", "line ends", "dashes"],
)
def test_a_hostile_body_of_64_mb_takes_less_than_a_second(start: bytes, repeated: bytes) -> None:
    body = start + repeated * (2**26 // len(repeated))
    began = thread_time()
    with pytest.raises(ServerError):
        field_of(body, TYPE, "image")
    assert thread_time() - began < 1.0, "a scan with bytes.find takes about 0.1 s"
