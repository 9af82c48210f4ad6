"""ModelInfer: its message as the body of an HTTP call with binary tensors, and that of the response as a message."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError

from server.api.grpc.http_request import HttpRequest, model_path
from server.api.grpc.messages import message_class
from server.errors import BadInputError, ServerError, TooLargeError, quote
from server.models.signature import DTYPES

_Request, _Response = message_class("ModelInferRequest"), message_class("ModelInferResponse")
_RAW_INPUT_CONTENTS = _Request.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_LENGTH_DELIMITED = 2  # the wire type of all fields of the message
_MAX_FIELDS = 1024
_MAX_TYPED = 2**20  # bytes beside raw_input_contents, of which protobuf makes far larger objects
_MAX_VARINT = 10  # bytes
_TYPED = {  # the field of `contents` by datatype; values of FP16 and BF16 have none
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_OF_STREAMS = "triton_enable_empty_final_response"  # a parameter that the C++ client sets in every call
_LENGTH = b"inference-header-content-length"


def split_message(message: bytes) -> tuple[bytes, list[memoryview]]:
    """Split the message of a call into `raw_input_contents`, as views, and the bytes of all other fields.

    Protobuf would copy the former, and make far larger objects of the latter, which are limited here.

    Raises:
        BadInputError: the message is malformed.
        TooLargeError: the other fields are too large.
    """
    view, at, size = memoryview(message), 0, 0
    raw: list[memoryview] = []
    others: list[memoryview] = []
    while at < len(message):
        tag, start = _varint(message, at)
        length, start = _varint(message, start)
        end = start + length
        if tag & 7 != _LENGTH_DELIMITED or end > len(message):
            raise _malformed("a field is cut off, or has another type")
        if tag >> 3 == _RAW_INPUT_CONTENTS:
            raw.append(view[start:end])
        else:
            others.append(view[at:end])
            size += end - at
        at = end
        if len(raw) + len(others) > _MAX_FIELDS:
            raise _malformed(f"it has over {_MAX_FIELDS} fields")
    if size > _MAX_TYPED:
        raise TooLargeError(
            f"the call has {size} bytes beside raw_input_contents, over {_MAX_TYPED}; send tensors there, or fewer "
            "samples per call"
        )
    return b"".join(others), raw


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer that begins at this byte, and where it ends."""
    value = 0
    for index, byte in enumerate(message[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise _malformed("a field is cut off")


def _malformed(reason: str) -> BadInputError:
    return BadInputError(f"the message is no ModelInferRequest: {reason}; send the protocol's")


def read_infer(fields: bytes, raw: list[memoryview]) -> HttpRequest:
    """The HTTP request of a call, from the two parts of `split_message`.

    Raises:
        BadInputError: the message is malformed.
        NotFoundError: there can be no such model.
    """
    try:
        request = _Request.FromString(fields)
    except DecodeError as error:
        raise _malformed("it cannot be decoded") from error
    path = f"{model_path(request.model_name, request.model_version)}/infer"
    try:
        contents = _contents(request.inputs, raw)
    except ServerError as error:
        return HttpRequest("POST", path, body=error)
    document = orjson.dumps(_document(request, contents))
    return HttpRequest("POST", path, {_LENGTH: b"%d" % len(document)}, b"".join([document, *contents]))


def _contents(inputs: Any, raw: list[memoryview]) -> list[memoryview] | list[bytes]:
    """The binary contents of each input."""
    for tensor in inputs:
        if "shared_memory_region" in tensor.parameters:
            raise BadInputError(f"input {tensor.name[:80]}: shared memory is not supported; send the data in the call")
        if tensor.HasField("contents") == bool(raw):
            found = "both" if raw else "neither"
            raise BadInputError(f"input {tensor.name[:80]} has {found} of contents and raw_input_contents; send one")
    if not raw:
        return [_from_typed(tensor) for tensor in inputs]
    if len(raw) != len(inputs):
        raise BadInputError(f"{len(raw)} raw_input_contents for {len(inputs)} inputs; send one for each")
    return raw


def _from_typed(tensor: Any) -> bytes:
    """The values of an input that has `contents`, as binary data."""
    name, datatype = tensor.name[:80], tensor.datatype
    if datatype not in DTYPES:
        return b""  # the datatype is rejected later, by the model's signature
    wanted = _TYPED.get(datatype)
    found = [field.name for field, _ in tensor.contents.ListFields()]
    if wanted is None or any(field != wanted for field in found):
        remedy = "raw_input_contents" if wanted is None else wanted
        raise BadInputError(f"input {name}: {datatype} is in {', '.join(found) or 'contents'}; send it in {remedy}")
    values = getattr(tensor.contents, wanted)
    if datatype == "BYTES":
        return b"".join([part for value in values for part in (len(value).to_bytes(4, "little"), value)])
    dtype = DTYPES[datatype]
    if dtype.itemsize >= 4 or dtype.kind == "b":
        return np.fromiter(values, dtype, len(values)).tobytes()
    wide, bounds = np.fromiter(values, np.int64, len(values)), np.iinfo(dtype)
    if len(wide) and (wide.min() < bounds.min or wide.max() > bounds.max):
        raise BadInputError(f"input {name}: a value is outside {datatype}; send {bounds.min} to {bounds.max}")
    return wide.astype(dtype).tobytes()


def _document(request: Any, contents: Iterable[Any]) -> dict[str, Any]:
    """The JSON document of the call, whose tensors and outputs are binary data."""
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(data)},
        }
        for tensor, data in zip(request.inputs, contents, strict=True)
    ]
    outputs = [
        {"name": output.name, "parameters": {**_parameters(output.parameters), "binary_data": True}}
        for output in request.outputs
    ]
    return {
        "id": request.id,
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
        "inputs": inputs,
        "outputs": outputs,
    }


def _parameters(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parameter_value(parameter) for name, parameter in sent.items() if name != _OF_STREAMS}


def parameter_value(parameter: Any) -> Any:
    """The value of a parameter as JSON has it; None if it is not set."""
    which = parameter.WhichOneof("parameter_choice")
    value = None if which is None else getattr(parameter, which)
    return quote(value) if isinstance(value, bytes) else value


def write_infer(body: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    """The message of a response, from the body and the headers of the HTTP response."""
    start = int(headers[_LENGTH])
    document = orjson.loads(body[:start])
    response = _Response(
        model_name=document["model_name"], model_version=document["model_version"], id=document.get("id", "")
    )
    for name, value in document.get("parameters", {}).items():
        if value is not None:
            setattr(response.parameters[name], _FIELD_OF[type(value)], value)
    for output in document["outputs"]:
        size = output["parameters"]["binary_data_size"]
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        response.raw_output_contents.append(body[start : start + size])
        start += size
    message: bytes = response.SerializeToString()
    return message


_FIELD_OF = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
