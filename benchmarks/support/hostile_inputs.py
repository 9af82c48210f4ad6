"""Hostile inputs of the tensor protocol and the image codec: valid calls that were damaged, drawn by hypothesis.

`judge` checks the result of each. tests/server/api/open_inference/test_protocol_fuzz.py is the short run,
benchmarks/fuzz.py the long one.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from hypothesis import strategies as st
from PIL import Image

from server.api.open_inference.documents import parse_index_request
from server.api.open_inference.protocol import InferCall, parse_header_length, parse_infer, render_infer
from server.errors import ServerError, render_error
from server.models.images.codec import ImageCodec
from server.models.signature import RAW, Signature, Tensor, TensorSpec
from server.transport.content_encoding import compress, decompress
from server.transport.request import client_timeout

_NUMBERS = ["UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64"]
SPEC = TensorSpec("image", {"UINT8": (2, 2, 3), "BYTES": (), "BOOL": (3,), **dict.fromkeys(_NUMBERS, (2,))})
OUTPUTS = ("logits", "features")
SIGNATURE = Signature((SPEC,), tuple(TensorSpec(name, {"FP32": (-1,)}) for name in OUTPUTS))
MOST_SAMPLES, MOST_BYTES, CLASSES = 64, 1 << 16, 5
_ITEM_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "BF16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("UINT", "INT", "FP") for bits in (16, 32, 64)
}
_CODEC = ImageCodec(8, 8, 9)


class Case(NamedTuple):
    """One input: the name of the function to call, and its arguments."""

    target: str
    arguments: tuple[Any, ...]


# Text between these marks is written verbatim, since json.dumps cannot produce it.
_MARK = "@@"
_UNWRITABLE = [
    *("1e400", "-1e400", "1" * 400, "-0", "01", "+1", "0x10", "1.", "tru", "[1,]", '{"a":1,"a":2}', "{,}"),
    *(
        "[" * 1100,
        "[" * 900 + "]" * 900,
        '{"a":' * 500 + "1" + "}" * 500,
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\t"',
        "//",
    ),
]
_ODD_LEAVES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        63,
        64,
        65,
        2**31,
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
    ),
    *(-(2**63) - 1, 10**30, 0.0, -0.0, 1.0, 2.5, 1e308, float("nan"), float("inf"), float("-inf"), "", "0", "x", "\0"),
    *("\n", "\u2028", "\ud800", "a" * 300),
    *("image", "logits", "features", "RAW", "UINT8", "BYTES", "FP32", "FP16", "bytes"),
    *(f"{_MARK}{text}{_MARK}" for text in _UNWRITABLE),
]
ODD: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(_ODD_LEAVES) | st.text(max_size=4) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_SHAPES = st.lists(
    st.sampled_from([0, 1, 2, 3, 64, 65, -1, 2**31, 2**62, 2**63, 10**12, 1.0, True, None, "1"]), max_size=5
)
_PARAMETERS = [
    *("binary_data_size", "shared_memory_region", "binary_data", "classification", "timeout", "binary_data_output"),
    *("priority", "sequence_id", "triton_x", "headers"),
]
_FIELDS = ["name", "shape", "datatype", "data", "parameters"]


def _values(datatype: str, count: int) -> list[Any]:
    if datatype == "BYTES":
        return ["x"] * count
    return [datatype == "BOOL" or 1] * count


def _tensor(datatype: str, count: int) -> bytes:
    return b"\3\0\0\0abc" * count if datatype == "BYTES" else b"\1" * (_ITEM_BYTES[datatype] * count)


@st.composite
def good_calls(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A call that is right in every respect, but may ask for anything allowed."""
    datatype = draw(st.sampled_from([*SPEC.sample_shapes]))
    samples = draw(st.integers(1, 3))
    shape = [samples, *SPEC.sample_shapes[datatype]]
    entry: dict[str, Any] = {"name": "image", "shape": shape, "datatype": datatype}
    count = int(np.prod(shape))
    blob = b""
    if datatype in ("FP16", "BF16") or draw(st.booleans()):
        blob = _tensor(datatype, count)
        entry["parameters"] = {"binary_data_size": len(blob)}
    else:
        flat = _values(datatype, count)
        entry["data"] = np.reshape(flat, shape).tolist() if draw(st.booleans()) else flat
    document: dict[str, Any] = {"inputs": [entry]}
    if draw(st.booleans()):
        chosen = {"binary_data": draw(st.booleans()), "classification": draw(st.sampled_from([0, 1, 2, CLASSES, 99]))}
        document["outputs"] = [{"name": name, "parameters": chosen} for name in draw(st.permutations(OUTPUTS))]
    if draw(st.booleans()):
        document |= {"id": draw(st.text(max_size=5)), "parameters": {"timeout": draw(st.integers(0, 2**64 - 1))}}
    return document, blob


