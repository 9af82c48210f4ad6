"""The interface of models: read the inputs of calls, and render outputs for responses. Without torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from batchwright.model import Answer
from server.models.form import Form
from server.models.signature import Signature, Tensor

_BEST = 5  # classes in a prediction


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The cost of decoding one encoded sample, read from its header.

    Attributes:
        pixels: width times height.
        work: decoding time, in pixels of a JPEG with one scan; each scan of several adds an eighth of the image.
        memory: upper bound of the memory that decoding takes in addition to the encoded sample, bytes.
    """

    pixels: int
    work: int
    memory: int


@dataclass(slots=True)
class Decoded:
    """What the body of POST /predict holds.

    Attributes:
        samples: of the call.
        several: whether the response has a list, with an output for each sample.
        kept: what the model's own `decode` kept for its `render`, pickled; None without.
        answer: outputs of the response, where no model is needed; None otherwise.
    """

    samples: list[Any] = field(default_factory=list)
    several: bool = False
    kept: bytes | None = None
    answer: Answer | None = None


@dataclass(slots=True)
class Inputs:
    """The samples of one call before they are decoded.

    Attributes:
        count: number of samples.
        read: returns the samples, unless they are encoded.
        memory: memory that the samples take in addition to the body, bytes.
        encoded: encoded samples, each for `Codec.decode_cost` and then `Codec.decode`.
        runs_user_code: whether `read` calls a function of a user's model, which may take any time.
        decoded: of POST /predict: filled by `read`, without the samples.
    """

    count: int
    read: Callable[[], list[Any]]
    memory: int = 0
    encoded: Sequence[bytes] = ()
    runs_user_code: bool = False
    decoded: Decoded = field(default_factory=Decoded)


