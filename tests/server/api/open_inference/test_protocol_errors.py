"""Malformed bodies: each is rejected with a client error whose message is one line."""

import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.api.open_inference.protocol import MAX_ID, InferCall, parse_infer
from server.errors import BadInputError, ServerError, TooLargeError
from server.models.signature import Signature, TensorSpec

SPEC = TensorSpec("image", {"UINT8": (2, 2, 3), "BYTES": (), "FP32": (2,), "BOOL": ()})
SIGNATURE = Signature((SPEC,), (TensorSpec("logits", {"FP32": (-1,)}),))
PIXELS = {"name": "image", "shape": [1, 2, 2, 3], "datatype": "UINT8", "data": [0] * 12}
IMAGES = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"]}


def parse(body: bytes, header_length: int | None = None) -> InferCall:
    return parse_infer(body, header_length, SIGNATURE, 1000)


def call(**fields: Any) -> bytes:
    return orjson.dumps({"inputs": [PIXELS]} | fields)


def pixels(**changes: Any) -> bytes:
    return call(inputs=[PIXELS | changes])


def output(**parameters: Any) -> bytes:
    return call(outputs=[{"name": "logits", "parameters": parameters}])


WRONG_DOCUMENTS: dict[bytes, str] = {
    b"": "not valid JSON",
    b"{": "not valid JSON",
    b'{"inputs": NaN}': "not valid JSON",
    b'{"id": "\xff"}': "not valid JSON",
    b'{"id": "\\ud800"}': "not valid JSON",
    b"\xef\xbb\xbf{}": "not valid JSON",
    b"[" * 100_000: "not valid JSON",
    b"[]": r"document is \[\]; send an object",
    b"12345678901234567890123": "send an object",
    b"{}": "`inputs` is None; send an array of objects for `image`",
    call(inputs={}): "array of objects",
    call(inputs=[]): "array of objects",
    call(inputs=[PIXELS, PIXELS]): "array of objects",
    call(inputs=[1]): "array of objects",
    call(id=7): "`id` is 7; send a string",
    call(parameters=[]): r"`parameters` is \[\]; send an object",
    call(parameters={"triton_x": 1}): "`triton_`, which is reserved",
    call(parameters={"timeout": -1}): "`timeout` is -1; send 0 or more",
    call(parameters={"timeout": 1.5}): "`timeout` is 1.5; send an integer",
    call(parameters={"timeout": True}): "`timeout` is True; send an integer",
    call(parameters={"timeout": "5"}): "`timeout` is '5'; send an integer",
    call(parameters={"binary_data_output": 1}): "`binary_data_output` is 1; send true or false",
    call(outputs={}): "`outputs` is {}; send an array",
    call(outputs=["logits"]): "entry of `outputs` is 'logits'; send an object",
    call(outputs=[{}]): "send an object with `name`",
    call(outputs=[{"name": "x"}]): "'x' does not exist; the model has logits",
    call(outputs=[{"name": "logits"}] * 2): "name each output once",
    output(classification=-1): "`classification` is -1",
    output(classification=True): "`classification` is True; send an integer",
    output(binary_data="yes"): "`binary_data` is 'yes'; send true or false",
    output(shared_memory_region="r"): "shared memory is not supported",
}

