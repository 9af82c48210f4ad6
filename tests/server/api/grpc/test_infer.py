"""The translation of inference calls between gRPC and HTTP."""

from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from server.api.grpc.http_request import HttpRequest
from server.api.grpc.infer import read_infer, split_message, write_infer
from server.api.open_inference.protocol import InferCall, parse_infer
from server.errors import BadInputError, NotFoundError, ServerError, TooLargeError
from server.models.signature import Signature, TensorSpec

NUMBERS = {
    **{f"{kind}{bits}": f"{kind}{bits}".lower() for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
    "FP32": "float32",
    "FP64": "float64",
    "BOOL": "bool",
}
FIELDS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **{name: f"{name.lower()}_contents" for name in ("INT64", "UINT64", "FP32", "FP64", "BOOL", "BYTES")},
}
LENGTH = b"inference-header-content-length"


def signature(datatype: str, *shape: int, inputs: int = 1) -> Signature:
    tensors = tuple(TensorSpec(name, {datatype: shape}) for name in ("x", "z"))
    return Signature(tensors[:inputs], tensors)


def request(**fields: Any) -> Any:
    return service_pb2.ModelInferRequest(model_name="m", **fields)


def add_input(sent: Any, datatype: str, shape: list[int], name: str = "x") -> Any:
    return sent.inputs.add(name=name, datatype=datatype, shape=shape)


def translate(sent: Any) -> HttpRequest:
    return translate_bytes(sent.SerializeToString())


def translate_bytes(message: bytes) -> HttpRequest:
    return read_infer(*split_message(message))


def read(sent: Any, of: Signature) -> InferCall:
    """The call that HTTP's parser reads."""
    translated = translate(sent)
    if isinstance(translated.body, ServerError):
        raise translated.body
    return parse_infer(translated.body, int(translated.headers[LENGTH]), of, 16)


def values(call: InferCall, name: str = "x") -> Any:
    data = call.tensors[name].data
    return data.tolist() if isinstance(data, np.ndarray) else data


@pytest.mark.parametrize("datatype", NUMBERS)
def test_typed_and_raw_contents_are_the_same_tensor(datatype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]], NUMBERS[datatype])
    raw, typed = request(raw_input_contents=[array.tobytes()]), request()
    add_input(raw, datatype, [2, 3])
    getattr(add_input(typed, datatype, [2, 3]).contents, FIELDS[datatype]).extend(array.reshape(-1).tolist())
    for sent in (raw, typed):
        assert values(read(sent, signature(datatype, 3))) == array.tolist()


@pytest.mark.parametrize("datatype", [name for name in NUMBERS if "INT" in name])
def test_the_bounds_of_integers_are_kept(datatype: str) -> None:
    bounds = np.iinfo(NUMBERS[datatype])
    sent = request()
    contents = getattr(add_input(sent, datatype, [1, 2]).contents, FIELDS[datatype])
    contents.extend([int(bounds.min), int(bounds.max)])
    assert values(read(sent, signature(datatype, 2))) == [[bounds.min, bounds.max]]


def test_bytes_are_elements_in_either_form() -> None:
    elements = [b"", b"\xff\x00", b"abc"]
    raw = request(raw_input_contents=[b"".join(len(e).to_bytes(4, "little") + e for e in elements)])
    typed = request()
    add_input(raw, "BYTES", [3])
    add_input(typed, "BYTES", [3]).contents.bytes_contents.extend(elements)
    for sent in (raw, typed):
        assert values(read(sent, signature("BYTES"))) == elements


def test_several_inputs_keep_their_own_contents() -> None:
    sent = request(raw_input_contents=[b"\x01\x02", b"\x03\x04"])
    add_input(sent, "UINT8", [1, 2], "z")
    add_input(sent, "UINT8", [1, 2], "x")
    call = read(sent, signature("UINT8", 2, inputs=2))
    assert (values(call, "z"), values(call, "x")) == ([[1, 2]], [[3, 4]])


def test_id_parameters_and_outputs_are_those_of_an_http_call() -> None:
    sent = request(id="7", raw_input_contents=[b"\x01"])
    add_input(sent, "UINT8", [1, 1])
    sent.parameters["temperature"].double_param = 0.5
    sent.parameters["timeout"].int64_param = 2_000_000
    sent.parameters["triton_enable_empty_final_response"].bool_param = True  # perf_analyzer sets it
    sent.outputs.add(name="z")
    call = read(sent, signature("UINT8", 1))
    assert (call.id, call.timeout) == ("7", 2.0)
    translated = translate(sent)
    assert isinstance(translated.body, bytes)
    document = orjson.loads(translated.body[: int(translated.headers[LENGTH])])
    assert document["parameters"]["temperature"] == 0.5
    assert [(output.name, output.binary) for output in call.outputs] == [("z", True)]


def test_all_outputs_are_binary_without_a_choice() -> None:
    sent = request(raw_input_contents=[b"\x01"])
    add_input(sent, "UINT8", [1, 1])
    call = read(sent, signature("UINT8", 1))
    assert [(output.name, output.binary) for output in call.outputs] == [("x", True), ("z", True)]


def test_the_path_has_model_and_version() -> None:
    assert translate(request()).path == "/v2/models/m/versions/1/infer"
    assert translate(service_pb2.ModelInferRequest(model_name="a.b-c", model_version="3")).path == (
        "/v2/models/a.b-c/versions/3/infer"
    )


