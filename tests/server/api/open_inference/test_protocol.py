"""Open Inference Protocol v2 against tritonclient's writer and reader, and malformed headers."""

from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from server.api.open_inference.protocol import (
    InferCall,
    RequestedOutput,
    parse_header_length,
    parse_infer,
    render_infer,
)
from server.errors import BadInputError, render_error
from server.models.signature import RAW, Signature, Tensor, TensorSpec
from server.transport.content_encoding import compress

SPEC = TensorSpec("image", {"UINT8": (2, 4, 3), "BYTES": ()})
OUTPUTS = tuple(TensorSpec(name, {"FP32": (-1,)}) for name in ("logits", "features"))
SIGNATURE = Signature((SPEC,), OUTPUTS)
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 2, 4, 3), dtype=np.uint8)
LOGITS = np.random.default_rng(2).normal(size=(3, 10)).astype(np.float32)
LABELS = [f"kind: {index}, é" for index in range(10)]
ENTRY = {"name": "image", "shape": [1, 2, 4, 3], "datatype": "UINT8"}


def parse(body: bytes, header_length: int | None = None, signature: Signature = SIGNATURE) -> InferCall:
    return parse_infer(body, header_length, signature, 1000)


def document(**changes: Any) -> dict[str, Any]:
    """A valid all-JSON call of one sample, with changes; None deletes."""
    fields = {"inputs": [ENTRY | {"data": [0] * 24}]} | changes
    return {key: value for key, value in fields.items() if value is not None}


def entry(**changes: Any) -> dict[str, Any]:
    return document(inputs=[{key: value for key, value in (ENTRY | changes).items() if value is not None}])


