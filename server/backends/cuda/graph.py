"""Whole networks of images as captured graphs: one replay for each batch, from samples on the device to logits.

The indices of a batch's slots are copied to the device. The graph of its bucket gathers their pixels, runs the network,
and checks that the logits are finite. The result is copied to one of two page-locked buffers: a batch is launched while
the logits of the one before are still read from the other.
"""

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from server.backends.buckets import bucket_sizes
from server.backends.cuda.device_slots import CopyEvent, SlotState, SlotUse
from server.backends.cuda.networks import FIRST_BATCHES, Network, end_search
from server.backends.cuda.runtime import Replay, Runtime
from server.backends.cuda.uploads import UploadedSample, Uploads
from server.backends.executor import Batch
from server.backends.torch_device import translated_errors
from server.errors import NotFiniteError
from server.models.images.codec import ImageCodec
from server.models.model import ServedModel

_log = logging.getLogger("batchwright.device")
_WARM_UPS = 3  # runs of a bucket before its capture: libraries choose their algorithms and allocate in the first ones
_SLOT_BYTES = 2**27  # of all slots of a model, on the device and on the host
_MOST_SLOTS = 1024
_GROUP = attrgetter("group")


class _Buffers:
    """Host memory of one batch, of which smaller batches use the beginning.

    Attributes:
        results: of each sample its logits and whether they are finite, 1 or 0.
    """

    def __init__(self, runtime: Runtime, largest: int, classes: int) -> None:
        self.index = runtime.pinned((largest,), torch.int64)
        self.index_array = self.index.numpy()
        self.results = runtime.pinned((largest, classes + 1), torch.float32)
        self.in_use = False


