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
        pad: of an input with exactly one dimension -1: the value with which the samples of a batch are padded at the
            end of that dimension, to the longest of them. None: only samples of equal shapes share a batch.
    """

    datatype: str
    shape: tuple[int, ...]
    pad: bool | float | bytes | None

    def __init__(self, datatype: str, shape: Sequence[int] = (), pad: bool | float | bytes | None = None) -> None:
        """Describe a tensor.

        Raises:
            ValueError: there is no such datatype, a dimension is neither positive nor -1, or the padding is not a value
                of the datatype or not for exactly one dimension -1.
        """
        if datatype not in DATATYPES:
            raise ValueError(f"datatype {datatype!r} is not one of {', '.join(sorted(DATATYPES))}")
        if any(type(size) is not int or (size < 1 and size != -1) for size in shape):
            raise ValueError(f"shape {shape!r} is not a list of positive integers, or -1 for dimensions that vary")
        if pad is not None and tuple(shape).count(-1) != 1:
            raise ValueError(f"shape {shape!r} has pad={pad!r}; padding needs exactly one dimension -1")
        if pad is not None and not _is_value(pad, datatype):
            raise ValueError(f"pad={pad!r} is not a value of {datatype}")
        object.__setattr__(self, "datatype", datatype)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "pad", pad)


def _is_value(value: object, datatype: str) -> bool:
    """Whether a Python value can be an element of a tensor."""
    if datatype in ("BOOL", "BYTES"):
        return type(value) is (bool if datatype == "BOOL" else bytes)
    if not datatype.startswith(("INT", "UINT")):
        return type(value) in (int, float)
    bits = int(datatype.lstrip("UINT"))
    least, most = (0, 2**bits) if datatype[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return type(value) is int and least <= value < most


class BadInput(ValueError):  # noqa: N818  (not an error of the model)
    """Raised by `run` or `decode` of a user's model: the client's input is wrong. It is answered with status 400.

    A batch of several samples that raises it is run again in parts, so that it fails that sample alone.
    """


@dataclass(frozen=True)
class Answer:
    """Returned by `decode`: the response's outputs, as JSON, where no model is needed, such as for an empty file."""

    outputs: Any


@dataclass(frozen=True)
class Kept:
    """Returned by `decode`: one sample, or a list of samples, and a value that `render` gets as second argument.

    Attributes:
        samples: as `decode` returns them by itself.
        value: anything that can be pickled, such as a name, or the scale of an image.
    """

    samples: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    value: Any


class Model:
    """Base class of models of users, served by `serve-model NAME=FILE.py:CLASS`.

    The model has a process of its own. `load` and `run` are called on the one thread that runs it, `decode` and
    `render` of the same object on other threads, several at a time. An emulated device calls neither of the first two.
    After a batch that does not end in time, or ends the process, the model is made and loaded again in another process.

    Attributes:
        inputs: by name.
        outputs: by name.
        max_batch_size: largest batch; None for no limit of the model's own.
        torch: whether `run` takes and returns torch tensors on the device in place of NumPy arrays.
        lengths: with padded inputs, the lengths at which profile-model measures service times, ascending. The length of
            a sample is the size of the dimension -1 of the first padded input. The last one bounds all padded inputs.
        task: embed, served at POST /v1/embeddings, too: `decode` gets each text as text/plain, or token ids as
            application/json, and the first output is the embedding. rerank, served at POST /rerank, too: `decode` gets
            {"query": ..., "text": ...}, and the first output is a raw score, of which the response has the sigmoid.
        max_batch_tokens: with padded inputs, the largest product of batch size and longest length of a batch.
        dimensions: smaller sizes to which an embedding may be truncated.
    """

    inputs: ClassVar[Mapping[str, Tensor]]
    outputs: ClassVar[Mapping[str, Tensor]]
    max_batch_size: ClassVar[int | None] = None
    torch: ClassVar[bool] = False
    lengths: ClassVar[Sequence[int]] = ()
    task: ClassVar[str] = ""
    dimensions: ClassVar[Sequence[int]] = ()
    max_batch_tokens: ClassVar[int | None] = None

    def load(self, device: str) -> None:
        """Load the model, once, before the first batch; `device` is torch's name of it, such as cuda:0 or cpu."""

    def run(self, *_: Any, **inputs: Any) -> Any:  # arrays by name; of a pipeline a coroutine
        """Compute a batch: arrays [n, ...] by input name in, arrays [n, ...] by output name out.

        Where a dimension of an output is -1, it may be a list with an array for each sample.

        Raises:
            BadInput: an input is wrong; its text is the client's error message.
        """
        raise NotImplementedError

    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Return typical samples, arrays by input name each, for warm-up and profiling; none: random ones are used.

        Padded inputs are cut, or repeated, to the length that is measured.
        """
        return ()

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return the sample in the body of POST /predict, arrays by input name, or a list of several samples.

        Each of several is a request of its own, and the response has a list. `Answer` and `Kept` may be returned, too.

        Raises:
            ValueError: the body is malformed; its text is the client's error message.
        """
        raise NotImplementedError

    def render(self, outputs: Any) -> Any:
        """Return the outputs of one sample, arrays by output name, as JSON for the response of POST /predict.

        If `decode` returned `Kept`, its value is a second argument: write render(self, outputs, kept=None).
        """
        raise NotImplementedError
