"""Batch timeout, and recovery of failed batches: retry parts of the batch, so that only the failing samples fail.

A batch that does not fit the device's memory is halved until it does. A batch that raises, or whose outputs are not
finite, is bisected down to the failing samples. If the device is lost, recovery ends with DeviceLostError.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from server.backends.executor import Batch, Completion, Executor
from server.errors import DeviceLostError, OutOfMemoryError

_T = TypeVar("_T")
_LATE = 0.5  # s; a timer that fires later than this was delayed by a pause of the whole process
Run = Callable[[Batch], "asyncio.Future[Completion]"]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive requests of a failed batch that were run together.

    Attributes:
        first: index of the first request in the batch.
        size: number of requests.
        result: their completion, or the exception of a single request.
    """

    first: int
    size: int
    result: Completion | Exception

    def of(self, whole: Sequence[_T]) -> Sequence[_T]:
        """Return the items of this part, given the batch's requests or inputs."""
        return whole[self.first : self.first + self.size]

    @property
    def error(self) -> str:
        """The exception in one line."""
        return f"{type(self.result).__name__}: {' '.join(str(self.result).split())[:200]}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of the recovery of a failed batch.

    Attributes:
        parts: all requests of the batch, in order.
        smallest_unfit: the smallest batch size that did not fit the memory; None if all fitted.
    """

    parts: Sequence[Part]
    smallest_unfit: int | None

    @property
    def max_batch_size(self) -> int | None:
        """The maximum batch size from now on: half of the smallest size that did not fit; None if all fitted."""
        return None if self.smallest_unfit is None else max(1, (self.smallest_unfit + 1) // 2)


def with_timeout(executor: Executor, batch: Batch, timeout: float) -> "asyncio.Future[Completion]":
    """Run a batch with a timeout, s.

    A call of the device cannot be cancelled from outside, so the device is considered lost after the timeout: the
    future then raises DeviceLostError.
    """
    running = executor.run(batch)
    _start_timeout(running, len(batch.inputs), timeout)
    return running


def _start_timeout(running: "asyncio.Future[Completion]", size: int, timeout: float) -> None:
    loop = asyncio.get_running_loop()

    def on_due(due: float) -> None:
        if running.done():
            return
        if loop.time() > due + _LATE:  # the process was paused, so the result may arrive next
            _start_timeout(running, size, timeout)
        else:
            running.set_exception(DeviceLostError(f"a batch of {size} did not finish within {timeout:g} s"))

    timer = loop.call_later(timeout, on_due, loop.time() + timeout)
    running.add_done_callback(lambda _: timer.cancel())


def check_outputs(batch: Batch, completion: Completion) -> Completion:
    """Check that the completion has one output for each input, and return it.

    Raises:
        RuntimeError: the numbers differ.
    """
    if len(completion.outputs) != len(batch.inputs):
        raise RuntimeError(f"{len(completion.outputs)} outputs for {len(batch.inputs)} inputs")
    return completion


async def recover(run: Run, batch: Batch, error: Exception) -> Recovery:
    """Retry the two halves of a batch that failed with `error`, and halves of those that fail again.

    Raises:
        DeviceLostError: the device is lost.
    """
    if isinstance(error, DeviceLostError):
        raise error
    size = len(batch.inputs)
    unfit = size if isinstance(error, OutOfMemoryError) else None
    if size == 1:
        return Recovery([Part(0, 1, error)], unfit)
    half = (size + 1) // 2
    left = await _retry(run, _slice(batch, 0, half))
    right = await _retry(run, _slice(batch, half, size))
    parts = [*left.parts, *(replace(part, first=part.first + half) for part in right.parts)]
    sizes = (unfit, left.smallest_unfit, right.smallest_unfit)
    return Recovery(parts, min((size for size in sizes if size is not None), default=None))


async def _retry(run: Run, batch: Batch) -> Recovery:
    try:
        return Recovery([Part(0, len(batch.inputs), check_outputs(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is recovered part by part)
        return await recover(run, batch, error)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])
