"""The interface of models: how inputs of calls become samples, and how outputs become answers. Without torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from policies.profile import Profile
from server.models.signature import Tensor, TensorSpec

_BEST = 5  # classes in a prediction


@dataclass(frozen=True, slots=True)
class Measure:
    """The cost of decoding one encoded sample, from its header.

    Attributes:
        pixels: width times height.
        work: decoding time, in pixels of a JPEG of one scan; each scan of several adds an eighth of the picture.
        held: bytes that decoding takes beside the encoded sample, at most.
    """

    pixels: int
    work: int
    held: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """The samples of one call before they are decoded.

    Attributes:
        count: number of samples.
        read: returns the samples, unless they are encoded.
        memory: bytes that the samples take beside the body.
        encoded: samples that `Codec.decode` has to decode, one by one.
        slow: whether `read` takes over a millisecond.
    """

    count: int
    read: Callable[[], list[Any]]
    memory: int = 0
    encoded: Sequence[bytes] = ()
    slow: bool = False


class SizePredictor(Protocol):
    """Predicts the service time of a sample that is served alone."""

    def of(self, sample: Any, /) -> float:
        """The predicted service time, s."""
        ...

    def observe(self, sample: Any, output: Any, /) -> None:
        """Learn from a sample that was served."""
        ...


class Codec(ABC):
    """Reads the inputs and renders the outputs of one kind of model. Thread-safe: it holds no state.

    Attributes:
        form_field: field of a multipart form with the sample; None where forms are not accepted.
        json_body: what the JSON body of POST /predict is, for error messages; None where it is no JSON.
        fixed_shape: whether all samples have one shape, so that a batch of a size is always the same computation.
        backend: what runs the model.
        lengths: sample lengths at which a profile measures service times, ascending; empty where they do not differ.
    """

    form_field: ClassVar[str | None] = None
    json_body: ClassVar[str | None] = None
    fixed_shape: ClassVar[bool] = False
    backend: ClassVar[Literal["images", "texts"]] = "images"

    @property
    @abstractmethod
    def input(self) -> TensorSpec:
        """The input's signature."""

    def output(self, labels: int) -> TensorSpec:
        """The output's signature, for a model with so many labels."""
        return TensorSpec("logits", {"FP32": (labels,)})

    @property
    def classifies(self) -> bool:
        """Whether outputs are logits, float32 [classes]."""
        return True

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sample lengths at which a profile measures service times, ascending; empty where they do not differ."""
        return ()

    @property
    def middle_length(self) -> str:
        """The length of `synthetic_samples`, for a profile's note."""
        return ""

    @property
    def max_body(self) -> tuple[int, str] | None:
        """Largest body of POST /predict in bytes, and the remedy for a larger one; None: the server's limit."""
        return None

    def parameters(self) -> dict[str, Any]:
        """Limits that the model's metadata advertise."""
        return {}

    @abstractmethod
    def from_body(self, body: bytes) -> Inputs:
        """The sample of POST /predict.

        Raises:
            BadInputError: it cannot be read.
        """

    @abstractmethod
    def from_tensor(self, tensor: Tensor, beside: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Inputs:
        """The samples of an inference call.

        Args:
            tensor: matches `input`, or is a raw body.
            beside: the optional inputs by name.
            parameters: those of the call that `input` names.

        Raises:
            BadInputError: one of them is out of bounds, here or when it is read.
        """

    def measure(self, encoded: bytes, /) -> Measure:
        """The cost of decoding a sample.

        Raises:
            BadInputError: its header cannot be read.
        """
        raise NotImplementedError

    def decode(self, encoded: bytes, /, measure: Measure | None = None) -> Any:
        """Decode a sample that was measured.

        Raises:
            BadInputError: it cannot be decoded.
        """
        raise NotImplementedError

    @abstractmethod
    def synthetic_samples(self, count: int, rng: np.random.Generator) -> list[Any]:
        """Samples for measurements."""

    def synthetic_of_length(self, count: int, length: int, rng: np.random.Generator) -> list[Any]:
        """Samples of one of `lengths`."""
        raise NotImplementedError

    def render(self, output: Any, labels: Sequence[str]) -> dict[str, Any]:
        """The part of the answer to POST /predict that shows the output."""
        return {"predictions": top_classes(output, labels)}

    def stack(self, outputs: Sequence[Any]) -> NDArray[Any]:
        """The outputs of all samples as one tensor: float32 [samples, classes]."""
        return np.stack(outputs) if len(outputs) > 1 else outputs[0][None]

    def size_predictor(self, _profile: Profile, _guess: str) -> SizePredictor | None:
        """Predicts service times of samples by a profile; None where they do not differ."""
        return None

    def complete(self, profile: Profile) -> Profile:
        """The profile with what a hand-written one need not state."""
        return profile


def top_classes(logits: NDArray[np.float32], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The five most probable classes of float32 [classes] logits, or all if there are fewer, in descending order."""
    likely = np.exp(logits.astype(np.float64) - logits.max())
    likely /= likely.sum()
    first = np.argpartition(-likely, _BEST)[:_BEST] if len(likely) > _BEST else np.arange(len(likely))
    ordered = first[np.lexsort((first, -likely[first]))].tolist()
    return [{"class_index": i, "label": labels[i], "probability": float(likely[i])} for i in ordered]


Codec_co = TypeVar("Codec_co", bound=Codec, covariant=True, default=Codec)


@dataclass(frozen=True, slots=True)
class ServedModel(Generic[Codec_co]):
    """A model that the server serves.

    Attributes:
        name: as in URLs.
        codec: reads inputs and renders outputs.
        labels: one for each class, in the order of the logits; empty where tokens are generated.
        weights: "pretrained", "random", "emulated", or the name of the file they came from.
        max_batch_size: the largest batch that its device takes.
        sizes: predicts service times of requests; None where they do not differ.
    """

    name: str
    codec: Codec_co
    labels: tuple[str, ...]
    weights: str
    max_batch_size: int
    sizes: SizePredictor | None = None
