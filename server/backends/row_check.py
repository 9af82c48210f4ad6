"""A check at start-up that the rows of a batch's outputs are those of its samples. Without torch.

The first dimension of an output may be a number of detections, which only happens to equal the number of samples. One
client would then get the answer of another. No annotation of a model tells, so batches of two samples are run in both
orders: their outputs have to change places, too.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.types import SpecError
from server.backends.executor import Batch, Executor
from server.errors import OutputError, RowsError
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors

_log = logging.getLogger("batchwright.model")
_TOLERANCE = 0.02  # of an output's values, relative to the largest one
_REMEDY = (
    "the first dimension of each output has to be the batch; export it so, or serve a class that runs it sample by "
    "sample (docs/your-own-model.md, outputs of varying size)"
)
_Row = Mapping[str, NDArray[Any]]


def check_rows(executor: Executor, model: ServedModel) -> None:
    """Check that the outputs of two samples change places with them; models of one sample a batch pass.

    Outputs that differ between two runs of the same batch cannot be compared, which is logged.

    Raises:
        SpecError: they do not, or a batch of two has not two rows.
    """
    if not isinstance(model.codec, TensorCodec) or model.max_batch_size == 1:
        return
    asyncio.run(_check(executor, model))


async def _check(executor: Executor, model: ServedModel) -> None:
    async def run(*samples: Any) -> Sequence[_Row]:
        return (await executor.run(Batch(model.name, [*samples]))).outputs

    first, second = model.codec.synthetic_samples(2, np.random.default_rng(0))
    for one, other in combinations((first, second, _empty(first)), 2):
        if _equal(one, other, 0.0) or {name: each.shape for name, each in one.items()} != {
            name: each.shape for name, each in other.items()
        }:
            continue
        try:
            rows, swapped = await run(one, other), await run(other, one)
        except RowsError as error:
            raise SpecError(f"{model.name}: {error}; {_REMEDY}") from error
        except OutputError:
            return  # warming up reports it
        except Exception:
            if other is second:
                with one_line_errors(f"{model.name}: a batch of 2", SAMPLE_HINT):
                    raise
            continue  # the model does not take zeros
        wrong = _moved(rows, swapped[::-1])
        if not wrong:
            continue
        if _moved(rows, await run(one, other)):
            _log.warning(
                "%s: output %s differs between two runs of the same batch, so that it was not checked whether each "
                "row is that of its sample",
                *(model.name, wrong),
            )
            return
        raise SpecError(f"{model.name}: the rows of output {wrong} do not follow the samples of a batch; {_REMEDY}")


def _empty(sample: _Row) -> _Row:
    """The sample with zeros, or empty texts, in place of its values: a detector finds nothing in it."""
    return {
        name: np.full(array.shape, b"", object) if array.dtype.hasobject else np.zeros_like(array)
        for name, array in sample.items()
    }


def _moved(rows: Sequence[_Row], others: Sequence[_Row]) -> str:
    """The name of an output that differs between two lists of rows; empty if none does."""
    for row, other in zip(rows, others, strict=True):
        for name in row:
            if not _equal({name: row[name]}, {name: other[name]}, _TOLERANCE):
                return name
    return ""


def _equal(one: _Row, other: _Row, tolerance: float) -> bool:
    return all(_is_close(array, other[name], tolerance) for name, array in one.items())


def _is_close(one: NDArray[Any], other: NDArray[Any], tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f" or not one.size:
        return bool((one == other).all())
    largest = np.abs(one).max(initial=0.0, where=np.isfinite(one))
    return bool(np.isclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True).all())
