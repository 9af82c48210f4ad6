"""Open Inference Protocol v2 over HTTP: bytes <-> tensors, as pure functions.

A body is a JSON document, or a JSON document followed by the tensors' bytes (little-endian, row-major, no padding); the
header Inference-Header-Content-Length tells how long the document is. Length 0 means a raw body: no document, all of it
is the one sample. Everything a client can get wrong is a `BadInputError` here, before anything of the claimed size is
allocated. In documents null means absent.
"""

import reprlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from server.errors import BadInputError, TooLargeError, UnsupportedError
from server.tensors import RAW, Tensor, TensorSpec, from_binary, from_json, join_elements

T = TypeVar("T")

_JSON_NAMES = {str: "a string", int: "an integer", bool: "true or false", dict: "an object", list: "an array"}
_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's wbits: 31 reads and writes the gzip wrapper, 15 the zlib wrapper


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """How the client wants one output: binary or JSON; the `classification` best classes, or the tensor (0)."""

    name: str
    binary: bool
    classification: int


@dataclass(frozen=True, slots=True)
class InferCall:
    """One inference call; each of its samples becomes a request.

    Attributes:
        id: The client's name for the call; empty when it gave none.
        parameters: The document's top-level parameters.
        timeout: The client's time-out in s from arrival; None when it gave none.
        tensor: The model's input.
        outputs: What to answer, in this order.
    """

    id: str
    parameters: dict[str, Any]
    timeout: float | None
    tensor: Tensor
    outputs: tuple[RequestedOutput, ...]


# ---- content encoding -------------------------------------------------------------------------------------------------


def decompress(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """Undo the body's Content-Encoding, inflating at most one byte more than `max_bytes`.

    Raises:
        UnsupportedError: The encoding is not identity, gzip or deflate.
        TooLargeError: The plain body is over `max_bytes`.
        BadInputError: The compressed body is corrupt, cut off, or followed by something else.
    """
    encoding = (content_encoding or "identity").strip().lower().removeprefix("x-") or "identity"
    if encoding == "identity":
        plain = body
    elif encoding in _WINDOW:
        plain = _inflate(body, encoding, max_bytes + 1)
    else:
        raise UnsupportedError(f"Content-Encoding is {reprlib.repr(content_encoding)}; send gzip, deflate or identity")
    if len(plain) > max_bytes:
        raise TooLargeError(f"the body is over {max_bytes} bytes when decompressed; send fewer samples per call")
    return plain


def _inflate(body: bytes, encoding: str, most: int) -> bytes:
    inflater = zlib.decompressobj(_WINDOW[encoding])
    if encoding == "deflate" and not _has_zlib_header(body):
        inflater = zlib.decompressobj(-15)  # some clients send the bare stream
    try:
        plain = inflater.decompress(body, most)
    except zlib.error as error:
        raise BadInputError(f"the body is not valid {encoding}: {error}") from error
    if len(plain) < most and not inflater.eof:
        raise BadInputError(f"the {encoding} body ends too early after {len(body)} bytes; send all of it")
    if inflater.unused_data:
        # Also refuses gzip of many members: inflating millions of empty ones would take quadratic time.
        raise BadInputError(f"{len(inflater.unused_data)} bytes follow the {encoding} stream; send one stream")
    return plain


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0


def compress(body: bytes, accept_encoding: str | None) -> tuple[bytes, str | None]:
    """Compress an answer if the client asks for it.

    Returns:
        The body and its Content-Encoding; None when it is left as it is.
    """
    if not accept_encoding:
        return body, None
    weights = dict(_weight(item) for item in accept_encoding.split(","))
    best = max((*_WINDOW, "identity"), key=lambda name: weights.get(name, 0.0))
    if best == "identity" or not weights.get(best, 0.0) > 0:
        return body, None
    deflater = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[best])  # level 1: this runs on the event loop
    return deflater.compress(body) + deflater.flush(), best


def _weight(item: str) -> tuple[str, float]:
    """Read one item of Accept-Encoding, such as `gzip;q=0.5`; a weight that cannot be read counts as a refusal."""
    name, _, weight = item.partition(";")
    value = weight.strip().lower().removeprefix("q=")
    try:
        return name.strip().lower(), float(value) if value else 1.0
    except ValueError:
        return name.strip().lower(), 0.0


# ---- the call ---------------------------------------------------------------------------------------------------------


def parse_header_length(text: str | None) -> int | None:
    """Read Inference-Header-Content-Length; None when the header is absent.

    Raises:
        BadInputError: It is not a non-negative decimal integer.
    """
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise BadInputError(f"Inference-Header-Content-Length is {reprlib.repr(text)}; send the JSON's length in bytes")
    return int(digits)