WRONG_INPUTS: dict[bytes, str] = {
    pixels(name="picture"): r"name is 'picture'; the model takes `image` as UINT8 \[-1, 2, 2, 3\] or BYTES \[-1\]",
    pixels(name=None): "name is None",
    pixels(datatype="INT8"): "datatype is 'INT8'; the model takes",
    pixels(datatype=["UINT8"]): "datatype is",
    pixels(datatype="RAW"): "datatype is 'RAW'",
    pixels(shape=None): "shape is None",
    pixels(shape=[]): r"shape is \[\]",
    pixels(shape=[2, 2, 3]): r"shape is \[2, 2, 3\]; the model takes",
    pixels(shape=[1, 3, 2, 2]): "the model takes",
    pixels(shape=[0, 2, 2, 3], data=[]): "at least 1 sample",
    pixels(shape=[-1, 2, 2, 3]): "at least 1 sample",
    pixels(shape=[True, 2, 2, 3]): "shape is",
    pixels(shape=[1, 2, 2.0, 3]): "shape is",
    pixels(shape=["1", 2, 2, 3]): "shape is",
    pixels(shape=[None, 2, 2, 3]): "shape is",
    pixels(shape=[2**63, 2, 2, 3]): "more than 1000",
    pixels(shape=[2, 2, 2, 3]): r"`data` \(12\) does not fit shape \[2, 2, 2, 3\]",
    pixels(data=None): "neither `data` nor binary_data_size",
    pixels(data=5): "does not fit",
    pixels(data={}): "does not fit",
    pixels(data=[]): "does not fit",
    pixels(data=[[0] * 12]): "does not fit",
    pixels(data=[[[[0, 0, 0]] * 2, [[0, 0, 0], [0, 0]]]]): "does not fit",
    pixels(data=[[[[0, 0, 0]] * 2, [[0, 0, 0], 0]]]): "does not fit",
    pixels(data=[[[[0, 0, [0]]] * 2] * 2]): "holds list; send int",
    pixels(data=[0] * 11 + [256]): "outside UINT8; send 0 to 255",
    pixels(data=[0] * 11 + [-1]): "outside UINT8",
    pixels(data=[0] * 11 + [0.5]): "holds float; send int",
    pixels(data=[0] * 11 + [True]): "holds bool; send int",
    pixels(data=[0] * 11 + ["0"]): "holds str; send int",
    pixels(data=[0] * 11 + [None]): "holds NoneType; send int",
    pixels(parameters=3): "`parameters` is 3",
    pixels(parameters={"binary_data_size": 12}): "both `data` and binary_data_size",
    pixels(parameters={"shared_memory_region": "r"}): "shared memory is not supported",
    call(inputs=[IMAGES | {"data": [1]}]): "holds int; send str",
    call(inputs=[IMAGES | {"data": ["a", "b"]}]): "does not fit",
}


@pytest.mark.parametrize(("body", "message"), [*WRONG_DOCUMENTS.items(), *WRONG_INPUTS.items()])
def test_a_wrong_document_is_bad_input(body: bytes, message: str) -> None:
    for header_length in (None, len(body) or None):
        with pytest.raises(BadInputError, match=message) as caught:
            parse(body, header_length)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_a_message_quotes_only_a_short_part_of_the_body() -> None:
    for body in (call(outputs=[{"name": "x\n" * 10_000}]), call(id=[[["y" * 10_000] * 100] * 10])):
        with pytest.raises(BadInputError) as caught:
            parse(body)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


def test_more_samples_than_can_be_admitted_are_too_large() -> None:
    body = call(inputs=[IMAGES | {"shape": [1001], "data": [""] * 1001}])
    with pytest.raises(TooLargeError, match="1001 samples, more than 1000; send them in several calls"):
        parse(body)


def test_the_length_of_an_id_is_limited() -> None:
    assert parse(call(id="i" * MAX_ID)).id == "i" * MAX_ID
    with pytest.raises(BadInputError, match="`id` has 257 characters, over 256; send a shorter one"):
        parse(call(id="i" * (MAX_ID + 1)))


def binary(size: Any, blob: bytes, **changes: Any) -> tuple[bytes, int]:
    entry = {key: value for key, value in PIXELS.items() if key != "data"}
    header = call(inputs=[entry | {"parameters": {"binary_data_size": size}} | changes])
    return header + blob, len(header)


