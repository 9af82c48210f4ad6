"""A check at start-up that the rows of a batch's outputs are those of its samples. Without torch.

The first dimension of an output may be a number of detections, which only happens to equal the number of samples. One
client would then get the answer of another. No annotation of a model tells, so batches of two samples are run in both
orders: their outputs have to change places, too.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.types import SpecError
from server.backends.executor import Batch, Executor
from server.errors import OutOfMemoryError, OutputError, RowsError
from server.models.model import ServedModel
from server.models.tensors.codec import TensorCodec
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors

_log = logging.getLogger("batchwright.model")
_GROSS = 0.02  # difference of the same sample's rows of two runs, of the output's largest value: more is no rounding
_STAYED = 0.01  # mean difference, of each column's largest value, over which rows that stayed in place are seen
_MUCH = 4.0  # by how much rows have to be nearer to those of the same place than to those of the same sample
_REMEDY = (
    "the first dimension of each output has to be the batch; export it so, or serve a class that runs it sample by "
    "sample (docs/your-own-model.md, outputs of varying size)"
)
_Row = Mapping[str, NDArray[Any]]


def check_rows(executor: Executor, model: ServedModel) -> bool:
    """Check that the outputs of two samples change places with them; models of one sample a batch pass.

    Outputs that are random, or depend on the place in the batch, cannot be compared, which is logged.

    Returns:
        Whether batches may be served. False, with a warning: no two different samples could be run in a batch.

    Raises:
        SpecError: the outputs do not change places, or a batch of two has another number of rows than two.
    """
    if not isinstance(model.codec, TensorCodec) or model.max_batch_size == 1:
        return True
    return asyncio.run(_check(executor, model))


async def _check(executor: Executor, model: ServedModel) -> bool:
    async def run(*samples: Any) -> Sequence[_Row]:
        return (await executor.run(Batch(model.name, [*samples]))).outputs

    compared, unclear = False, ""
    for one, other, typical in _pairs(model):
        try:
            rows, swapped = await run(one, other), await run(other, one)
            wrong = _moved(rows, swapped[::-1])
            if not wrong:
                compared = True
                continue
            again, twins = await run(one, other), await run(one, one)
        except RowsError as error:
            raise SpecError(f"{model.name}: {error}; {_REMEDY}") from error
        except OutOfMemoryError:
            return True  # warming up finds the largest batch
        except OutputError:
            continue  # warming up reports it, or the call
        except Exception:
            if typical:
                with one_line_errors(f"{model.name}: a batch of 2", SAMPLE_HINT):
                    raise
            continue  # the model does not take such a sample
        if not _moved(rows, again) and not _moved(twins[:1], twins[1:]):
            raise SpecError(f"{model.name}: the rows of output {wrong} do not follow the samples of a batch; {_REMEDY}")
        unclear = wrong
    if unclear:
        _log.warning(
            "%s: output %s is random or depends on the place in the batch, so that it was not checked whether each row "
            "is that of its sample",
            *(model.name, unclear),
        )
        return True
    if not compared:
        _log.warning(
            "%s: no two different samples could be run to check that each row of an output is that of its sample, so "
            "that all batches have one sample; let samples() return two different ones",
            model.name,
        )
    return compared


def _pairs(model: ServedModel) -> Iterator[tuple[_Row, _Row, bool]]:
    """The first typical sample and a different one of the same shapes, and whether that is a typical one, too."""
    first, second = model.codec.synthetic_samples(2, np.random.default_rng(0))
    for other in (second, _reversed(first), _faint(first), _filled(first, 0), _filled(first, 1)):
        if all(array.shape == other[name].shape for name, array in first.items()) and not _equal(first, other):
            yield first, other, other is second


def _reversed(sample: _Row) -> _Row:
    """The sample with its values in the reverse order."""
    return {name: np.asarray(np.flip(array), array.dtype) for name, array in sample.items()}


def _faint(sample: _Row) -> _Row:
    """The sample with small numbers, in which a detector finds nothing, for models that take no zeros."""
    return {
        name: (array / 1000).astype(array.dtype) if array.dtype.kind == "f" else array for name, array in sample.items()
    }


def _filled(sample: _Row, value: int) -> _Row:
    """The sample with a number in place of its values, and empty texts: a detector finds nothing in zeros."""
    return {
        name: np.full(array.shape, b"", object) if array.dtype.hasobject else np.full_like(array, value)
        for name, array in sample.items()
    }


def _moved(rows: Sequence[_Row], others: Sequence[_Row]) -> str:
    """The name of an output whose rows differ between two runs, or are those of the other samples; empty if none is."""
    for name in rows[0]:
        found = [row[name] for row in rows], [row[name] for row in others]
        if any(one.shape != other.shape for one, other in zip(*found, strict=True)):
            return name
        if rows[0][name].dtype.kind != "f":
            if any((one != other).any() for one, other in zip(*found, strict=True)):
                return name
        elif len({row.shape for row in found[0]}) == 1 and rows[0][name].size:
            if _differ(*(np.stack(each).astype(np.float64) for each in found)):
                return name
        elif any(not _is_close(one, other) for one, other in zip(*found, strict=True)):
            return name
    return ""


def _differ(rows: NDArray[Any], others: NDArray[Any]) -> bool:
    """Whether rows [n, ...] of two runs differ by more than rounding, or agree with those of the other samples."""
    if not _is_close(rows, others):
        return True
    rows, others = (np.nan_to_num(each, posinf=0.0, neginf=0.0) for each in (rows, others))
    columns = np.maximum(abs(rows), abs(others)).max(0)
    scale = np.maximum(columns, 1e-6 * columns.max()) + np.finfo(np.float64).tiny
    follows, stays = ((abs(rows - each) / scale).mean() for each in (others, others[::-1]))
    return bool(follows > _STAYED and follows > _MUCH * stays)


def _equal(one: _Row, other: _Row) -> bool:
    return all((array == other[name]).all() for name, array in one.items())


def _is_close(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays of one shape differ by no more than rounding."""
    if not one.size:
        return True
    largest = np.abs(one).max(initial=0.0, where=np.isfinite(one))
    return bool(np.isclose(one, other, rtol=_GROSS, atol=_GROSS * largest, equal_nan=True).all())