def parse_infer(body: bytes, header_length: int | None, spec: TensorSpec, outputs: Sequence[str]) -> InferCall:
    """Read an inference call.

    Args:
        body: The plain (decompressed) body.
        header_length: Bytes of JSON at its start; None: all of it; 0: a raw body.
        spec: The model's only input.
        outputs: The names of the model's outputs.

    Raises:
        BadInputError: The bytes are no such call, or not one for this model.
    """
    if header_length == 0:
        return _raw_call(body, spec, outputs)
    start = len(body) if header_length is None else header_length
    if not 0 <= start <= len(body):
        raise BadInputError(f"Inference-Header-Content-Length is {start}; the body has {len(body)} bytes")
    document = _read_json(body[:start])
    parameters = _optional(document, "parameters", dict, {})
    if any(key.startswith("triton_") for key in parameters):
        raise BadInputError("a parameter's name starts with `triton_`, which is reserved; rename it")
    return InferCall(
        id=_optional(document, "id", str, ""),
        parameters=parameters,
        timeout=_count(parameters, "timeout") / 1e6 or None,
        tensor=_read_input(document, body, start, spec),
        outputs=_read_outputs(document, outputs, _optional(parameters, "binary_data_output", bool, False)),
    )


def _raw_call(body: bytes, spec: TensorSpec, outputs: Sequence[str]) -> InferCall:
    if not body:
        raise BadInputError("the raw body is empty; send one sample, or JSON without Inference-Header-Content-Length")
    requested = tuple(RequestedOutput(name, True, 0) for name in outputs)
    return InferCall("", {}, None, Tensor(spec.name, RAW, (1,), [body]), requested)


