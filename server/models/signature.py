"""Input and output signatures of models, and the tensors that match them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

RAW = "RAW"  # datatype of a raw body: one sample whose encoding the codec detects


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: the tensor's name.
        tails: shape of one sample by datatype, without the leading -1; -1 in it stands for any size above 0. The
            metadata advertise the first datatype.
        beside: optional inputs for the same samples.
        parameters: names of the call's parameters that the model reads.
    """

    name: str
    tails: Mapping[str, tuple[int, ...]]
    beside: tuple["TensorSpec", ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def datatype(self) -> str:
        """The datatype that the metadata advertise."""
        return next(iter(self.tails))

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of one sample in the advertised datatype."""
        return self.tails[self.datatype]

    def takes(self, datatype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape matches; it has at least one sample, and their number comes first."""
        tail = self.tails[datatype]
        fits = all(size > 0 and want in (-1, size) for want, size in zip(tail, shape[1:], strict=False))
        return len(shape) == len(tail) + 1 and shape[0] > 0 and fits

    def __str__(self) -> str:
        forms = (f"{datatype} {[-1, *tail]}" for datatype, tail in self.tails.items())
        return f"`{self.name}` as {' or '.join(forms)}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a call.

    Attributes:
        name: name of the model's input.
        datatype: one of the Open Inference Protocol's datatypes, or `RAW`.
        shape: all dimensions; the first is the number of samples.
        data: row-major elements of BYTES and RAW as a list; anything else as an array of `shape`, which for binary
            tensors is a read-only view of the body.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: NDArray[Any] | list[bytes]
