"""Open Inference Protocol v2 over HTTP: bytes <-> tensors, as pure functions.

A body is a JSON document, or a JSON document followed by the tensors' bytes (little-endian, row-major, no padding); the
header Inference-Header-Content-Length is the document's length. Length 0 means a raw body: no document, the whole body
is one sample. Any error of the client is a `BadInputError`, raised before memory of the claimed size is allocated. In
documents null means absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from server.api.open_inference.documents import VERSION
from server.errors import BadInputError, TooLargeError, quote
from server.json_body import parse_object
from server.models.model import largest
from server.models.signature import RAW, Signature, Tensor, TensorSpec
from server.models.tensors.data import from_binary, from_json, to_binary, to_json
from server.transport.request import Body

T = TypeVar("T")

MAX_ID = 256  # characters of a call's `id`, which its response repeats
_JSON_NAMES = {str: "a string", int: "an integer", bool: "true or false", dict: "an object", list: "an array"}


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the client requests.

    Attributes:
        name: The output's name.
        datatype: Its datatype.
        binary: Whether it is sent as binary data, else as JSON.
        classification: Number of most probable classes to send in place of the tensor; 0: the tensor.
    """

    name: str
    datatype: str
    binary: bool
    classification: int


@dataclass(slots=True)
class InferCall:
    """One inference call; each of its samples becomes a request.

    Attributes:
        id: The client's id of the call; empty if it sent none.
        timeout: The client's timeout in s from arrival; None if it sent none.
        tensors: The inputs, by name.
        outputs: The requested outputs, in this order.
        priority: 1 is the highest, 0 the default.
    """

    id: str
    timeout: float | None
    tensors: Mapping[str, Tensor]
    outputs: tuple[RequestedOutput, ...]
    priority: int = 0

    def take_tensors(self) -> Mapping[str, Tensor]:
        """Return the input tensors, and drop them here, since their samples are about to be queued."""
        tensors, self.tensors = self.tensors, {}
        return tensors


def parse_header_length(sent: bytes | None) -> int | None:
    """Read Inference-Header-Content-Length; None when the header is absent.

    Raises:
        BadInputError: It is not a non-negative decimal integer.
    """
    if sent is None:
        return None
    digits = sent.strip()
    if not (digits.isdigit() and len(digits) < 19):
        text = quote(sent.decode("latin-1"))
        raise BadInputError(f"Inference-Header-Content-Length is {text}; send the JSON's length in bytes")
    return int(digits)


@dataclass(frozen=True, slots=True)
class InferHeader:
    """What the JSON document of a call says; calls with equal documents have equal headers.

    Attributes:
        id: The client's id of the call; empty if it sent none.
        timeout: The client's timeout in s from arrival; None if it sent none.
        priority: 1 is the highest, 0 the default.
        tensors: Datatype, shape, and size in bytes of each input by name; the size is None if its values are in `data`.
        binary_size: Sum of these sizes.
        data: The values in the document, by input name.
        outputs: The requested outputs, in this order.
    """

    id: str
    timeout: float | None
    priority: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], int | None]]
    binary_size: int
    data: Mapping[str, Any]
    outputs: tuple[RequestedOutput, ...]


def parse_infer(body: Body, header_length: int | None, signature: Signature, max_samples: int) -> InferCall:
    """Read an inference call.

    Args:
        body: The plain (decompressed) body.
        header_length: Length of the JSON at its start, bytes; None for all of it; 0 for a raw body.
        signature: The model's inputs and outputs.
        max_samples: The maximum number of samples that can be admitted together.

    Raises:
        TooLargeError: The call has more than `max_samples`.
        BadInputError: The call is malformed, or does not match the model.
    """
    if header_length == 0:
        return raw_call(body, signature)
    text = document_of(body, header_length)
    return read_call(parse_header(text, signature, max_samples), body, len(text))


def parse_header(text: bytes, signature: Signature, max_samples: int) -> InferHeader:
    """Read the JSON document of a call; arguments and errors as for `parse_infer`."""
    document = parse_object(text, "inference document", "an object with `inputs`")
    parameters = _optional(document, "parameters", dict, {})
    if any(key.startswith("triton_") for key in parameters):
        raise BadInputError("a parameter's name starts with `triton_`, which is reserved; rename it")
    entries = _input_entries(document.get("inputs"), signature)
    types = {name: _read_type(entry, of) for name, (entry, of) in entries.items()}
    _check_samples(types, max_samples)
    sizes = {name: _binary_size(entry, name) for name, (entry, _) in entries.items()}
    return InferHeader(
        id=_read_id(document),
        timeout=_non_negative(parameters, "timeout") / 1e6 or None,
        priority=_non_negative(parameters, "priority"),
        tensors={name: (*types[name], size) for name, size in sizes.items()},
        binary_size=sum(size for size in sizes.values() if size is not None),
        data={name: entries[name][0]["data"] for name, size in sizes.items() if size is None},
        outputs=_read_outputs(document, signature, _optional(parameters, "binary_data_output", bool, False)),
    )