class GraphDevice:
    """A Device for one image model without stages, which is also a LaunchingDevice; not thread-safe but for `upload`.

    A bucket is captured at its first batch, on the thread that runs it, so the largest one should be run first: all
    graphs share the memory of the first. Where the capture fails the same operations are run one by one.
    """

    def __init__(self, model: ServedModel[ImageCodec], network: Network, runtime: Runtime) -> None:
        """`network` computes logits, [n, classes], from pixels, uint8 [n, height, width, 3], on the device."""
        largest, shape = model.max_batch_size, model.codec.shape
        slots = max(2 * largest, min(_MOST_SLOTS, _SLOT_BYTES // math.prod(shape)))
        self._runtime = runtime
        self._network = network
        self._sizes = bucket_sizes(largest)
        # not zeros, which the default stream might write after the first uploads
        self._rows = torch.empty((slots + largest, *shape), dtype=torch.uint8, device=runtime.device)
        self._uploads = Uploads(runtime, self._rows, slots)
        self._staged = runtime.pinned((largest, *shape), torch.uint8)  # samples of a batch that have no slot
        self._first_staged = slots  # their first row on the device
        self._buffers = [_Buffers(runtime, largest, len(model.labels)) for _ in range(2)]
        self._next = 0  # buffers of the next batch
        with runtime.computing():
            self._index = torch.zeros(largest, dtype=torch.int64, device=runtime.device)
            self._results = torch.zeros((largest, len(model.labels) + 1), device=runtime.device)
        self._replays: dict[int, Replay] = {}  # by bucket
        self._warming = 0.0  # s that the first batches of all buckets have taken
        self._captures = True
        self._name = model.name

    def upload(self, sample: Any) -> Any:
        """Upload a sample; see `Uploads.upload`."""
        return self._uploads.upload(sample)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Logits, float32 [classes], for each input."""
        running = self.launch(batch)
        running.wait()
        return running.outputs()

    def launch(self, batch: Batch, /) -> "GraphBatch":
        """Start a batch of samples, each uploaded or an array.

        Raises:
            RuntimeError: the outputs of the batch before the last one have not been collected, or a slot is stale.
        """
        with torch.inference_mode(), translated_errors(self._runtime.device):
            at, buffers = self._next, self._buffers[self._next]
            if buffers.in_use:
                raise RuntimeError("a batch is launched before the outputs of the one before the last are collected")
            size = self._sizes[bisect_left(self._sizes, len(batch.inputs))]
            replay = self._replays.get(size) or self._capture(size)
            running = GraphBatch(self._runtime, self._uploads, buffers, batch.inputs)
            try:
                self._start(batch.inputs, running.uses, size, buffers, replay)
            except BaseException:
                running.end(copied=False)
                raise
            running.started(self._runtime.record())
            self._next = 1 - at
            return running

    def _start(
        self, inputs: Sequence[Any], uses: Sequence[SlotUse], size: int, buffers: _Buffers, replay: Replay
    ) -> None:
        staged = [sample for sample in inputs if not isinstance(sample, UploadedSample)]
        rows = iter(range(self._first_staged, self._first_staged + len(staged)))
        index = buffers.index_array
        index[: len(inputs)] = [s.use.index if isinstance(s, UploadedSample) else next(rows) for s in inputs]
        index[len(inputs) : size] = index[0]
        if staged:  # unlike assignment, this raises on a sample of another shape
            np.stack(staged, out=self._staged.numpy()[: len(staged)])
        with self._runtime.computing():
            if staged:
                target = self._rows[self._first_staged : self._first_staged + len(staged)]
                target.copy_(self._staged[: len(staged)], non_blocking=True)
            newest = max(uses, key=_GROUP, default=None)  # the groups before it have ended with it
            if newest is not None and newest.copy is not None:
                self._runtime.wait_for(newest.copy)
            self._runtime.copy(self._index[:size], buffers.index[:size])
            replay()
            self._runtime.copy(buffers.results[: len(inputs)], self._results[: len(inputs)])

    def _capture(self, size: int) -> Replay:
        run, began = partial(self._run, size), time.monotonic()
        with self._runtime.computing():
            for _ in range(_WARM_UPS):
                run()
        self._runtime.record().synchronize()
        self._warming += time.monotonic() - began
        if self._warming > FIRST_BATCHES:
            end_search(self._warming)
        self._replays[size] = self._replay_of(run, size)
        return self._replays[size]

    def _replay_of(self, run: Callable[[], None], size: int) -> Replay:
        if not self._captures:
            return run
        try:
            return self._runtime.capture(run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  (an operation may raise anything where it cannot be captured)
            self._captures = False  # what follows a failed capture is not reliable
            _log.warning(
                "%s: batches of %d are not captured as a graph, nor are others from now on; they run without: %s",
                *(self._name, size, error),
            )
            return run

    def _run(self, size: int) -> None:
        """What a graph does."""
        logits = self._network(self._rows.index_select(0, self._index[:size])).float()
        self._results[:size, :-1] = logits
        self._results[:size, -1] = torch.isfinite(logits).all(1)


class GraphBatch:
    """A batch on the device; see `server.backends.executor.RunningBatch`.

    Attributes:
        uses: of the slots that it reads, each once; empty when it has read them.
    """

    def __init__(self, runtime: Runtime, uploads: Uploads, buffers: _Buffers, inputs: Sequence[Any]) -> None:
        """Begin to use the buffers, and the slots of these inputs."""
        self._inputs = inputs  # a slot is released when nothing refers to its sample
        uses = [*{sample.use: None for sample in inputs if isinstance(sample, UploadedSample)}]
        if any(use.state is SlotState.FILLED for use in uses):
            uploads.flush()
        uploads.slots.launch(uses)
        self.uses = uses
        self._device = runtime.device
        self._slots = uploads.slots
        self._buffers = buffers
        self._done: CopyEvent | None = None
        self._size = len(inputs)
        buffers.in_use = True

    def started(self, done: CopyEvent) -> None:
        """Set the event of the end of the batch."""
        self._done = done

    def wait(self) -> None:
        """Block until the batch has ended.

        Raises:
            NotFiniteError: an output is not a number, or infinite.
        """
        try:
            assert self._done is not None
            with translated_errors(self._device):
                self._done.synchronize()
            if not self._buffers.results[: self._size, -1].all():
                raise NotFiniteError("the model's output is not finite")
        except BaseException:
            self.end(copied=False)
            raise
        self._end_uses(copied=True)

    def outputs(self) -> Sequence[Any]:
        """Logits, float32 [classes], for each input; the buffers are free afterwards."""
        logits = self._buffers.results.numpy()[: self._size, :-1].copy()
        self.end(copied=True)
        return [*logits]

    def end(self, copied: bool) -> None:
        """End the use of the buffers, and of slots that are still in the batch."""
        self._end_uses(copied)
        self._buffers.in_use = False

    def _end_uses(self, copied: bool) -> None:
        self._slots.end(self.uses, copied)
        self.uses, self._inputs = [], ()
