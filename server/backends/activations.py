"""Activations of samples between two stages, and their merging into one batch for the next stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ActivationRow:
    """Activation of one sample: a row of a stage's output, whose memory is freed with its last row.

    Attributes:
        tensor: output of the stage for its whole batch, [n, ...].
        index: of the row.
    """

    tensor: Tensor
    index: int


class ActivationBuffers:
    """Merges activations into batches, with one buffer per stage; for one model on one device."""

    def __init__(self, max_batch_size: int) -> None:
        """A buffer has this many rows, and is allocated at the first merge for its stage."""
        self._max_batch_size = max_batch_size
        self._buffers: dict[int, Tensor] = {}  # by stage

    def merge(self, stage: int, rows: Sequence[ActivationRow]) -> Tensor:
        """The rows in order as the input of `stage`, [n, ...].

        Consecutive rows of one tensor are a slice of it, without a copy. Rows of several tensors are copied into the
        stage's buffer, which is free again when the stage ends.
        """
        slices = _slices(rows)
        if len(slices) == 1:
            return slices[0]
        try:
            buffer = self._buffer(stage, rows[0].tensor)
        except torch.OutOfMemoryError:  # these rows may fit where a whole buffer does not
            return torch.cat(slices)
        return torch.cat(slices, out=buffer[: len(rows)])

    def _buffer(self, stage: int, like: Tensor) -> Tensor:
        if stage not in self._buffers:
            shape = (self._max_batch_size, *like.shape[1:])
            layout = torch.channels_last if like.ndim == 4 else torch.contiguous_format
            self._buffers[stage] = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
        return self._buffers[stage]


def _slices(rows: Sequence[ActivationRow]) -> list[Tensor]:
    """Slices of the rows' tensors, one for each run of consecutive rows of a tensor."""
    slices = []
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not _follows(rows[end - 1], rows[end]):
            first = rows[start]
            slices.append(first.tensor[first.index : first.index + end - start])
            start = end
    return slices


def _follows(row: ActivationRow, other: ActivationRow) -> bool:
    return row.tensor is other.tensor and other.index == row.index + 1
