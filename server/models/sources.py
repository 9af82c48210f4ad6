"""Where models come from: SPEC of NAME=SPEC, checked and described without loading what takes seconds to import."""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from batchwright.model import Model
from policies.sample_file import read_sample
from policies.types import SpecError
from server.errors import ModelError, WorkerDiedError
from server.models.encoder_spec import PREFIX, EncoderSpec
from server.models.images.codec import emulated_model
from server.models.images.torchvision_names import check_torchvision_name
from server.models.model import ServedModel
from server.models.signature import DTYPES
from server.models.tensors.codec import TensorCodec, check_sample
from server.models.tensors.python_source import one_line_errors
from server.models.tensors.upstream_source import Description, UpstreamModel
from server.models.upstream_spec import is_upstream, upstreams_of
from server.models.weights import is_weights_file
from server.workers.remote_model import RemoteModel, TorchvisionModel, open_model
from server.workers.worker import ModelWorker

ModelAndWorker = tuple[ServedModel[Any], Any]  # with its worker; None of a model of another server


class ModelSource(ABC):
    """The source of one model.

    Attributes:
        spec: SPEC of NAME=SPEC.
        splits: whether the network can be split into stages.
        has_graphs: whether a CUDA device captures its batches as graphs.
        has_lengths: whether service times depend on the lengths of the samples.
        max_batch_size: largest batch of the model itself; None for no limit.
        max_batch_tokens: largest product of batch size and longest length, by the model itself; None for no limit.
        packages: those whose versions change service times, besides this one.
    """

    splits = False
    has_graphs = False
    has_lengths = False
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    packages: tuple[str, ...] = ("torch",)

    def __init__(self, spec: str) -> None:
        self.spec = spec

    @abstractmethod
    def check(self, name: str, weights: str, stages: int | None) -> None:
        """Check what can be checked before the model is loaded on a real device.

        Raises:
            SpecError: the model cannot be loaded.
        """

    @abstractmethod
    def load(self, name: str, weights: str, max_batch_size: int, stages: int) -> ModelAndWorker:
        """Load the model.

        Raises:
            SpecError: it cannot be loaded.
        """

    def emulate(self, name: str, max_batch_size: int) -> ServedModel:
        """The model as an emulated device serves it.

        Raises:
            SpecError: an emulated device cannot serve it.
        """
        return emulated_model(name, max_batch_size)

    def read_sample(self, path: Path) -> Any:
        """Read the sample of a file, for measurements.

        Raises:
            SpecError: the model takes no such samples, or this one does not fit.
        """
        raise SpecError(
            f"--sample is for FILE.py:CLASS, FILE.pt2, FILE.onnx and oip:URL, not for {self.spec}; leave it out"
        )

    def with_sample(self, model: ServedModel[Any], path: Path) -> ServedModel[Any]:
        """The model with the sample of a file in place of synthetic ones; raises as `read_sample`."""
        sample = self.read_sample(path)
        return replace(model, codec=TensorCodec(model.codec.model, [sample]))

    def settings(self, name: str) -> str:
        """Settings that change service times, for a profile's note and its key in the cache."""
        return "" if self.spec == name else self.spec


class TorchvisionSource(ModelSource):
    """A classifier of torchvision by its name there."""

    splits = True
    has_graphs = True
    packages = ("torch", "torchvision")

    def check(self, name: str, weights: str, stages: int | None) -> None:
        """Check that there is such a model."""
        check_torchvision_name(self.spec)

    def load(self, name: str, weights: str, max_batch_size: int, stages: int) -> ModelAndWorker:
        """Load the network with its weights, in a worker."""
        worker = ModelWorker(TorchvisionModel(self.spec, weights, max_batch_size, stages))
        try:
            model: ServedModel[Any] = worker.describe()
        except WorkerDiedError as error:
            raise SpecError(f"{name}: {error} while the network was loaded") from error
        return replace(model, name=name, id=name), worker


