"""Input and output signatures of models, and the tensors that match them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BODY = (bytes, memoryview)
RAW = "RAW"  # datatype of a raw body: one sample whose encoding the codec detects


# NumPy's dtypes by datatype. It has no bfloat16: BF16 tensors are float32 arrays, and 16 bits a value only in bodies
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<f4"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype("O"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Signature of an input or output.

    Attributes:
        name: the tensor's name.
        sample_shapes: shape of one sample by datatype, without the leading batch dimension; -1 is any size, above 0
            in an input. The metadata advertise the first datatype.
    """

    name: str
    sample_shapes: Mapping[str, tuple[int, ...]]

    @property
    def datatype(self) -> str:
        """The datatype that the metadata advertise."""
        return next(iter(self.sample_shapes))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample in the advertised datatype."""
        return self.sample_shapes[self.datatype]

    @property
    def sample_bytes(self) -> int:
        """Memory of one sample, bytes; 0 if its shape varies."""
        size = math.prod(self.sample_shape)
        return 0 if -1 in self.sample_shape else size * DTYPES[self.datatype].itemsize

    @property
    def is_scores(self) -> bool:
        """Whether a sample is a vector of floating-point numbers, of which the largest can be named as classes."""
        return DTYPES[self.datatype].kind == "f" and len(self.sample_shape) == 1

    def accepts(self, datatype: str, shape: tuple[int, ...], least: int = 1) -> bool:
        """Whether a tensor of this shape, whose first dimension is the number of samples, matches and has samples.

        Args:
            datatype: one of `sample_shapes`.
            shape: of the tensor.
            least: the least size of a dimension that varies: 0 for outputs, which may have nothing to say.
        """
        expected = self.sample_shapes[datatype]
        fits = all(
            size == want or (want == -1 and size >= least) for want, size in zip(expected, shape[1:], strict=False)
        )
        return len(shape) == len(expected) + 1 and shape[0] > 0 and fits

    def __str__(self) -> str:
        forms = (f"{datatype} {[-1, *shape]}" for datatype, shape in self.sample_shapes.items())
        return f"`{self.name}` as {' or '.join(forms)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model.

    Attributes:
        inputs: at least one.
        outputs: at least one.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether all samples have the same shapes."""
        return not any(-1 in spec.sample_shape for spec in self.inputs)

    def input_names(self) -> str:
        """The inputs in words, for error messages."""
        return ", ".join(map(str, self.inputs))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a call.

    Attributes:
        name: name of the model's input.
        datatype: one of the Open Inference Protocol's datatypes, or `RAW`.
        shape: all dimensions; the first is the number of samples.
        data: row-major elements: a list for BYTES; the whole body for RAW; otherwise an array of `shape`, which for
            binary tensors is a read-only view of the body.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: NDArray[Any] | list[bytes] | bytes | memoryview

    @property
    def elements(self) -> NDArray[Any] | list[bytes]:
        """The data of a tensor that is not RAW."""
        assert not isinstance(self.data, _BODY)
        return self.data