class Codec(ABC):
    """Reads the inputs and renders the outputs of one kind of model. Stateless, hence thread-safe.

    Attributes:
        form_field: name of the multipart form field with the sample; None if POST /predict takes no forms.
        max_batch_tokens: the largest product of batch size and longest length; None for no limit.
    """

    form_field: ClassVar[str | None] = None
    max_batch_tokens: int | None = None

    @property
    def json_body(self) -> bool:
        """Whether the body of POST /predict is JSON."""
        return False

    @abstractmethod
    def signature(self, labels: int) -> Signature:
        """The inputs and outputs of a model with this number of labels."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sample lengths at which a profile measures service times, ascending; empty if length does not matter."""
        return ()

    def length_of(self, _sample: Any) -> int:
        """The length of a sample; 0 for a model without `lengths`."""
        return 0

    def length_within(self, batch_size: int, length: int | None) -> int | None:
        """The length, or the greatest that a batch of this size may have, for synthetic samples."""
        if self.max_batch_tokens is None or length is None:
            return length
        return max(1, min(length, self.max_batch_tokens // batch_size))

    @property
    def middle_length(self) -> int | None:
        """The length of synthetic samples by default; None where it does not matter."""
        return self.lengths[len(self.lengths) // 2] if self.lengths else None

    @property
    def synthetic_length_note(self) -> str:
        """The default length of `synthetic_samples`, in words, for a profile's note."""
        return ""

    def metadata_parameters(self) -> dict[str, Any]:
        """Limits of the inputs, for the model's metadata."""
        return {}

    @abstractmethod
    def from_body(self, body: bytes, content_type: str) -> Inputs:
        """Read the sample of POST /predict.

        Raises:
            BadInputError: the body is malformed; raised here or by `Inputs.read`.
        """

    @abstractmethod
    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """Read the samples of an inference call.

        Args:
            tensors: by input name; they match the signature, or one is a raw body.

        Raises:
            BadInputError: a value is out of bounds; raised here or by `Inputs.read`.
        """

    @property
    def varies_in_shape(self) -> bool:
        """Whether only samples of one shape can share a batch, and the shapes of samples differ."""
        return False

    def shape_of(self, _sample: Any) -> str:
        """The shape of a sample; empty for a model that does not vary in shape."""
        return ""

    def decode_cost(self, encoded: bytes, /) -> DecodeCost:
        """Read the cost of decoding a sample from its header; only for codecs with encoded samples.

        Raises:
            BadInputError: the header is malformed.
        """
        raise NotImplementedError

    def decode(self, encoded: bytes, cost: DecodeCost, /) -> Any:
        """Decode a sample; `cost` is its `decode_cost`, so that its header is read only once.

        Raises:
            BadInputError: the sample is malformed.
        """
        raise NotImplementedError

    @abstractmethod
    def synthetic_samples(self, count: int, rng: np.random.Generator, length: int | None = None) -> list[Any]:
        """Make random samples for measurements, of this length, one of `lengths`, or of a middle one by default."""

    def renders_slowly(self, _output: Any) -> bool:
        """Whether `render` takes over a millisecond for this output."""
        return False

    @property
    def renders_by_user_code(self) -> bool:
        """Whether `render` calls a function of a user's model."""
        return False

    def render(self, output: Any, labels: Sequence[str], _kept: bytes | None = None) -> dict[str, Any]:
        """Render an output for the response of POST /predict; `_kept` is what decoding kept."""
        return {"predictions": top_classes(output, labels)}

    def stack(self, outputs: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """The outputs of all samples as tensors by output name: float32 [samples, classes]."""
        return {"logits": np.stack(outputs) if len(outputs) > 1 else outputs[0][None]}

    def emulate(self, sample: Any) -> Any:
        """Return an output for a sample without computing it, which depends only on that sample."""
        raise NotImplementedError

    @abstractmethod
    def form(self) -> Form:
        """How POST /predict takes a sample, for the dashboard."""


def largest(values: NDArray[Any], most: int) -> list[int]:
    """Return the indices of the `most` largest of n values, largest first; equal ones, if all fit, by index."""
    if most == 1:
        return [int(values.argmax())]
    first = max(0, len(values) - most)
    return sorted(values.argpartition(first)[first:].tolist(), key=lambda index: (-values.item(index), index))


def top_classes(logits: NDArray[np.float32], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The five most probable classes of float32 [classes] logits, or all if there are fewer, most probable first.

    Few NumPy operations are used: each one on more than 500 values releases the interpreter's lock, which threads that
    decode images then take.
    """
    weights = np.exp(np.subtract(logits, logits.max(), dtype=np.float64))
    total = weights.sum().item()
    return [
        {"class_index": index, "label": labels[index], "probability": weights.item(index) / total}
        for index in largest(weights, _BEST)
    ]


Codec_co = TypeVar("Codec_co", bound=Codec, covariant=True, default=Codec)


@dataclass(frozen=True, slots=True)
class ServedModel(Generic[Codec_co]):
    """A model that the server serves.

    Attributes:
        name: name in URLs.
        codec: reads inputs and renders outputs.
        labels: one for each class, in the order of the logits; empty for a model of named tensors.
        weights: "pretrained", "random", "emulated", or the name of the weights' file or folder.
        max_batch_size: the largest batch.
        platform: the framework that runs it, for the protocol's documents.
        id: under which its device has it, the name, or another one after each load while the server serves.
        signature: its inputs and outputs.
        output_bytes: memory of the outputs of one sample, as far as their shapes do not vary.
    """

    name: str
    codec: Codec_co
    labels: tuple[str, ...]
    weights: str
    max_batch_size: int
    platform: str = "pytorch"
    id: str = ""
    signature: Signature = field(init=False)
    output_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Set what the codec and the number of labels determine."""
        if not self.id:
            object.__setattr__(self, "id", self.name)
        object.__setattr__(self, "signature", self.codec.signature(len(self.labels)))
        object.__setattr__(self, "output_bytes", sum(spec.sample_bytes for spec in self.signature.outputs))