def read_call(header: InferHeader, body: Body, start: int) -> InferCall:
    """Read the tensors of a call; those that are binary are in the body from `start` on, in the order of the header.

    Raises:
        BadInputError: They do not fit their datatypes and shapes.
    """
    if header.binary_size != len(body) - start:
        raise _size_error(header, len(body) - start)
    tensors = {}
    for name, (datatype, shape, size) in header.tensors.items():
        if size is None:
            data = from_json(header.data[name], datatype, shape)
        else:
            is_last = start + size == len(body)  # then nothing is copied
            part, at = (body, start) if is_last else (body[start : start + size], 0)
            data = from_binary(part, at, datatype, shape)
            start += size
        tensors[name] = Tensor(name, datatype, shape, data)
    return InferCall(header.id, header.timeout, tensors, header.outputs, header.priority)


def raw_call(body: Body, signature: Signature) -> InferCall:
    """Return the call of a raw body, which is one sample of the only input.

    Raises:
        BadInputError: It is empty, or the model has several inputs.
    """
    first, *others = signature.inputs
    if others:
        raise BadInputError(
            f"a raw body cannot hold {len(signature.inputs)} inputs; send JSON with {signature.input_names()}"
        )
    if not body:
        raise BadInputError("the raw body is empty; send one sample, or JSON without Inference-Header-Content-Length")
    requested = tuple(RequestedOutput(output.name, output.datatype, True, 0) for output in signature.outputs)
    return InferCall("", None, {first.name: Tensor(first.name, RAW, (1,), body)}, requested)


def document_of(body: Body, header_length: int | None) -> bytes:
    """The JSON part of a body; empty for a raw body.

    Raises:
        BadInputError: the body is shorter.
    """
    start = len(body) if header_length is None else header_length
    if not 0 <= start <= len(body):
        raise BadInputError(
            f"Inference-Header-Content-Length is {start}; the body has {len(body)} bytes; give that of its JSON part"
        )
    return bytes(body[:start])


def _read_id(document: dict[str, Any]) -> str:
    name = _optional(document, "id", str, "")
    if len(name) > MAX_ID:
        raise BadInputError(f"`id` has {len(name)} characters, over {MAX_ID}; send a shorter one")
    return name


def _read_outputs(document: dict[str, Any], signature: Signature, binary: bool) -> tuple[RequestedOutput, ...]:
    entries = _optional(document, "outputs", list, [])
    if not entries:
        return tuple(RequestedOutput(output.name, output.datatype, binary, 0) for output in signature.outputs)
    known = {output.name: output for output in signature.outputs}
    requested = tuple(_read_output(entry, known, binary) for entry in entries)
    if len({output.name for output in requested}) < len(requested):
        raise BadInputError(f"`outputs` has {len(requested)} entries with repeated names; name each output once")
    return requested


def _read_output(entry: Any, known: Mapping[str, TensorSpec], binary: bool) -> RequestedOutput:
    if type(entry) is not dict or type(entry.get("name")) is not str:
        raise BadInputError(f"an entry of `outputs` is {quote(entry)}; send an object with `name`")
    name = entry["name"]
    if name not in known:
        raise BadInputError(f"the requested output {quote(name)} does not exist; the model has {', '.join(known)}")
    parameters = _optional(entry, "parameters", dict, {})
    if parameters.get("shared_memory_region") is not None:
        raise BadInputError(f"output {name}: shared memory is not supported; receive the data in the body")
    classification = _non_negative(parameters, "classification")
    if classification and not known[name].is_scores:
        raise BadInputError(
            f"output {known[name]} is not a vector of floating-point scores; leave `classification` out"
        )
    binary = _optional(parameters, "binary_data", bool, binary)
    return RequestedOutput(name, known[name].datatype, binary, classification)


def _input_entries(entries: Any, signature: Signature) -> dict[str, tuple[dict[str, Any], TensorSpec]]:
    """The entries of all inputs with their specifications, by name."""
    known = {spec.name: spec for spec in signature.inputs}
    is_list = type(entries) is list and 1 <= len(entries) <= len(known)
    if not is_list or any(type(entry) is not dict for entry in entries):
        raise BadInputError(f"`inputs` is {quote(entries)}; send an array of objects for {signature.input_names()}")
    found = {}
    for entry in entries:
        name = entry.get("name")
        if type(name) is not str or name not in known or name in found:
            raise BadInputError(f"the input's name is {quote(name)}; the model takes {signature.input_names()}")
        found[name] = entry, known[name]
    missing = next((spec for spec in signature.inputs if spec.name not in found), None)
    if missing is not None:
        raise BadInputError(f"`inputs` has no {missing.name}; the model takes {signature.input_names()}")
    return found


