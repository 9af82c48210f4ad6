"""Models of users: the base class, and the description of a tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

DATATYPES = frozenset(
    {
        *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
        *("FP16", "FP32", "FP64", "BF16", "BYTES"),
    }
)


@dataclass(frozen=True, init=False)
class Tensor:
    """Datatype and shape of one sample of an input or output.

    Attributes:
        datatype: a datatype of the Open Inference Protocol, such as FP32. NumPy has no BF16: such tensors are float32
            arrays, rounded to bfloat16. BYTES are object arrays of bytes.
        shape: without the batch dimension; -1 for a dimension that differs between samples.
    """

    datatype: str
    shape: tuple[int, ...]

    def __init__(self, datatype: str, shape: Sequence[int] = ()) -> None:
        """Describe a tensor.

        Raises:
            ValueError: there is no such datatype, or a dimension is neither positive nor -1.
        """
        if datatype not in DATATYPES:
            raise ValueError(f"datatype {datatype!r} is not one of {', '.join(sorted(DATATYPES))}")
        if any(type(size) is not int or (size < 1 and size != -1) for size in shape):
            raise ValueError(f"shape {shape!r} is not a list of positive integers, or -1 for dimensions that vary")
        object.__setattr__(self, "datatype", datatype)
        object.__setattr__(self, "shape", tuple(shape))


class Model:
    """Base class of models of users, served by `serve-model NAME=FILE.py:CLASS`.

    `load` and `run` are called on the one thread that runs the model, `decode` and `render` of the same object on other
    threads, several at a time. An emulated device does not call `load` and `run`. After a batch that does not end in
    time, another object is loaded and runs; `decode` and `render` remain those of the first.

    Attributes:
        inputs: by name.
        outputs: by name.
        max_batch_size: largest batch; None for no limit of the model's own.
        torch: whether `run` takes and returns torch tensors on the device in place of NumPy arrays.
    """

    inputs: ClassVar[Mapping[str, Tensor]]
    outputs: ClassVar[Mapping[str, Tensor]]
    max_batch_size: ClassVar[int | None] = None
    torch: ClassVar[bool] = False

    def load(self, device: str) -> None:
        """Load the model, once, before the first batch; `device` is torch's name of it, such as cuda:0 or cpu."""

    def run(self, *_: Any, **inputs: Any) -> Mapping[str, Any]:
        """Compute a batch: arrays [n, ...] by input name in, arrays [n, ...] by output name out."""
        raise NotImplementedError

    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Return typical samples, arrays by input name each, for warm-up and profiling; none: random ones are used."""
        return ()

    def decode(self, body: bytes, content_type: str) -> Mapping[str, Any]:
        """Return the sample in the body of POST /predict, arrays by input name.

        Raises:
            ValueError: the body is malformed; its text is the client's error message.
        """
        raise NotImplementedError

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """Return the outputs of one sample, arrays by output name, as JSON for the response of POST /predict."""
        raise NotImplementedError
