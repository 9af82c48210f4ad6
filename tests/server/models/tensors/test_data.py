"""Tensors of every datatype, from bytes and from JSON values."""

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadInputError, TooLargeError
from server.models.signature import TensorSpec
from server.models.tensors.data import from_binary, from_json, to_binary, to_json, to_lists

VALUES: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
    "BOOL": np.array([[True, False]]),
    **{
        name: np.array([[bounds.min, bounds.max]], dtype=bounds.dtype)
        for name, bounds in {
            f"{prefix}{bits}": np.iinfo(f"{kind}{bits // 8}")
            for prefix, kind in (("UINT", "u"), ("INT", "i"))
            for bits in (8, 16, 32, 64)
        }.items()
    },
    "FP16": np.array([[1.5, -np.inf]], dtype=np.float16),
    "BF16": np.array([[1.5, -np.inf]], dtype=np.float32),
    "FP32": np.array([[1.5, -0.1]], dtype=np.float32),
    "FP64": np.array([[1e300, -0.1]]),
}


@pytest.mark.parametrize("datatype", VALUES)
def test_binary_values_of_every_datatype_arrive_unchanged(datatype: str) -> None:
    values = VALUES[datatype]
    array = from_binary(b"any" + to_binary(values, datatype), 3, datatype, (1, 2))
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, values, strict=True)


@pytest.mark.parametrize("datatype", VALUES)
def test_json_values_of_every_datatype_arrive_unchanged(datatype: str) -> None:
    values = np.where(np.isinf(VALUES[datatype]), 2, VALUES[datatype]).astype(VALUES[datatype].dtype)
    for data in (values.tolist(), values.ravel().tolist()):
        array = from_json(data, datatype, (1, 2))
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, values, strict=True)


def test_binary_bf16_is_the_upper_half_of_fp32_rounded_to_the_nearest() -> None:
    values = np.array([1.0, -2.5, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.3895e38, np.nan, np.inf], np.float32)
    written = to_binary(values, "BF16")
    assert np.array_equal(np.frombuffer(written, "<u2"), [0x3F80, 0xC020, 0x3F80, 0x3F82, 0x7F7F, 0x7FC0, 0x7F80])
    assert np.array_equal(from_binary(written, 0, "BF16", (7,))[:4], [1.0, -2.5, 1.0, 1.015625])


@pytest.mark.parametrize("datatype", VALUES)
def test_values_of_every_datatype_are_written_as_json(datatype: str) -> None:
    array = VALUES[datatype]
    if array.dtype.kind == "f" and np.isinf(array).any():
        with pytest.raises(BadInputError, match=r"output y has NaN or infinities, .*; request it with binary_data"):
            to_json("y", array, datatype)
        array = np.where(np.isinf(array), 0, array)
    written = orjson.loads(orjson.dumps(to_json("y", array, datatype), option=orjson.OPT_SERIALIZE_NUMPY))
    assert written == pytest.approx(array.ravel().tolist())
    assert to_lists("y", array, datatype) == array.tolist()


def test_bytes_that_are_no_text_are_not_written_as_json() -> None:
    texts = np.array([b"a\0b\0", "é", "é".encode(), b""], object)
    assert to_json("y", texts, "BYTES") == ["a\0b\0", "é", "é", ""]
    with pytest.raises(BadInputError, match=r"output y has bytes that are no UTF-8 text; request it with binary_data"):
        to_json("y", np.array([b"\xff"], object), "BYTES")


def test_nothing_is_written_and_read_in_every_datatype() -> None:
    for datatype, values in VALUES.items():
        empty = np.empty((2, 0, 4), values.dtype)
        assert to_binary(empty, datatype) == b""
        assert to_lists("y", empty, datatype) == [[], []]
        assert len(from_binary(b"", 0, datatype, (2, 0, 4))) in (0, 2)
        assert len(from_json([], datatype, (2, 0, 4))) in (0, 2)


@pytest.mark.parametrize(
    ("datatype", "value", "message"),
    [
        ("INT8", 128, "send -128 to 127"),
        ("INT64", 2**63, "outside INT64"),
        ("UINT64", -1, "outside UINT64"),
        ("FP32", 1e39, "too large for FP32: send at most 3.4"),
        ("FP64", float("inf"), "too large for FP64"),
        ("FP32", True, "holds bool; send float or int"),
        ("BOOL", 1, "holds int; send bool"),
    ],
)
def test_a_json_value_outside_its_datatype_is_bad_input(datatype: str, value: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        from_json([value], datatype, (1,))


def test_integers_are_accepted_as_floats() -> None:
    np.testing.assert_array_equal(from_json([1, 2.5, 2**64 - 1], "FP64", (3,)), [1.0, 2.5, 2.0**64])


@pytest.mark.slow
@given(st.lists(st.text(), min_size=1))
def test_joined_elements_split_into_the_same(texts: list[str]) -> None:
    assert from_binary(to_binary(np.array(texts, object), "BYTES"), 0, "BYTES", (len(texts),)) == [
        text.encode() for text in texts
    ]


def test_a_specification_advertises_its_first_datatype_and_lists_all() -> None:
    spec = TensorSpec("image", {"UINT8": (224, 224, 3), "BYTES": ()})
    assert (spec.datatype, spec.sample_shape) == ("UINT8", (224, 224, 3))
    assert str(spec) == "`image` as UINT8 [-1, 224, 224, 3] or BYTES [-1]"


def test_the_number_of_bytes_elements_is_bounded() -> None:
    assert len(from_binary(bytes(4 * 2**15), 0, "BYTES", (2**15,))) == 2**15
    with pytest.raises(TooLargeError, match="32769 BYTES elements, over 32768 of one input"):
        from_binary(bytes(4 * (2**15 + 1)), 0, "BYTES", (2**15 + 1,))