def request_body(array: NDArray[Any], binary: bool, **options: Any) -> tuple[bytes, int | None]:
    """The body and its header length, as tritonclient sends them."""
    datatype = "UINT8" if array.dtype == np.uint8 else "BYTES"
    tensor = InferInput("image", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    body: tuple[bytes, int | None] = InferenceServerClient.generate_request_body([tensor], **options)
    return body


def wanted(*outputs: RequestedOutput) -> InferCall:
    return InferCall("", None, {}, outputs)


PLAIN = RequestedOutput("logits", "FP32", False, 0)


def read(answer: tuple[bytes, int | None]) -> InferResult:
    """The response, as tritonclient reads it."""
    return InferenceServerClient.parse_response_body(answer[0], header_length=answer[1])


# The call


@pytest.mark.parametrize("binary", [True, False])
def test_pixels_from_tritonclient_arrive_unchanged(binary: bool) -> None:
    call = parse(*request_body(PIXELS, binary))
    assert (call.tensors["image"].name, call.tensors["image"].datatype, call.tensors["image"].shape) == (
        "image",
        "UINT8",
        PIXELS.shape,
    )
    assert isinstance(call.tensors["image"].data, np.ndarray)
    np.testing.assert_array_equal(call.tensors["image"].data, PIXELS, strict=True)


def test_binary_pixels_are_not_copied() -> None:
    body, header_length = request_body(PIXELS, binary=True)
    data = parse(body, header_length).tensors["image"].data
    assert np.shares_memory(data, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("images", [[b"\xff\xd8\x00", b"", b"\x89PNG"], [b"a"]])
def test_binary_bytes_from_tritonclient_arrive_unchanged(images: list[bytes]) -> None:
    call = parse(*request_body(np.array(images, dtype=np.object_), binary=True))
    assert call.tensors["image"] == Tensor("image", "BYTES", (len(images),), images)


def test_json_bytes_from_tritonclient_are_utf8() -> None:
    call = parse(*request_body(np.array(["é", "", "b"], dtype=np.object_), binary=False))
    assert call.tensors["image"] == Tensor("image", "BYTES", (3,), ["é".encode(), b"", b"b"])


def test_a_header_length_of_the_whole_body_is_all_json_as_the_cpp_client_sends_it() -> None:
    body = orjson.dumps(document(id=""))
    assert parse(body, len(body)).id == ""


def test_nested_and_flat_data_are_the_same() -> None:
    nested, flat = (
        parse(orjson.dumps(entry(shape=[3, 2, 4, 3], data=data)))
        for data in (
            PIXELS.tolist(),
            PIXELS.ravel().tolist(),
        )
    )
    np.testing.assert_array_equal(nested.tensors["image"].data, flat.tensors["image"].data)


def test_null_means_absent() -> None:
    body = orjson.dumps({"inputs": [ENTRY | {"data": [0] * 24, "parameters": None}], "id": None, "outputs": None})
    assert parse(body).id == ""


def test_without_outputs_tritonclient_gets_all_outputs_binary() -> None:
    expected = (RequestedOutput("logits", "FP32", True, 0), RequestedOutput("features", "FP32", True, 0))
    assert parse(*request_body(PIXELS, True)).outputs == expected


def test_without_outputs_and_parameters_all_outputs_are_json() -> None:
    assert [output.binary for output in parse(orjson.dumps(document())).outputs] == [False, False]


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("own", [True, False, None])
def test_an_outputs_own_choice_overrides_the_default(default: bool, own: bool | None) -> None:
    outputs = [{"name": "logits", "parameters": {"binary_data": own}}]
    call = parse(orjson.dumps(document(parameters={"binary_data_output": default}, outputs=outputs)))
    assert call.outputs == (RequestedOutput("logits", "FP32", default if own is None else own, 0),)


@pytest.mark.parametrize(("timeout", "seconds"), [(None, None), (0, None), (1, 1e-6), (2_500_000, 2.5)])
def test_the_timeout_is_microseconds_and_zero_is_none(timeout: int | None, seconds: float | None) -> None:
    call = parse(*request_body(PIXELS, True, timeout=timeout, request_id="a/1", parameters={"mine": "x"}))
    assert call.timeout == seconds
    assert call.id == "a/1"


def test_a_raw_body_is_one_sample_answered_in_binary() -> None:
    call = parse(b"\xff\xd8 anything", 0)
    assert call.tensors["image"] == Tensor("image", RAW, (1,), b"\xff\xd8 anything")
    assert [output.binary for output in call.outputs] == [True, True]


@pytest.mark.parametrize(("text", "length"), [(None, None), (b"0", 0), (b" 12 ", 12)])
def test_a_header_length_is_decimal_digits(text: bytes | None, length: int | None) -> None:
    assert parse_header_length(text) == length


@pytest.mark.parametrize("text", [b"", b"-1", b"+1", b"1_0", b"1.0", b"\xb3", b"x", b"9" * 5000])
def test_another_header_length_is_bad_input(text: bytes) -> None:
    with pytest.raises(BadInputError, match="Inference-Header-Content-Length is"):
        parse_header_length(text)


# The answer


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
def test_tritonclient_reads_the_logits(binary_input: bool, binary_output: bool) -> None:
    output = InferRequestedOutput("logits", binary_data=binary_output)
    call = parse(*request_body(PIXELS, binary_input, outputs=[output], request_id="7"))
    result = read(render_infer(call, "resnet50", {"logits": LOGITS}, LABELS, {"batch_size": 4}))
    np.testing.assert_array_equal(result.as_numpy("logits"), LOGITS, strict=True)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "resnet50", "1")
    assert response["parameters"] == {"batch_size": 4}


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("most", [1, 4, 10, 99])
def test_tritonclient_reads_the_best_classes(binary_input: bool, binary_output: bool, most: int) -> None:
    output = InferRequestedOutput("logits", binary_data=binary_output, class_count=most)
    call = parse(*request_body(PIXELS, binary_input, outputs=[output]))
    classes = read(render_infer(call, "resnet50", {"logits": LOGITS}, LABELS, {})).as_numpy("logits")
    assert classes.shape == (3, min(most, 10))
    for row, texts in zip(LOGITS, classes, strict=True):
        best = np.argsort(-row)[:most]
        expected = [f"{row[index]:f}:{index}:{LABELS[index]}" for index in best]
        assert [text.decode() if isinstance(text, bytes) else text for text in texts] == expected


def test_without_labels_a_class_is_value_and_index() -> None:
    logits = np.array([[0.5, 2.0, 2.0, -1.0]], dtype=np.float32)
    body, _ = render_infer(wanted(RequestedOutput("logits", "FP32", False, 3)), "m", {"logits": logits}, None, {})
    assert orjson.loads(body)["outputs"][0]["data"] == ["2.000000:1", "2.000000:2", "0.500000:0"]


def test_blobs_follow_in_the_order_of_the_outputs_with_json_outputs_between() -> None:
    features = np.arange(6, dtype=np.float32).reshape(3, 2)
    call = wanted(
        RequestedOutput("features", "FP32", True, 0),
        RequestedOutput("middle", "FP32", False, 0),
        RequestedOutput("logits", "FP32", True, 2),
    )
    answer = render_infer(call, "m", {"logits": LOGITS, "features": features, "middle": features}, None, {})
    result = read(answer)
    np.testing.assert_array_equal(result.as_numpy("features"), features)
    np.testing.assert_array_equal(result.as_numpy("middle"), features)
    assert result.as_numpy("logits").shape == (3, 2)


def test_an_output_has_no_parameters_but_the_binary_size() -> None:
    call = wanted(RequestedOutput("logits", "FP32", True, 0), RequestedOutput("features", "FP32", False, 0))
    body, length = render_infer(call, "m", {"logits": LOGITS, "features": LOGITS}, None, {"energy_mj": 1.0})
    binary, plain = orjson.loads(body[:length])["outputs"]
    assert binary["parameters"] == {"binary_data_size": LOGITS.nbytes}
    assert "data" not in binary
    assert "parameters" not in plain


def test_json_data_are_flat_and_empty_fields_are_left_out() -> None:
    body, length = render_infer(wanted(RequestedOutput("logits", "FP32", False, 0)), "m", {"logits": LOGITS}, None, {})
    assert length is None
    answer = orjson.loads(body)
    assert [*answer] == ["model_name", "model_version", "outputs"]
    assert len(answer["outputs"][0]["data"]) == LOGITS.size


@pytest.mark.parametrize("binary", [True, False])
def test_a_slice_of_a_larger_batch_is_rendered_right(binary: bool) -> None:
    strided = np.asfortranarray(LOGITS)[::2]
    answer = render_infer(wanted(RequestedOutput("logits", "FP32", binary, 0)), "m", {"logits": strided}, None, {})
    np.testing.assert_array_equal(read(answer).as_numpy("logits"), strided)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_tritonclient_reads_a_compressed_answer(encoding: str) -> None:
    body, length = render_infer(wanted(RequestedOutput("logits", "FP32", True, 0)), "m", {"logits": LOGITS}, None, {})
    packed, chosen = compress(body, encoding)
    result = InferResult.from_response_body(packed, header_length=length, content_encoding=chosen)
    np.testing.assert_array_equal(result.as_numpy("logits"), LOGITS)


@pytest.mark.parametrize("message", ['a "quoted" é', "lone \udce9"])
def test_an_error_is_an_object_with_error(message: str) -> None:
    assert orjson.loads(render_error(message)) == {"error": message.replace("\udce9", "?")}