class TensorSource(ModelSource):
    """A model of named tensors in a file: FILE.py:CLASS, FILE.pt2 or FILE.onnx."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._file = Path(spec.rpartition(":")[0] if ".py:" in spec else spec).absolute()  # a model may change folders
        self._path = f"{self._file}{spec[spec.rindex(':') :] if '.py:' in spec else ''}"
        if self._file.suffix == ".onnx":
            self.packages = ("onnxruntime", "onnxruntime-gpu")
        self._known: Model | None = None
        self._spare: Model | None = None  # the one above, until a device has it

    def check(self, name: str, weights: str, stages: int | None) -> None:
        """Read the file and its signature."""
        if stages is not None:
            raise SpecError(f"{name} cannot be split into stages; leave out --stages")
        if is_weights_file(weights):
            raise SpecError(f"{name} has its weights in its own file, not in {weights!r}; leave out --weights")
        if self.calls():
            raise SpecError(f"{name} is a pipeline, which has no device; give a model that it calls")

    def calls(self) -> dict[str, int | None]:
        """The models that a pipeline calls, each with its typical number of requests, if known; raises as `make`.

        A model calls none.
        """
        model = self._model()
        return {**dict.fromkeys(model.models), **model.steps} if isinstance(model, RemoteModel) else {}

    def load(self, name: str, weights: str, max_batch_size: int, stages: int) -> ModelAndWorker:
        """Describe a model of its own, which the device loads."""
        self._model()
        model, self._spare = self._spare or self._open(), None
        worker = model.worker if isinstance(model, RemoteModel) else None
        return self._served(name, max_batch_size, self._file.name, self._platform(), model), worker

    def emulate(self, name: str, max_batch_size: int) -> ServedModel:
        """The model's tensors, with synthetic outputs."""
        return self._served(name, max_batch_size, "emulated", "emulated", self._model())

    def read_sample(self, path: Path) -> Any:
        """Read arrays by input name."""
        inputs = self._model().inputs
        return read_sample(path, {name: (DTYPES[each.datatype], each.shape) for name, each in inputs.items()})

    def settings(self, name: str) -> str:
        """The class and a digest of the file; modules that it imports and files that it reads are not included."""
        digest = f"{Path(self.spec).name} {hashlib.sha256(self._file.read_bytes()).hexdigest()[:12]}"
        return f"{digest}, onnxruntime {_version('onnxruntime')}" if self._file.suffix == ".onnx" else digest

    def _open(self) -> Model:
        """The model in a process of its own; raises as `make`."""
        return open_model(self._path)

    def make(self) -> Model:
        """Make the model in this process, without loading it.

        Raises:
            SpecError: the file is missing or invalid.
        """
        if self._file.suffix == ".pt2":
            from server.models.tensors.exported_source import ExportedModel

            return ExportedModel(self._path)
        if self._file.suffix == ".onnx":
            from server.models.tensors.onnx_source import OnnxModel

            return OnnxModel(self._path)
        from server.models.tensors.python_source import load_class, make_model

        return make_model(load_class(self._path), self._path)

    def _platform(self) -> str:
        if self._file.suffix == ".onnx":
            return "onnxruntime"
        return "pytorch" if self._model().torch else "python"

    def _model(self) -> Model:
        """A model for its signature, and for decoding and rendering."""
        if self._known is None:
            self._known = self._spare = self._open()
            self.max_batch_size, self.has_lengths = self._known.max_batch_size, bool(self._known.lengths)
            self.max_batch_tokens = self._known.max_batch_tokens
        return self._known

    def _served(self, name: str, max_batch_size: int, weights: str, platform: str, model: Model) -> ServedModel:
        codec = TensorCodec(model)
        with one_line_errors(f"{self.spec}: samples"):
            given = list(model.samples())
        try:
            samples = [check_sample(sample, codec.signature(0), "samples") for sample in given]
        except ModelError as error:
            raise SpecError(f"{self.spec}: {error}") from error
        if samples:
            codec = TensorCodec(model, samples)
        largest = min(max_batch_size, self.max_batch_size or max_batch_size)
        return ServedModel(name, codec, (), weights, largest, platform)


