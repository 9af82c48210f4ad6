"""The codec of models of named tensors: users' classes, exported programs and ONNX files."""

import json
import logging
import math
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from batchwright.model import Answer, Kept, Model
from batchwright.model import Tensor as TensorType
from policies.sample_file import checked_array
from policies.types import SpecError
from server.errors import BadInputError, ModelError, one_line, quote
from server.json_body import parse_object
from server.models.form import MAX_EXAMPLE, Form, FormField
from server.models.model import Codec, Decoded, Inputs
from server.models.signature import DTYPES, RAW, Signature, Tensor, TensorSpec
from server.models.tensors.data import as_array, from_binary, from_json, to_lists

Sample = Mapping[str, NDArray[Any]]  # one sample: array by input name, without the batch dimension

_log = logging.getLogger("batchwright.model")
_MANY_NUMBERS = 20_000  # rendering more takes over a millisecond
_VARYING = 16  # size of a dimension that varies, in synthetic samples of a model without lengths
_LARGEST_INTEGER = 100  # in synthetic samples


class TensorCodec(Codec):
    """Arrays by input name, one set per sample; arrays by output name as output.

    Attributes:
        model: the model, whose own `decode` and `render` are used.
    """

    def __init__(self, model: Model, samples: Sequence[Sample] = ()) -> None:
        """Read and render for this model; `samples` replace the synthetic ones."""
        self.model = model
        self._signature = Signature(_specs(model.inputs), _specs(model.outputs))
        self._samples = samples
        self._axes = {name: each.shape.index(-1) for name, each in model.inputs.items() if each.pad is not None}
        self.max_batch_tokens = model.max_batch_tokens
        own = {name for name in ("decode", "render") if getattr(type(model), name) is not getattr(Model, name)}
        self._decodes, self._renders = "decode" in own, "render" in own
        self._varies_in_shape = any(
            -1 in tensor.shape for name, tensor in model.inputs.items() if name not in self._axes
        )

    @property
    def json_body(self) -> bool:
        """Whether the model has no `decode` of its own."""
        return not self._decodes

    def signature(self, _: int) -> Signature:
        """The tensors of the model."""
        return self._signature

    def from_body(self, body: bytes, content_type: str) -> Inputs:
        """Read {"inputs": {name: nested lists}} of one sample or a list of them, or what the model's `decode` reads."""
        decoded = Decoded()
        if self._decodes:
            read = partial(self._decode, body, content_type, decoded)
            return Inputs(1, read, memory=len(body), runs_user_code=True, decoded=decoded)
        document = parse_object(body, "body", 'an object with "inputs"')
        values = document.get("inputs")
        decoded.several = type(values) is list
        given: list[Any] = values if type(values) is list else [values]
        wanted = f'send {{"inputs": {{...}}}} with {", ".join(self.model.inputs)}'
        if len(document) > 1 or not given or any(type(each) is not dict for each in given):
            raise BadInputError(f"the body is {quote(document)}; {wanted}, or a list of such objects")
        samples = [self._from_object(each, wanted) for each in given]
        return Inputs(len(samples), lambda: samples, decoded=decoded)

    def _from_object(self, values: Mapping[str, Any], wanted: str) -> Sample:
        if values.keys() != self.model.inputs.keys():
            found = (("missing", self.model.inputs.keys() - values), ("unknown", values.keys() - self.model.inputs))
            said = " and ".join(f"{kind}: {quote(', '.join(sorted(names)))}" for kind, names in found if names)
            raise BadInputError(f"inputs {said}; {wanted}")
        sample = {spec.name: _from_lists(spec, values[spec.name]) for spec in self._signature.inputs}
        self._check_length(sample)
        return sample

    def from_bodies(self, bodies: Sequence[tuple[bytes, str]]) -> Inputs:
        """Read one sample from each body, with its content type, by the model's own `decode`."""
        memory = sum(len(body) for body, _ in bodies)
        return Inputs(len(bodies), partial(self._decode_each, bodies), memory=memory, runs_user_code=True)

    def _decode(self, body: bytes, content_type: str, decoded: Decoded) -> list[Sample]:
        """Decode a body by the model's own function, on a thread of the pool; `decoded` gets all but the samples.

        Raises:
            BadInputError: the function raised ValueError, or a sample is too long.
            ModelError: it raised anything else, or returned what does not fit the model's inputs.
        """
        with self._decode_errors():
            found: Any = self.model.decode(body, content_type)
            if not isinstance(found, Decoded):
                found = read_decoded(found, self._signature)
        decoded.several, decoded.kept, decoded.answer = found.several, found.kept, found.answer
        return self._checked(found.samples)

    def _decode_each(self, bodies: Sequence[tuple[bytes, str]]) -> list[Sample]:
        """Decode one sample from each body, in one call of the worker; raises as `_decode`."""
        with self._decode_errors():
            decode_each = getattr(self.model, "decode_each", None)
            samples = decode_each(bodies) if decode_each else decode_bodies(self.model, bodies, self._signature)
        return self._checked(samples)

    @contextmanager
    def _decode_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise BadInputError(f"the model cannot decode the body: {one_line(error)}") from error
        except ModelError:
            raise
        except BaseException as error:
            _log.exception("decode of the model %s failed", type(self.model).__name__)
            raise ModelError(f"decode of the model failed with {type(error).__name__}") from error

    def _checked(self, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            self._check_length(sample)
        return samples

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """One sample per row of the tensors; a raw body is the bytes of one sample of the only input."""
        first = next(iter(tensors.values()))
        if first.datatype == RAW:
            assert isinstance(first.data, bytes | memoryview)
            sample = {first.name: _from_raw(self._signature.inputs[0], first.data)}
            self._check_length(sample)
            return Inputs(1, lambda: [sample])
        arrays = {name: as_array(tensor.elements, tensor.shape) for name, tensor in tensors.items()}
        count = first.shape[0]
        if self._axes:
            self._check_length({name: array[0] for name, array in arrays.items()})  # the same for all rows

        def read() -> list[Sample]:
            return [{name: array[row, ...] for name, array in arrays.items()} for row in range(count)]

        return Inputs(count, read)

    @property
    def varies_in_shape(self) -> bool:
        """Whether a dimension of an input that is not padded varies."""
        return self._varies_in_shape

    def shape_of(self, sample: Sample) -> str:
        """The shapes of the sample's inputs that are not padded; empty where they do not vary."""
        if not self._varies_in_shape:
            return ""
        return ",".join("x".join(map(str, sample[name].shape)) for name in self.model.inputs if name not in self._axes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The model's own."""
        return tuple(self.model.lengths)

    @property
    def synthetic_length_note(self) -> str:
        """The middle one of the model's lengths."""
        return f"length {self.middle_length or _VARYING}"

    def length_of(self, sample: Sample) -> int:
        """The length of the padded dimension of a sample; 0 for a model without lengths."""
        if not self.model.lengths:
            return 0
        name, axis = next(iter(self._axes.items()))
        return int(sample[name].shape[axis])

    def metadata_parameters(self) -> dict[str, Any]:
        """The largest length."""
        return {"max_length": self.lengths[-1]} if self.lengths else {}

    def _check_length(self, sample: Sample) -> None:
        """Check the lengths of the padded inputs.

        Raises:
            BadInputError: one is over the largest length.
        """
        for name, axis in self._axes.items():
            if sample[name].shape[axis] > self.lengths[-1]:
                raise BadInputError(
                    f"input {name} has the length {sample[name].shape[axis]}, over the maximum {self.lengths[-1]}; "
                    "send a shorter one"
                )

    @property
    def renders_by_user_code(self) -> bool:
        """Whether the model has a `render` of its own."""
        return self._renders

    def renders_slowly(self, output: Any) -> bool:
        """Whether the outputs are many numbers."""
        numbers: int = sum([array.size for array in output.values()])
        return numbers > _MANY_NUMBERS

    def render(self, output: Any, _labels: Sequence[str], kept: bytes | None = None) -> dict[str, Any]:
        """The outputs of a sample as nested lists, or what the model's own `render` returns.

        Raises:
            BadInputError: JSON cannot represent an output.
            ModelError: the model's own function raised, or returned what is no JSON.
        """
        if not self._renders:
            specs = self._signature.outputs
            return {"outputs": {each.name: to_lists(each.name, output[each.name], each.datatype) for each in specs}}
        try:
            render: Any = self.model.render
            return {"outputs": as_json(render(output) if kept is None else render(output, kept))}
        except ModelError:
            raise
        except BaseException as error:
            _log.exception("render of the model %s failed", type(self.model).__name__)
            raise ModelError(f"render of the model failed with {type(error).__name__}") from error

    def stack(self, outputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """The outputs of all samples as tensors by output name.

        Raises:
            BadInputError: the samples' outputs have different shapes, so that no tensor holds them all.
        """
        try:
            if len(outputs) == 1:
                return {name: array[None] for name, array in outputs[0].items()}
            return {spec.name: np.stack([output[spec.name] for output in outputs]) for spec in self._signature.outputs}
        except ValueError as error:
            raise BadInputError("the outputs of the call's samples have different shapes; send one a call") from error

    def emulate(self, sample: Sample) -> dict[str, NDArray[Any]]:
        """Outputs made from a checksum of the sample; dimensions that vary have the size 1."""
        checksum = 0
        for name in self.model.inputs:
            array = sample[name]
            content = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
            checksum = zlib.crc32(content, checksum)
        return {spec.name: _synthetic_output(spec, checksum) for spec in self._signature.outputs}

    def synthetic_samples(self, count: int, rng: np.random.Generator, length: int | None = None) -> list[Any]:
        """The samples given, with padded inputs cut or repeated to the length, or random ones.

        Dimensions that vary have the length as their size; by default it is the middle one of the model's, or 16.
        """
        length = length or self.middle_length or _VARYING
        if not self._samples:
            return [{spec.name: _random(spec, rng, length) for spec in self._signature.inputs} for _ in range(count)]
        return [self._resized(self._samples[index % len(self._samples)], length) for index in range(count)]

    def _resized(self, sample: Sample, length: int) -> Sample:
        return {
            name: array.take(range(length), self._axes[name], mode="wrap") if name in self._axes else array
            for name, array in sample.items()
        }

    def form(self) -> Form:
        """A field for each input, or a file for the model's own `decode`; the examples are random."""
        outputs = {} if self._renders else {spec.name: spec.datatype for spec in self._signature.outputs}
        if self._decodes:
            return Form((FormField("sample", "file", "for the model's own decode", "sample.bin"),), outputs=outputs)
        rng = np.random.default_rng(0)
        fields = tuple(_form_field(spec, rng, self.middle_length or _VARYING) for spec in self._signature.inputs)
        return Form(fields, "inputs", outputs)


def check_sample(sample: Any, signature: Signature, origin: str) -> Sample:
    """Return a sample made by a user's code or file, as arrays of the inputs' datatypes.

    Args:
        sample: arrays, or nested lists, by input name.
        signature: the model's inputs and outputs.
        origin: where the sample is from, for the error message.

    Raises:
        ModelError: it does not fit the inputs.
    """
    names = [spec.name for spec in signature.inputs]
    if not isinstance(sample, Mapping) or sample.keys() != set(names):
        found = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ModelError(f"{origin} gives {found}; it has to give a value by name for {', '.join(names)}")
    try:
        return {
            spec.name: checked_array(
                sample[spec.name], DTYPES[spec.datatype], spec.sample_shape, f"{origin}: input {spec.name}"
            )
            for spec in signature.inputs
        }
    except SpecError as error:
        raise ModelError(str(error)) from error


def read_decoded(found: Any, signature: Signature) -> Decoded:
    """What the `decode` of a user's model returned.

    Raises:
        ModelError: a sample does not fit the inputs of the signature.
        Exception: a value is no JSON, or cannot be pickled.
    """
    if isinstance(found, Answer):
        return Decoded(answer=Answer(as_json(found.outputs)))
    kept = None
    if isinstance(found, Kept):
        found, kept = found.samples, pickle.dumps(found.value)
    several = isinstance(found, list | tuple)
    samples = [check_sample(each, signature, "decode") for each in (found if several else [found])]
    return Decoded(samples, several, kept)


def decode_bodies(model: Model, bodies: Sequence[tuple[bytes, str]], signature: Signature) -> list[Sample]:
    """Decode one sample from each body, with its content type; raises as `read_decoded`, and what `decode` raises."""
    samples = []
    for body, content_type in bodies:
        found = read_decoded(model.decode(body, content_type), signature)
        if found.several or found.answer is not None:
            raise ModelError("decode gives several samples, or an answer, for one text; it has to give one sample")
        samples += found.samples
    return samples


def as_json(rendered: Any) -> Any:
    """What a model's `render` returned, as JSON has it.

    Raises:
        ModelError: a number of it is not finite.
        TypeError: it is no JSON.
    """
    document = orjson.dumps(rendered, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in document:
        _check_finite(rendered)
    return orjson.loads(document)


def _check_finite(rendered: Any) -> None:
    """Check what a model's `render` returned, since orjson writes null for NaN and infinities.

    Raises:
        ModelError: a number of it is not finite.
    """
    if is_dataclass(rendered):
        rendered = [getattr(rendered, field.name) for field in fields(rendered)]
    elif isinstance(rendered, Mapping):
        rendered = list(rendered.values())
    if isinstance(rendered, list | tuple):
        for each in rendered:
            _check_finite(each)
    elif isinstance(rendered, float | np.floating | np.ndarray) and not np.isfinite(rendered).all():
        raise ModelError("render of the model returned NaN or infinity, which JSON does not have")


def _specs(tensors: Mapping[str, TensorType]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, {tensor.datatype: tensor.shape}) for name, tensor in tensors.items())


def _from_lists(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """One sample of an input from nested lists, whose shape is that of the lists.

    Raises:
        BadInputError: the value does not fit the input.
    """
    shape: list[int] = []
    inner = value
    for _ in spec.sample_shape:
        if type(inner) is not list:
            break
        shape.append(len(inner))
        inner = inner[0] if inner else None
    if not spec.accepts(spec.datatype, (1, *shape)):
        expected = f"one sample of `{spec.name}`, {spec.datatype} {list(spec.sample_shape)}, as nested lists"
        raise BadInputError(f"input {spec.name} is {quote(value)}; send {expected}")
    (sample,) = as_array(from_json([value], spec.datatype, (1, *shape)), (1, *shape))
    return np.asarray(sample, DTYPES[spec.datatype])


def _from_raw(spec: TensorSpec, body: bytes | memoryview) -> NDArray[Any]:
    """One sample of an input from its bytes; one dimension may vary.

    Raises:
        BadInputError: the bytes do not fit the input.
    """
    dtype, shape = DTYPES[spec.datatype], spec.sample_shape
    if spec.datatype == "BYTES" and math.prod(shape) in (1, -1):
        array = np.empty((1,) * len(shape), object)
        array[...] = bytes(body)
        return array
    itemsize = 2 if spec.datatype == "BF16" else dtype.itemsize
    known = itemsize * math.prod(size for size in shape if size > 0)
    if spec.datatype == "BYTES" or shape.count(-1) > 1 or len(body) % known:
        raise BadInputError(
            f"a raw body of {len(body)} bytes is not one sample of {spec}; send JSON or a binary tensor"
        )
    found = (1, *(size if size > 0 else len(body) // known for size in shape))
    (sample,) = as_array(from_binary(body, 0, spec.datatype, found), found)
    return np.asarray(sample, dtype)


def _synthetic_output(spec: TensorSpec, checksum: int) -> NDArray[Any]:
    """An output of the right shape and datatype: numbers that count up from a checksum."""
    shape, dtype = [max(1, size) for size in spec.sample_shape], DTYPES[spec.datatype]
    numbers = (np.arange(math.prod(shape)) + checksum) % _LARGEST_INTEGER
    if dtype.kind == "f":
        return (numbers / _LARGEST_INTEGER + checksum % 9973).astype(dtype).reshape(shape)
    if dtype.hasobject:
        return np.array([b"%d %08x" % (number, checksum) for number in numbers], object).reshape(shape)
    return (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype).reshape(shape)


def _random(spec: TensorSpec, rng: np.random.Generator, varying: int) -> NDArray[Any]:
    shape = tuple(varying if size == -1 else size for size in spec.sample_shape)
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    numbers = rng.integers(0, 2 if dtype.kind == "b" else _LARGEST_INTEGER, shape)
    if not dtype.hasobject:
        return np.asarray(numbers).astype(dtype)
    texts = np.empty(shape, object)
    texts[...] = np.vectorize(lambda number: b"%d" % number, otypes=[object])(numbers)
    return texts


def _form_field(spec: TensorSpec, rng: np.random.Generator, varying: int) -> FormField:
    """The field of an input, with a random example; a large one is a short value, since bodies are limited."""
    note = f"{spec.datatype} {[*spec.sample_shape]}"
    shape = tuple(varying if size == -1 else size for size in spec.sample_shape)
    if math.prod(shape) > MAX_EXAMPLE:
        return FormField(spec.name, "json", note, {"BOOL": "true", "BYTES": '"1"'}.get(spec.datatype, "1"), shape)
    if all(size == 1 for size in spec.sample_shape) and spec.datatype != "BOOL":
        value = _example(TensorSpec(spec.name, {spec.datatype: ()}), rng, varying)
        control: Literal["text", "number"] = "text" if spec.datatype == "BYTES" else "number"
        return FormField(spec.name, control, note, str(value), shape)
    return FormField(spec.name, "json", note, json.dumps(_example(spec, rng, varying)))


def _example(spec: TensorSpec, rng: np.random.Generator, varying: int) -> Any:
    """A random value of an input, as nested lists; numbers have two decimal places."""
    array = _random(spec, rng, varying)
    rounded = array.astype(DTYPES["FP64"]).round(2) if array.dtype.kind == "f" else array
    return to_lists(spec.name, rounded, "FP64" if rounded is not array else spec.datatype)
