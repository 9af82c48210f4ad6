"""Upload of a batch's samples to the device, one copy for consecutive slots."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.cuda.device_slots import DeviceSlots, SlotState, SlotUse
from server.backends.cuda.page_locked import page_locked
from server.backends.cuda.runtime import Runtime


class UploadedSample:
    """A sample in a slot of the device, in place of the array; the slot is released when nothing refers to it.

    A batch refers to its samples. So the slot of a cancelled request is free at once, or after the batch in service.

    Attributes:
        use: of the slot.
    """

    __slots__ = ("_slots", "use")

    def __init__(self, slots: DeviceSlots, use: SlotUse) -> None:
        self._slots = slots
        self.use = use

    def __del__(self) -> None:
        """Release the slot."""
        self._slots.release(self.use)


class Uploads:
    """The slots of one model: rows of a tensor on the device, and of page-locked host memory.

    A sample in page-locked memory, such as a body that was received there, is copied to the device from there, any
    other from the slot's row of host memory. The samples that are filled when a batch is launched are uploaded as one
    group, consecutive slots by one copy.

    Attributes:
        slots: their states.
    """

    def __init__(self, runtime: Runtime, rows: Tensor, count: int) -> None:
        """Upload to the first `count` of these rows on the device, uint8 [n, height, width, 3]."""
        self.slots = DeviceSlots(count)
        self._runtime = runtime
        self._rows = rows
        self._shape = tuple(rows.shape[1:])
        self._host = runtime.pinned((count, *self._shape), torch.uint8)
        self._arrays: NDArray[np.uint8] = self._host.numpy()
        self._filled: list[SlotUse] = []
        self._groups = 0

    def upload(self, sample: Any) -> Any:
        """Start the upload of a sample, and return what a batch has in its place: itself if no slot is free."""
        if not self._fits(sample):
            return sample  # the batch raises
        source = page_locked.find(sample)
        use = self.slots.take(None if source is None else (sample, source))
        if use is None:
            return sample
        if source is None:  # without the lock, for which the device's thread would wait
            self._arrays[use.index] = sample
        with self.slots.lock:
            self._filled.append(use)
        return UploadedSample(self.slots, use)

    def flush(self) -> None:
        """Start the copies of all samples that are not on their way to the device; in any thread."""
        with self.slots.lock:
            filled = [use for use in self._filled if use.state is SlotState.FILLED]
            if filled:
                copy = self._runtime.upload(self._copies(filled))
                self._groups += 1
                self.slots.uploaded(filled, self._groups, copy)
            self._filled.clear()

    def _fits(self, sample: Any) -> TypeGuard[NDArray[np.uint8]]:
        return isinstance(sample, np.ndarray) and sample.dtype == np.uint8 and sample.shape == self._shape

    def _copies(self, filled: Sequence[SlotUse]) -> list[tuple[Tensor, Tensor]]:
        copies = [(self._rows[use.index], use.source[1]) for use in filled if use.source is not None]
        indices = sorted(use.index for use in filled if use.source is None)
        start = 0
        for end in range(1, len(indices) + 1):
            if end == len(indices) or indices[end] != indices[end - 1] + 1:
                first, last = indices[start], indices[end - 1] + 1
                copies.append((self._rows[first:last], self._host[first:last]))
                start = end
        return copies
