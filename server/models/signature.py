"""Input and output signatures of models, and the tensors that match them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

RAW = "RAW"  # datatype of a raw body: one sample whose encoding the codec detects


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Signature of an input or output.

    Attributes:
        name: the tensor's name.
        sample_shapes: shape of one sample by datatype, without the leading batch dimension; -1 is any size above
            0. The metadata advertise the first datatype.
        optional_inputs: further inputs for the same samples, which a call may leave out.
        parameters: names of the call's parameters that the model reads.
    """

    name: str
    sample_shapes: Mapping[str, tuple[int, ...]]
    optional_inputs: tuple["TensorSpec", ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def datatype(self) -> str:
        """The datatype that the metadata advertise."""
        return next(iter(self.sample_shapes))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample in the advertised datatype."""
        return self.sample_shapes[self.datatype]

    def accepts(self, datatype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape, whose first dimension is the number of samples, matches and is not empty."""
        expected = self.sample_shapes[datatype]
        fits = all(size > 0 and want in (-1, size) for want, size in zip(expected, shape[1:], strict=False))
        return len(shape) == len(expected) + 1 and shape[0] > 0 and fits

    def __str__(self) -> str:
        forms = (f"{datatype} {[-1, *shape]}" for datatype, shape in self.sample_shapes.items())
        return f"`{self.name}` as {' or '.join(forms)}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a call.

    Attributes:
        name: name of the model's input.
        datatype: one of the Open Inference Protocol's datatypes, or `RAW`.
        shape: all dimensions; the first is the number of samples.
        data: row-major elements: a list for BYTES and RAW, otherwise an array of `shape`, which for binary tensors is
            a read-only view of the body.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: NDArray[Any] | list[bytes]