def _read_json(text: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the inference document is not valid JSON: {error}") from error
    if type(document) is not dict:
        raise BadInputError(f"the inference document is {reprlib.repr(document)}; send an object with `inputs`")
    return document


def _read_outputs(document: dict[str, Any], names: Sequence[str], binary: bool) -> tuple[RequestedOutput, ...]:
    entries = _optional(document, "outputs", list, [])
    if not entries:
        return tuple(RequestedOutput(name, binary, 0) for name in names)
    requested = tuple(_read_output(entry, names, binary) for entry in entries)
    if len({output.name for output in requested}) < len(requested):
        raise BadInputError(f"`outputs` has {len(requested)} entries with repeated names; name each output once")
    return requested


def _read_output(entry: Any, names: Sequence[str], binary: bool) -> RequestedOutput:
    name = entry.get("name") if type(entry) is dict else None
    if name not in names:
        shown = reprlib.repr(entry if name is None else name)
        raise BadInputError(f"the requested output {shown} does not exist; the model has {', '.join(names)}")
    parameters = _optional(entry, "parameters", dict, {})
    if parameters.get("shared_memory_region") is not None:
        raise BadInputError(f"output {name}: shared memory is not supported; receive the data in the body")
    classification = _count(parameters, "classification")
    return RequestedOutput(name, _optional(parameters, "binary_data", bool, binary), classification)


# ---- the input tensor -------------------------------------------------------------------------------------------------


def _read_input(document: dict[str, Any], body: bytes, start: int, spec: TensorSpec) -> Tensor:
    entries = document.get("inputs")
    if type(entries) is not list or len(entries) != 1 or type(entries[0]) is not dict:
        raise BadInputError(f"`inputs` is {reprlib.repr(entries)}; send an array of one object: {spec}")
    entry = entries[0]
    datatype, shape = _read_form(entry, spec)
    size = _binary_size(entry, spec.name)
    follow = len(body) - start
    if size is None:
        if follow:
            raise BadInputError(f"unexpected additional input data: {follow} bytes follow the JSON; send none")
        return Tensor(spec.name, datatype, shape, from_json(entry["data"], datatype, shape))
    if size != follow:
        raise BadInputError(
            f"input {spec.name}: binary_data_size is {size} but {follow} bytes follow the JSON;"
            " make them equal, with Inference-Header-Content-Length the JSON's length"
        )
    return Tensor(spec.name, datatype, shape, from_binary(body, start, datatype, shape))


def _read_form(entry: dict[str, Any], spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """Check name, datatype and shape; only this bounds the shape, and only by the specification's tail."""
    name, datatype, shape = entry.get("name"), entry.get("datatype"), entry.get("shape")
    if name != spec.name:
        raise BadInputError(f"the input's name is {reprlib.repr(name)}; the model takes {spec}")
    tail = spec.tails.get(datatype) if type(datatype) is str else None
    if type(datatype) is not str or tail is None:
        raise BadInputError(f"input {name}: the datatype is {reprlib.repr(datatype)}; the model takes {spec}")
    # True == 1 and 3.0 == 3, so compare types too.
    whole = type(shape) is list and len(shape) == 1 + len(tail) and all(type(size) is int for size in shape)
    if not whole or shape[0] < 1 or (*shape[1:],) != tail:
        raise BadInputError(
            f"input {name}: the shape is {reprlib.repr(shape)}; the model takes {spec}, at least 1 sample"
        )
    return datatype, (*shape,)


def _binary_size(entry: dict[str, Any], name: str) -> int | None:
    """Find where the values are: the size of the binary tensor, or None when they are in the JSON."""
    parameters = _optional(entry, "parameters", dict, {})
    if parameters.get("shared_memory_region") is not None:
        raise BadInputError(f"input {name}: shared memory is not supported; send the data in the body")
    binary = parameters.get("binary_data_size") is not None
    if binary == (entry.get("data") is not None):
        raise BadInputError(f"input {name} has {'both' if binary else 'none'} of `data` and binary_data_size; send one")
    return _count(parameters, "binary_data_size") if binary else None


# ---- the answer -------------------------------------------------------------------------------------------------------


def render_infer(
    call: InferCall,
    model: str,
    outputs: Mapping[str, NDArray[np.float32]],
    labels: Sequence[str] | None,
    parameters: Mapping[str, Any],
) -> tuple[bytes, int | None]:
    """Write the answer to a call.

    Args:
        call: The call that is answered.
        model: The model's name.
        outputs: Output name -> float32 array [samples, classes]; one entry for each that the call requests.
        labels: One for each class, or None.
        parameters: Facts about the answer, left out when empty.

    Returns:
        The body and its Inference-Header-Content-Length; None when all of it is JSON, where NaN and infinity are null.
    """
    document: dict[str, Any] = {"id": call.id} if call.id else {}
    document |= {"model_name": model, "model_version": "1"}
    if parameters:
        document["parameters"] = parameters
    blobs: list[bytes] = []
    document["outputs"] = [_render_output(output, outputs[output.name], labels, blobs) for output in call.outputs]
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((header, *blobs)), len(header)) if blobs else (header, None)


def _render_output(
    output: RequestedOutput, array: NDArray[np.float32], labels: Sequence[str] | None, blobs: list[bytes]
) -> dict[str, Any]:
    """Describe one output; its bytes, if binary, are appended to `blobs`."""
    values = np.ascontiguousarray(array, "<f4")
    entry: dict[str, Any] = {"name": output.name, "datatype": "FP32", "shape": values.shape}
    if output.classification:
        best = _best_classes(values, output.classification, labels)
        entry |= {"datatype": "BYTES", "shape": (len(values), len(best) // len(values))}
    if not output.binary:
        # Flat, because the C++ client reads element by element.
        return entry | {"data": best if output.classification else values.reshape(-1)}
    blobs.append(join_elements(best) if output.classification else values.tobytes())
    # Nothing else may stand in these parameters: the C++ client would take it for a binary size.
    return entry | {"parameters": {"binary_data_size": len(blobs[-1])}}


def _best_classes(values: NDArray[np.float32], most: int, labels: Sequence[str] | None) -> list[str]:
    """List `value:index[:label]`, for each sample the best first, ties by index."""
    count = values.shape[1]
    first = count - min(most, count)
    texts: list[str] = []
    for row in values:
        best = np.argpartition(row, first)[first:]
        ranked = sorted(zip((-row[best]).tolist(), best.tolist(), strict=True))
        texts += [f"{-value:f}:{index}{_suffix(labels, index)}" for value, index in ranked]
    return texts


def _suffix(labels: Sequence[str] | None, index: int) -> str:
    return f":{labels[index]}" if labels else ""


def render_error(message: str) -> bytes:
    """Write the body of every answer other than 200."""
    # Part of a message may come from a URL, and JSON cannot hold the lone surrogates of a badly decoded one.
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


# ---- values of a document ---------------------------------------------------------------------------------------------


def _optional(fields: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not kind:  # not isinstance: true is no integer
        raise BadInputError(f"`{key}` is {reprlib.repr(value)}; send {_JSON_NAMES[kind]}")
    return value


def _count(fields: dict[str, Any], key: str) -> int:
    value = _optional(fields, key, int, 0)
    if value < 0:
        raise BadInputError(f"`{key}` is {value}; send 0 or more")
    return value