@pytest.mark.parametrize("name", ["", "a/b", "m/versions/1", "m?x", "m%2f", "mö", "m\r\nx: y", ".. "])
def test_a_name_that_no_model_has_leads_to_no_other_route(name: str) -> None:
    with pytest.raises(NotFoundError):
        translate(service_pb2.ModelInferRequest(model_name=name))
    with pytest.raises(NotFoundError):
        translate(service_pb2.ModelInferRequest(model_name="m", model_version=name or "/"))


@pytest.mark.parametrize(
    ("datatype", "field", "raw", "message"),
    [
        ("UINT8", "", [b"", b"", b""], "3 raw_input_contents for 1 inputs"),
        ("UINT8", "uint_contents", [b"a"], "both of contents and raw_input_contents"),
        ("UINT8", "", [], "neither of contents and raw_input_contents"),
        ("UINT8", "fp32_contents", [], "UINT8 is in fp32_contents; send it in uint_contents"),
        ("FP16", "fp32_contents", [], "FP16 is in fp32_contents; send it in raw_input_contents"),
        ("INT8", "int_contents", [], "a value is outside INT8; send -128 to 127"),
    ],
)
def test_errors_of_the_contents_are_raised_when_the_body_is_read(
    datatype: str, field: str, raw: list[bytes], message: str
) -> None:
    sent = request(raw_input_contents=raw)
    tensor = add_input(sent, datatype, [1, 1])
    if field:
        getattr(tensor.contents, field).append(128)
    translated = translate(sent)
    assert translated.path.endswith("/infer")
    assert isinstance(translated.body, BadInputError)
    assert message in str(translated.body)


def test_shared_memory_is_not_supported() -> None:
    sent = request()
    add_input(sent, "UINT8", [1, 1]).parameters["shared_memory_region"].string_param = "region"
    assert "shared memory is not supported" in str(translate(sent).body)


@pytest.mark.parametrize(
    ("shape", "contents", "message"),
    [([1, 2], [1.0], "takes 8 bytes"), ([1], [1.0], "the shape is"), ([-1, 1], [1.0], "the shape is")],
)
def test_the_rules_of_http_reject_tensors_that_do_not_fit(
    shape: list[int], contents: list[float], message: str
) -> None:
    sent = request()
    add_input(sent, "FP32", shape).contents.fp32_contents.extend(contents)
    with pytest.raises(BadInputError, match=message):
        read(sent, signature("FP32", 2 if message == "takes 8 bytes" else 1))


def test_the_rules_of_http_reject_an_unknown_datatype() -> None:
    sent = request()
    add_input(sent, "FP8", [1, 1]).contents.fp32_contents.append(1)
    with pytest.raises(BadInputError, match="the datatype is 'FP8'"):
        read(sent, signature("FP32", 1))


@pytest.mark.parametrize(
    "message",
    [
        b"\xff",
        b"\xff" * 12,
        b"\x0a\x05ab",  # cut off
        b"\x08\x01",  # another wire type
        b"\x0a\x02\xff\xfe",  # not UTF-8
        b"\x2a\x02\xff\xff",  # an input that cannot be decoded
    ],
)
def test_malformed_messages_are_bad_input(message: bytes) -> None:
    with pytest.raises(BadInputError, match="the message is no ModelInferRequest"):
        read_infer(*split_message(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_error_for_the_client(message: bytes) -> None:
    with suppress(ServerError):
        assert translate_bytes(message).method == "POST"


@given(st.data())
def test_a_damaged_message_is_a_request_or_an_error_for_the_client(data: st.DataObject) -> None:
    sent = request(id="7", raw_input_contents=[b"abc"])
    add_input(sent, "UINT8", [1, 3])
    message = bytearray(sent.SerializeToString())
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ServerError):
        assert translate_bytes(bytes(message)).method == "POST"


def test_only_tensors_in_raw_contents_may_be_large() -> None:
    raw = request(raw_input_contents=[bytes(2**21)])
    typed = request()
    add_input(typed, "UINT8", [1, 2**21]).contents.uint_contents.extend(bytes(2**21))
    fields, contents = split_message(raw.SerializeToString())
    assert fields == request().SerializeToString()
    assert [len(each) for each in contents] == [2**21]
    with pytest.raises(TooLargeError, match="beside raw_input_contents"):
        split_message(typed.SerializeToString())


def test_many_fields_are_rejected_before_they_are_decoded() -> None:
    with pytest.raises(BadInputError, match="over 1024 fields"):
        split_message(b"\x3a\x00" * 2000)


def test_a_response_has_the_outputs_and_parameters_of_http() -> None:
    outputs = [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "z", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
    ]
    facts = {"batch_size": 2, "waiting_ms": 0.5, "energy_mj": None, "energy_source": "none", "late": False}
    document = {"id": "7", "model_name": "m", "model_version": "1", "parameters": facts, "outputs": outputs}
    header = orjson.dumps(document)
    message = write_infer(header + b"12345678\x01\x00\x00\x00a", {LENGTH: str(len(header)).encode()})
    response = service_pb2.ModelInferResponse.FromString(message)
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "7")
    assert [(each.name, each.datatype, [*each.shape]) for each in response.outputs] == [
        ("y", "FP32", [1, 2]),
        ("z", "BYTES", [1]),
    ]
    assert [*response.raw_output_contents] == [b"12345678", b"\x01\x00\x00\x00a"]
    assert response.parameters["batch_size"].int64_param == 2
    assert response.parameters["waiting_ms"].double_param == 0.5
    assert response.parameters["energy_source"].string_param == "none"
    assert response.parameters["late"].WhichOneof("parameter_choice") == "bool_param"
    assert "energy_mj" not in response.parameters
