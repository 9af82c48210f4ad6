"""What a suspended sample is between two stages: a row of a tensor that stays where its stage left it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sample's activation; the tensor goes when its last row does.

    Attributes:
        whole: [n, ...], what a stage gave for its batch.
        index: which row of it.
    """

    whole: Tensor
    index: int


class Activations:
    """Puts a sub-batch together again for its next stage; one model on one device."""

    def __init__(self, max_batch_size: int) -> None:
        """Buffers take this many rows; each is made when its stage is first entered by rows that came apart."""
        self._max_batch_size = max_batch_size
        self._buffers: dict[int, Tensor] = {}  # by stage

    def joined(self, stage: int, rows: Sequence[Row]) -> Tensor:
        """[n, ...]: the rows in order, as what `stage` takes.

        Neighbours of one tensor are taken as they lie: a batch that goes on as it is copies nothing. Rows of several
        tensors, merging, are written side by side into the stage's buffer, which is free again when the stage is over.
        """
        runs = _runs(rows)
        if len(runs) == 1:
            return runs[0]
        try:
            buffer = self._buffer(stage, rows[0].whole)
        except torch.OutOfMemoryError:  # so few rows may fit where a whole buffer does not
            return torch.cat(runs)
        return torch.cat(runs, out=buffer[: len(rows)])

    def _buffer(self, stage: int, like: Tensor) -> Tensor:
        if stage not in self._buffers:
            shape = (self._max_batch_size, *like.shape[1:])
            layout = torch.channels_last if like.ndim == 4 else torch.contiguous_format
            self._buffers[stage] = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
        return self._buffers[stage]


def _runs(rows: Sequence[Row]) -> list[Tensor]:
    """Neighbours in one tensor as one slice of it."""
    runs = []
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not _follows(rows[end - 1], rows[end]):
            first = rows[start]
            runs.append(first.whole[first.index : first.index + end - start])
            start = end
    return runs


def _follows(one: Row, other: Row) -> bool:
    return one.whole is other.whole and other.index == one.index + 1