def _falsify(draw: st.DrawFn, document: dict[str, Any]) -> None:
    """Replace one value of the document."""
    entry = document["inputs"][0]
    outputs = document.get("outputs") or [{"name": "logits"}]
    place = draw(st.sampled_from(["document", "entry", "shape", "data", "input's", "output", "output's", "top"]))
    match place:
        case "document":
            document[draw(st.sampled_from(["id", "parameters", "inputs", "outputs"]))] = draw(ODD)
        case "entry":
            entry[draw(st.sampled_from(_FIELDS))] = draw(ODD)
        case "shape":
            entry["shape"] = draw(_SHAPES)
        case "data":
            entry["data"] = [draw(ODD), *_values("UINT8", draw(st.integers(0, 12)))]
        case "input's":
            entry["parameters"] = {draw(st.sampled_from(_PARAMETERS)): draw(ODD)}
        case "output":
            document["outputs"] = [*outputs, draw(ODD)]
        case "output's":
            document["outputs"] = [outputs[0] | {"parameters": {draw(st.sampled_from(_PARAMETERS)): draw(ODD)}}]
        case _:
            document["parameters"] = {draw(st.sampled_from(_PARAMETERS)): draw(ODD)}


def _written(document: Any) -> bytes:
    """JSON with NaN, lone surrogates, and the text between marks verbatim."""
    text = json.dumps(document)
    for raw in _UNWRITABLE:
        text = text.replace(json.dumps(f"{_MARK}{raw}{_MARK}"), raw)
    return text.encode()


def _twice(header: bytes, key: str, value: bytes) -> bytes:
    """The header with one key twice, the second value in front."""
    name = b'"%s":' % key.encode()
    return header.replace(name, name + value + b"," + name, 1)


def _damage(draw: st.DrawFn, body: bytes) -> bytes:
    """Replace, remove, insert or repeat a few bytes, or cut the end."""
    damaged = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(damaged)))
        stop = draw(st.integers(start, min(start + 9, len(damaged))))
        filling = draw(
            st.sampled_from([b"", b"\0", b"\xff\xff\xff\xff", b'"', b"[", b"}", b"1e999", bytes(damaged[:9])])
        )
        damaged[start:stop] = filling if draw(st.booleans()) else draw(st.binary(max_size=6))
    return bytes(damaged[: draw(st.integers(0, len(damaged)))] if draw(st.integers(0, 5)) == 0 else damaged)


@st.composite
def infer_cases(draw: st.DrawFn) -> Case:
    """A call with up to three replaced values, and possibly damaged bytes and a wrong length."""
    document, blob = draw(good_calls())
    for _ in range(draw(st.integers(0, 3))):
        if not (isinstance(document.get("inputs"), list) and isinstance(document.get("outputs", []), list | None)):
            break
        if not document["inputs"] or not isinstance(document["inputs"][0], dict):
            break
        if document.get("outputs") and not isinstance(document["outputs"][0], dict):
            break
        _falsify(draw, document)
    header = _written(document)
    if draw(st.integers(0, 9)) == 0:
        header = _twice(header, draw(st.sampled_from(_FIELDS)), _written(draw(ODD)))
    length: int | None = len(header) if blob or draw(st.booleans()) else None
    body = header + blob
    if draw(st.integers(0, 3)) == 0:
        body = _damage(draw, body)
    if draw(st.integers(0, 9)) == 0:
        length = draw(st.none() | st.integers(0, len(body) + 2) | st.just(10**18))
    return Case("infer", (body, length))