def images(blob: bytes, count: int = 2) -> tuple[bytes, int]:
    return binary(len(blob), blob, datatype="BYTES", shape=[count])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (binary(12, bytes(11)), "binary_data_size is 12 but 11 bytes follow"),
        (binary(12, bytes(13)), "binary_data_size is 12 but 13 bytes follow"),
        (binary(11, bytes(11)), r"UINT8 \[1, 2, 2, 3\] takes 12 bytes; 11 bytes"),
        (binary(0, b""), "takes 12 bytes; 0 bytes"),
        (binary(12, bytes(12), shape=[2, 2, 2, 3]), "takes 24 bytes"),
        (binary(-1, b""), "`binary_data_size` is -1; send 0 or more"),
        (binary("12", bytes(12)), "`binary_data_size` is '12'; send an integer"),
        (binary(12.0, bytes(12)), "`binary_data_size` is 12.0; send an integer"),
        (binary(2**64 - 1, bytes(12)), "but 12 bytes follow"),
        (binary(2, b"\1\2", datatype="BOOL", shape=[2]), "neither 0 nor 1"),
        (images(b""), "element 0 of 2 is cut off"),
        (images(b"\0\0\0"), "element 0 of 2 is cut off"),
        (images(b"\1\0\0\0"), "element 0 of 2 is cut off"),
        (images(b"\0\0\0\0\xff\xff\xff\xffx"), "element 1 of 2 is cut off"),
        (images(b"\0\0\0\0"), "element 1 of 2 is cut off"),
        (images(bytes(12)), "4 bytes follow the last of 2"),
        ((call() + b" {}", len(call())), "unexpected additional input data: 3 bytes"),
        ((call(), len(call()) + 1), "Inference-Header-Content-Length is"),
        ((call(), -1), "Inference-Header-Content-Length is -1"),
        ((call(), len(call()) - 1), "not valid JSON"),
        ((b"", 0), "the raw body is empty"),
    ],
)
def test_a_wrong_binary_body_is_bad_input(request_: tuple[bytes, int], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse(*request_)


def test_a_binary_size_without_header_length_is_bad_input() -> None:
    header, length = binary(12, b"")
    with pytest.raises(BadInputError, match="with Inference-Header-Content-Length the JSON's length"):
        parse(header[:length])


@pytest.mark.parametrize("datatype", ["UINT8", "BYTES", "FP32"])
@pytest.mark.parametrize("size", [0, 8, 2**62])
def test_a_claimed_shape_allocates_nothing(datatype: str, size: int) -> None:
    shape = [10**12, *SPEC.sample_shapes[datatype]]
    body, length = binary(size, bytes(8), datatype=datatype, shape=shape)
    tracemalloc.start()
    try:
        with pytest.raises(BadInputError):
            parse_infer(body, length, SIGNATURE, 2**63)
        with pytest.raises(BadInputError):
            parse_infer(pixels(datatype=datatype, shape=shape), None, SIGNATURE, 2**63)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def only_client_errors(body: bytes, header_length: int | None) -> None:
    assert status(body, header_length) in {200, 400, 413}


def status(body: bytes, header_length: int | None) -> int:
    try:
        parse(body, header_length)
    except ServerError as error:
        return error.status if str(error).isprintable() else 500
    return 200


TOKENS = st.sampled_from([b"1e999", b"-", b"true", b'"', b"9" * 25, b"[", b"null"])
LENGTHS = st.none() | st.integers(-1, 400)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["image", "logits", "UINT8", "BYTES", "FP32", "BOOL"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["name", "shape", "datatype", "data", "parameters"])
PARAMETERS = st.sampled_from(["binary_data_size", "shared_memory_region", "timeout", "binary_data", "classification"])
VALID = [(call(id="1", outputs=[{"name": "logits"}]), None), binary(12, bytes(12)), images(b"\1\0\0\0x\0\0\0\0")]


@given(st.binary(max_size=400), LENGTHS)
def test_arbitrary_bytes_give_a_call_or_a_client_error(body: bytes, header_length: int | None) -> None:
    only_client_errors(body, header_length)


@given(JSON)
@example([2**64])
def test_arbitrary_json_gives_a_client_error(value: Any) -> None:
    only_client_errors(str(value).encode() if value == [2**64] else orjson.dumps(value), None)


@settings(max_examples=100)
@given(st.dictionaries(FIELDS, JSON), st.dictionaries(PARAMETERS, JSON), JSON, st.binary(max_size=24))
def test_a_call_with_arbitrary_values_gives_a_call_or_a_client_error(
    fields: dict[str, Any], parameters: dict[str, Any], outputs: Any, blob: bytes
) -> None:
    entry = PIXELS | {"parameters": parameters} | fields
    for chosen in (None, outputs, [{"name": "logits", "parameters": parameters}]):
        header = call(inputs=[entry], outputs=chosen, parameters=parameters)
        only_client_errors(header, None)
        only_client_errors(header + blob, len(header))


@settings(max_examples=150)
@given(st.sampled_from(VALID), st.data())
def test_a_mutated_call_gives_a_call_or_a_client_error(valid: tuple[bytes, int | None], data: Any) -> None:
    body, header_length = bytearray(valid[0]), valid[1]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(start, min(start + 8, len(body))))
        body[start:stop] = data.draw(st.binary(max_size=8) | TOKENS)
    only_client_errors(bytes(body), header_length)
