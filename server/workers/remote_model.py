"""What workers serve, and the model of a file as the main process sees it.

Of that it has the signature; `decode` and `render` are called in the model's worker.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from batchwright.model import Model, Tensor
from batchwright.pipeline import Pipeline
from policies.types import SpecError
from server.errors import WorkerDiedError
from server.workers.worker import ModelWorker


@dataclass(frozen=True)
class FileModel:
    """The model of a file.

    Attributes:
        spec: FILE.py:CLASS, FILE.pt2 or FILE.onnx, with an absolute path, or hf:ID_OR_FOLDER.
    """

    spec: str

    def __str__(self) -> str:
        """The file's name, and the class."""
        return os.path.basename(self.spec)

    @property
    def needs_torch(self) -> bool:
        """Whether it is known to."""
        return self.spec.endswith(".pt2") or self.spec.startswith("hf:")


@dataclass(frozen=True)
class TorchvisionModel:
    """A model of torchvision; see `load_image_model`."""

    name: str
    weights: str
    max_batch_size: int
    stages: int
    needs_torch: ClassVar[bool] = True

    def __str__(self) -> str:
        """Its name."""
        return self.name


@dataclass(frozen=True)
class Description:
    """What the main process knows of a model.

    Attributes:
        name: of its class.
        members: the class attributes of `Model`.
        own: which of `decode` and `render` it has.
        samples: as it returns them.
    """

    name: str
    members: Mapping[str, Any]
    own: frozenset[str]
    samples: Sequence[Mapping[str, Any]]


def describe(model: Model, samples: Sequence[Mapping[str, Any]]) -> Description:
    """Describe a model, in its worker; `samples` are its own."""
    members = {name: getattr(model, name) for name in ("max_batch_size", "max_batch_tokens", "torch", "task")}
    members |= {
        name: {key: _plain(each) for key, each in getattr(model, name).items()} for name in ("inputs", "outputs")
    }
    members |= {name: tuple(getattr(model, name)) for name in ("lengths", "dimensions")}
    if isinstance(model, Pipeline):
        members |= {"models": tuple(model.models), "steps": dict(model.steps)}
    own = frozenset(name for name in ("decode", "render") if getattr(type(model), name) is not getattr(Model, name))
    return Description(type(model).__name__, members, own, samples)


def _plain(tensor: Tensor) -> Tensor:
    return Tensor(tensor.datatype, tensor.shape, tensor.pad)


class RemoteModel(Model):
    """A model in a worker; its class has the attributes of the model's.

    Attributes:
        worker: the worker.
        models: of a pipeline, the names of those that it calls; none of a model.
        steps: of a pipeline, typical numbers of requests of these in a call.
    """

    models: tuple[str, ...] = ()
    steps: Mapping[str, int] = MappingProxyType({})

    def __init__(self, worker: ModelWorker, samples: Sequence[Mapping[str, Any]]) -> None:
        self.worker = worker
        self._samples = samples

    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Those that the model returned at its start."""
        return self._samples


def _decode(self: RemoteModel, body: bytes, content_type: str) -> Any:
    return self.worker.call("decode", bytes(body), content_type)


def _decode_each(self: RemoteModel, bodies: Sequence[tuple[bytes, str]]) -> Any:
    return self.worker.call("decode_each", bodies)


def _render(self: RemoteModel, outputs: Mapping[str, Any], *kept: bytes) -> Any:
    return self.worker.call("render", dict(outputs), *kept)


_OWN: Mapping[str, Mapping[str, Any]] = {
    "decode": {"decode": _decode, "decode_each": _decode_each},
    "render": {"render": _render},
}


def open_model(spec: str) -> RemoteModel:
    """Start the worker of FILE.py:CLASS, FILE.pt2, FILE.onnx or hf:FOLDER, by absolute paths, and describe the model.

    Raises:
        SpecError: the file is missing or invalid, or the process ended while it was read.
    """
    worker = ModelWorker(FileModel(spec))
    try:
        described: Description = worker.describe()
    except WorkerDiedError as error:
        raise SpecError(f"{spec}: {error} while the file was read") from error
    members = dict(described.members)
    for name in described.own:
        members.update(_OWN[name])
    kind: type[RemoteModel] = type(described.name, (RemoteModel,), members)
    return kind(worker, described.samples)