def _check_samples(types: Mapping[str, tuple[str, tuple[int, ...]]], max_samples: int) -> None:
    """Check the number of samples, which has to be the same for all inputs."""
    counts = {name: shape[0] for name, (_, shape) in types.items()}
    name, samples = next(iter(counts.items()))
    if samples > max_samples:
        raise TooLargeError(f"the call has {samples} samples, more than {max_samples}; send them in several calls")
    other = next((key for key, count in counts.items() if count != samples), name)
    if other != name:
        raise BadInputError(f"input {other} has {counts[other]} samples, {name} has {samples}; send the same number")


def _size_error(header: InferHeader, follow: int) -> BadInputError:
    """The error of a call whose binary tensors do not take exactly the `follow` bytes after the JSON."""
    binary = [name for name, (_, _, size) in header.tensors.items() if size is not None]
    if not binary:
        return BadInputError(f"unexpected additional input data: {follow} bytes follow the JSON; send none")
    return BadInputError(
        f"input {', '.join(binary)}: binary_data_size is {header.binary_size} but {follow} bytes follow the JSON;"
        " make them equal, with Inference-Header-Content-Length the JSON's length"
    )


def _read_type(entry: dict[str, Any], spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """Datatype and shape, checked against the specification but for the number of samples."""
    name, datatype, shape = spec.name, entry.get("datatype"), entry.get("shape")
    if type(datatype) is not str or datatype not in spec.sample_shapes:
        raise BadInputError(f"input {name}: the datatype is {quote(datatype)}; the model takes {spec}")
    # True == 1 and 3.0 == 3, so types are compared too.
    if type(shape) is list and all(type(size) is int for size in shape) and spec.accepts(datatype, tuple(shape)):
        return datatype, tuple(shape)
    raise BadInputError(f"input {name}: the shape is {quote(shape)}; the model takes {spec}, at least 1 sample")


def _binary_size(entry: dict[str, Any], name: str) -> int | None:
    """The size of a binary tensor in bytes, or None if the values are in the JSON."""
    parameters = _optional(entry, "parameters", dict, {})
    if parameters.get("shared_memory_region") is not None:
        raise BadInputError(f"input {name}: shared memory is not supported; send the data in the body")
    binary = parameters.get("binary_data_size") is not None
    if binary == (entry.get("data") is not None):
        has = "both `data` and" if binary else "neither `data` nor"
        raise BadInputError(f"input {name} has {has} binary_data_size; send one of them")
    return _non_negative(parameters, "binary_data_size") if binary else None


def render_infer(
    call: InferCall,
    model: str,
    outputs: Mapping[str, NDArray[Any]],
    labels: Sequence[str] | None,
    parameters: dict[str, Any],
) -> tuple[bytes, int | None]:
    """Render the response to a call.

    Args:
        call: The call, whose inputs are not needed.
        model: The model's name.
        outputs: Output name -> array [samples, ...]; with an entry for each requested one.
        labels: One for each class, or None.
        parameters: Parameters of the response, left out if empty.

    Returns:
        The body and its Inference-Header-Content-Length; None if all of it is JSON.

    Raises:
        BadInputError: JSON cannot represent an output that is not binary.
    """
    document: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if call.id:
        document = {"id": call.id, **document}
    if parameters:
        document["parameters"] = parameters
    blobs: list[bytes] = []
    document["outputs"] = [_render_output(output, outputs[output.name], labels, blobs) for output in call.outputs]
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((header, *blobs)), len(header)) if blobs else (header, None)


def _render_output(
    output: RequestedOutput, array: NDArray[Any], labels: Sequence[str] | None, blobs: list[bytes]
) -> dict[str, Any]:
    """The JSON entry of one output, whose values are flat; its bytes, if binary, are appended to `blobs`."""
    datatype = output.datatype
    if output.classification:
        array, datatype = _best_classes(array, output.classification, labels), "BYTES"
    entry: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": array.shape}
    if output.binary:
        blobs.append(to_binary(array, datatype))
        # no other parameters: the C++ client would read them as a binary size
        entry["parameters"] = {"binary_data_size": len(blobs[-1])}
    else:
        entry["data"] = to_json(output.name, array, datatype)  # flat, since the C++ client reads element by element
    return entry


def _best_classes(values: NDArray[Any], most: int, labels: Sequence[str] | None) -> NDArray[Any]:
    """`value:index[:label]` [samples, classes], largest value first; equal values, if all fit, by index."""
    texts = [[f"{row.item(i):f}:{i}{_suffix(labels, i)}" for i in largest(row, most)] for row in values]
    return np.array(texts, object)


def _suffix(labels: Sequence[str] | None, index: int) -> str:
    return f":{labels[index]}" if labels else ""


def _optional(fields: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not kind:  # not isinstance, by which true is an integer
        raise BadInputError(f"`{key}` is {quote(value)}; send {_JSON_NAMES[kind]}")
    return value


def _non_negative(fields: dict[str, Any], key: str) -> int:
    value = _optional(fields, key, int, 0)
    if value < 0:
        raise BadInputError(f"`{key}` is {value}; send 0 or more")
    return value