@st.composite
def elements(draw: st.DrawFn) -> Case:
    """BYTES tensors whose elements have wrong lengths."""
    parts = draw(st.lists(st.tuples(st.integers(0, 2**32 - 1) | st.integers(0, 6), st.binary(max_size=6)), max_size=5))
    honest = draw(st.booleans())
    blob = b"".join((len(part) if honest else size).to_bytes(4, "little") + part for size, part in parts)
    samples = draw(st.sampled_from([len(parts), 1, 2, 64, 65, 10**12, 2**64 - 1]))
    size = draw(st.sampled_from([len(blob), len(blob) + 1, 0, 10**12]) if draw(st.booleans()) else st.just(len(blob)))
    entry = {"name": "image", "shape": [samples], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    header = _written({"inputs": [entry]})
    return Case("infer", (header + blob, len(header)))


def _image(mode: str, format_: str, **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).convert(mode).save(buffer, format_, **options)
    return buffer.getvalue()


IMAGES = [
    *(_image(mode, "JPEG") for mode in ("RGB", "L", "CMYK")),
    *(_image(mode, "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
    _image("RGB", "JPEG", progressive=True),
    *(_image("RGB", format_) for format_ in ("GIF", "BMP", "TIFF", "WEBP")),
]
_PACKED = [(name, pack(b'{"inputs":[]}' * 50)) for name, pack in (("gzip", gzip.compress), ("deflate", zlib.compress))]
_PACKED += [("gzip", gzip.compress(bytes(MOST_BYTES + 1))), ("gzip", gzip.compress(b"") * 3), ("deflate", b"\x78\x9c")]
_ENCODINGS = st.none() | st.sampled_from(
    ["gzip", "deflate", "identity", "br", "", "gzip, gzip", "x-x-gzip", "GZIP", "*"]
)
_HEADERS = st.sampled_from(
    ["0", "1", "-1", " 7 ", "1e3", "9" * 18, "9" * 19, "9" * 5000, "٣", "²", "0x1", "nan", "inf", ""]
)
_WEIGHTS = st.lists(
    st.sampled_from(["gzip", "deflate;q=0.5", "*", "gzip;q=nan", "gzip;q=", ";;", "br;q=1e999"]), max_size=4
)


@st.composite
def images(draw: st.DrawFn) -> Case:
    """A damaged image."""
    return Case("picture", (_damage(draw, draw(st.sampled_from(IMAGES))),))


@st.composite
def packed(draw: st.DrawFn) -> Case:
    """A compressed body, damaged or with another content encoding."""
    name, body = draw(st.sampled_from(_PACKED))
    encoding = name if draw(st.booleans()) else draw(_ENCODINGS | st.text(max_size=9))
    return Case("decompress", (_damage(draw, body) if draw(st.booleans()) else body, encoding))


CASES: st.SearchStrategy[Case] = st.one_of(
    infer_cases(),
    infer_cases(),
    infer_cases(),
    elements(),
    images(),
    packed(),
    st.builds(
        lambda body, length: Case("infer", (body, length)), st.binary(max_size=300), st.none() | st.integers(0, 300)
    ),
    st.builds(lambda value: Case("infer", (_written(value), None)), ODD),
    st.builds(lambda text: Case("length", (text.encode(),)), _HEADERS | st.text(max_size=30)),
    st.builds(lambda text: Case("timeout", (text,)), _HEADERS | st.text(max_size=30)),
    st.builds(lambda items: Case("compress", (",".join(items),)), _WEIGHTS | st.lists(st.text(max_size=5), max_size=3)),
    st.builds(lambda body: Case("index", (body,)), st.builds(_written, ODD) | st.binary(max_size=30)),
)


def _infer(body: bytes, length: int | None) -> None:
    call = parse_infer(body, length, SIGNATURE, MOST_SAMPLES)
    _check_call(call)
    if call.tensors[SPEC.name].datatype in ("BYTES", RAW):
        _read_images(call.tensors[SPEC.name])


def _check_call(call: InferCall) -> None:
    """Check that an accepted call fits the model and can be answered."""
    tensor = call.tensors[SPEC.name]
    assert call.timeout is None or 0 < call.timeout < float("inf")
    assert 0 < len({output.name for output in call.outputs}) == len(call.outputs)
    assert {output.name for output in call.outputs} <= {*OUTPUTS}
    assert 1 <= tensor.shape[0] <= MOST_SAMPLES
    if isinstance(tensor.data, list):
        assert len(tensor.data) == np.prod(tensor.shape)
        assert {*map(type, tensor.data)} == {bytes}
    elif tensor.datatype == RAW:
        assert tensor.shape == (1,)
    else:
        assert tensor.shape == np.shape(tensor.elements) == (tensor.shape[0], *SPEC.sample_shapes[tensor.datatype])
    answers = {name: np.zeros((tensor.shape[0], CLASSES), np.float32) for name in OUTPUTS}
    body, length = render_infer(call, "m", answers, None, {"batch_size": 1})
    written = orjson.loads(body[:length])
    assert written.get("id", "") == call.id
    blobs = [output.get("parameters", {}).get("binary_data_size", 0) for output in written["outputs"]]
    assert sum(blobs) == (0 if length is None else len(body) - length)


def _read_raw(data: bytes) -> None:
    _read_images(Tensor("image", RAW, (1,), [data]))


def _read_images(tensor: Tensor) -> None:
    inputs = _CODEC.from_tensors({SPEC.name: tensor})
    decoded = [_CODEC.decode(data, _CODEC.decode_cost(data)) for data in inputs.encoded]
    assert {sample.shape for sample in (*decoded, *inputs.read())} == {_CODEC.shape}


def _length(text: bytes) -> None:
    found = parse_header_length(text)
    assert found is not None
    assert found >= 0


def _timeout(text: str) -> None:
    assert 0 < client_timeout({b"x-timeout-ms": text.encode(errors="surrogatepass")}) < float("inf")


def _decompress(body: bytes, encoding: str | None) -> None:
    assert len(decompress(body, encoding, MOST_BYTES)) <= MOST_BYTES


def _compress(accepted: str) -> None:
    body = b"x" * 2000
    packed_, encoding = compress(body, accepted)
    assert decompress(packed_, encoding, len(body)) == body


def _index(body: bytes) -> None:
    assert parse_index_request(body) in (True, False)


_TARGETS: Mapping[str, Callable[..., None]] = {
    "infer": _infer,
    "picture": _read_raw,
    "length": _length,
    "timeout": _timeout,
    "decompress": _decompress,
    "compress": _compress,
    "index": _index,
}


def judge(case: Case) -> str:
    """The outcome of a case: `accepted`, or the name of the client error.

    Raises:
        AssertionError: the answer is not consistent, or the message is not one short line.
        Exception: any other exception of the function.
    """
    try:
        _TARGETS[case.target](*case.arguments)
    except ServerError as error:
        _check_error(error.status, str(error))
        return type(error).__name__
    return "accepted"


def _check_error(status: int, message: str) -> None:
    assert 400 <= status < 500, message
    assert 0 < len(message) < 600, len(message)
    assert len(message.splitlines()) == 1, message
    assert orjson.loads(render_error(message))["error"]