class EncoderSource(TensorSource):
    """An encoder of Hugging Face: hf:ID_OR_FOLDER[,task=...]."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        parsed = EncoderSpec.parse(spec)
        self._path, self._file = str(parsed), Path(parsed.source)
        self.packages = ("torch", "transformers")

    def settings(self, name: str) -> str:
        """The spec, and a digest of the configuration, on which service times depend."""
        config = self._file / "config.json"
        digest = hashlib.sha256(config.read_bytes()).hexdigest()[:12] if config.is_file() else ""
        return f"{self._path} {digest}".strip()

    def make(self) -> Model:
        """Make the model in this process, without loading it; raises SpecError."""
        from server.models.tensors.encoder_source import EncoderModel

        with one_line_errors(f"{self.spec}: reading the model"):
            return EncoderModel(self._path)

    def _platform(self) -> str:
        return "transformers"


class UpstreamSource(TensorSource):
    """A model of one other server: oip:http://HOST:PORT/MODEL."""

    packages = ()

    def emulate(self, name: str, max_batch_size: int) -> NoReturn:
        """Raise: another server has no emulated device."""
        raise SpecError(f"{name} is a model of another server, which is not emulated; leave out --device")

    def settings(self, name: str) -> str:
        """The URL, and the platform and versions that the server names."""
        return f"{self.spec.removeprefix('oip:')}, {self.description().about}"

    def _open(self) -> Model:
        """The model in this process, which has none of its code."""
        return self.make()

    def make(self) -> UpstreamModel:
        """Make the model, asking the server for its signature.

        Raises:
            SpecError: the server does not answer, has no such model, or the model takes no batches.
        """
        upstream, *others = upstreams_of(self.spec)
        if others:
            raise SpecError(f"{self.spec!r} names {1 + len(others)} servers; name one here")
        return UpstreamModel(upstream)

    def description(self) -> Description:
        """The model as the server describes it; raises as `make`."""
        model = self._model()
        assert isinstance(model, UpstreamModel)
        return model.description

    def _platform(self) -> str:
        return "oip"


class UnsupportedSource(ModelSource):
    """A file or folder that holds no model that can be run by itself: a state dict, or what transformers saves."""

    def check(self, name: str, weights: str, stages: int | None) -> NoReturn:
        """Raise: name what is served instead."""
        raise SpecError(
            f"{name}: {self.spec!r} cannot be served; write a FILE.py:CLASS that loads it, or export the model to "
            "FILE.pt2 or FILE.onnx (docs/your-own-model.md)"
        )

    def load(self, name: str, weights: str, max_batch_size: int, stages: int) -> NoReturn:
        """Raise as `check`."""
        self.check(name, weights, None)

    def emulate(self, name: str, max_batch_size: int) -> NoReturn:
        """Raise as `check`."""
        self.check(name, "", None)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def file_source(spec: str) -> TensorSource:
    """The source of a model of named tensors, by the spec that `open_model` gives a worker."""
    return EncoderSource(spec) if spec.startswith(PREFIX) else TensorSource(spec)


_known: dict[str, ModelSource] = {}  # by spec


def source_of(spec: str) -> ModelSource:
    """The source that SPEC names; the same object for the same spec, so that a file is read once."""
    if spec not in _known:
        _known[spec] = _make_source(spec)
    return _known[spec]


@contextmanager
def read_again(spec: str) -> Iterator[None]:
    """Read the files of SPEC again in the `with` block; if that raises, the source is what it was before."""
    before = _known.pop(spec, None)
    try:
        yield
    except BaseException:
        _known.pop(spec, None)
        if before is not None:
            _known[spec] = before
        raise


def _make_source(spec: str) -> ModelSource:
    if is_upstream(spec):
        return UpstreamSource(spec)
    if spec.startswith(PREFIX):
        return EncoderSource(spec)
    if re.search(r"\.(py:\w*|py|pt2|onnx)$", spec):
        return TensorSource(spec)
    unsupported = r"\.(pt|pth|ckpt|safetensors|h5|keras|pkl|pickle|joblib|tflite|json|py:.*|py)$"
    if re.search(unsupported, spec, re.IGNORECASE) or _is_path(spec):
        return UnsupportedSource(spec)
    return TorchvisionSource(spec)


def _is_path(spec: str) -> bool:
    """Whether this is the path of a file or a folder.

    A name with neither a slash nor a suffix is that of a torchvision model, even if there is such a file.
    """
    return "/" in spec or ("." in spec and os.path.exists(spec))
