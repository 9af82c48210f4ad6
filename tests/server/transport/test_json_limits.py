"""Limits on JSON from clients, checked before parsing."""

import json
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadInputError, ServerError, TooLargeError
from server.json_body import parse_object
from server.transport import json_limits
from server.transport.json_limits import (
    MAX_BRACKETS,
    MAX_JSON_BYTES,
    MAX_NESTING,
    check_json,
    measure_json,
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
STRINGS = st.text(st.sampled_from('a"\\[]{},:é\U0001f600\n'), max_size=8)
DOCUMENTS = st.recursive(
    LEAVES | STRINGS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(STRINGS, inner, max_size=6),
    max_leaves=200,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Lists, objects and depth of a parsed document."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(one) for one in (value if isinstance(value, list) else value.values())]
    lists, objects = (sum(one[place] for one in inner) for place in (0, 1))
    depth = 1 + max((one[2] for one in inner), default=0)
    return lists + isinstance(value, list), objects + isinstance(value, dict), depth


@given(DOCUMENTS, st.booleans())
def test_the_measured_size_is_exact_whatever_the_strings_contain(document: Any, escaped: bool) -> None:
    text = json.dumps([document, [[]] * MAX_NESTING], ensure_ascii=escaped).encode()
    lists, objects, depth = counted([document, [[]] * MAX_NESTING])
    size = measure_json(text)
    assert (size.lists, size.objects, size.nesting) == (lists, objects, depth)
    assert check_json(text, "").memory == size.memory


WORST = {
    "lists": b"[]",
    "objects": b"{}",
    "objects with a key": b'{"a":1}',
    "numbers": b"1",
    "large numbers": b"1000",
    "fractions": b"1.5",
    "strings": b'"ab"',
    "wide strings": '"é"'.encode(),
    "wider strings": '"\U0001f600"'.encode(),
}


@pytest.mark.parametrize("item", WORST.values(), ids=WORST.keys())
def test_parsing_takes_no_more_memory_than_was_reserved(item: bytes) -> None:
    count = min(MAX_BRACKETS - 2, 2**20 // (len(item) + 1) - 2)
    text = b"[" + b",".join([item] * count) + b"]"
    reserved = check_json(text, "").memory
    tracemalloc.start()
    document = orjson.loads(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(document) == count
    assert peak <= reserved


@given(DOCUMENTS, st.integers(1, 9))
def test_a_text_that_is_measured_in_pieces_has_the_same_size(document: Any, piece: int) -> None:
    text = json.dumps([document, [[]] * 40]).encode()
    whole = measure_json(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_PIECE", piece)
        assert measure_json(text) == whole


def test_measuring_a_long_text_takes_less_memory_than_the_text() -> None:
    text = b"[" + b"[]," * 2_600_000 + b"1]"
    tracemalloc.start()
    try:
        measure_json(text)
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


def test_an_image_as_json_is_within_the_limits_nested_or_flat() -> None:
    image = [[[255] * 3] * 224] * 224
    for data in (image, [255] * 224 * 224 * 3):
        assert check_json(orjson.dumps({"inputs": [{"data": data}]}), "").length > 100_000


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            b'{"inputs":[' + b"[]," * (MAX_JSON_BYTES // 3) + b"1]}",
            TooLargeError,
            "the JSON has 8388620 bytes, over 8388608",
        ),
        (b"[" + b"[]," * MAX_BRACKETS + b"1]", TooLargeError, "65537 lists and objects, over 65536"),
        (b"[" * 33 + b"]" * 33, BadInputError, "nested 33 deep, over 32"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, BadInputError, "nested 33 deep, over 32"),
        (b'["\\\\",' + b"[" * 32 + b"]" * 32 + b"]", BadInputError, "nested 33 deep"),
    ],
    ids=["long", "many", "deep", "deep objects", "behind a backslash"],
)
def test_documents_over_a_limit_are_rejected_before_parsing(text: bytes, error: type[ServerError], says: str) -> None:
    with pytest.raises(error, match=says):
        check_json(text, "send less")


def test_brackets_in_strings_are_not_counted() -> None:
    text = json.dumps({"code": '[{"' * 100_000, "back": "\\" * 3, "more": "[" * 40}).encode()
    assert len(text) < MAX_JSON_BYTES
    assert check_json(text, "").nesting == 1


def test_the_error_for_other_json_than_an_object_names_the_body() -> None:
    assert parse_object(b'{"a": 1}', "body", "an object") == {"a": 1}
    for text, says in ((b"{", "the body is not valid JSON"), (b"[1]", r"the body is \[1\]; send an object")):
        with pytest.raises(BadInputError, match=says):
            parse_object(text, "body", "an object")


def test_an_image_of_floats_as_json_is_within_the_limit_and_another_limit_may_be_given() -> None:
    image = np.random.default_rng(0).random((3, 224, 224), np.float32)
    text = orjson.dumps({"inputs": [{"data": image.tolist()}]})
    assert 2**21 < len(text) < MAX_JSON_BYTES
    assert check_json(text, "").values > 150_000
    with pytest.raises(TooLargeError, match=r"over 2097152; send less"):
        check_json(text, "send less", 2**21)
