"""Recovery of failed batches: retry parts of the batch, so that only the failing samples fail.

A batch that does not fit the device's memory is halved until it does. A batch that raises, or whose outputs are not
finite, is bisected down to the failing samples. If the device is lost or unavailable, recovery ends with its exception.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from server.backends.executor import Batch, Completion, check_outputs
from server.errors import BatchTimeoutError, DeviceLostError, DeviceUnavailableError, OutOfMemoryError, one_line

_T = TypeVar("_T")
Run = Callable[[Batch], "asyncio.Future[Completion]"]
Restart = Callable[[str, DeviceLostError], Awaitable[None]]


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
        text = "" if isinstance(self.result, Completion) else one_line(self.result)
        return f"{type(self.result).__name__}: {text}"


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


async def recover(run: Run, restart: Restart, batch: Batch, error: Exception) -> Recovery:
    """Retry the two halves of a batch that failed with `error`, and halves of those that fail again.

    After the batch timeout each request is retried alone: every attempt that hangs takes that long, and a thread.

    Args:
        run: runs a part of the batch.
        restart: makes the device usable again after the batch timeout; raises DeviceLostError or
            DeviceUnavailableError if it cannot.
        batch: the batch.
        error: the exception that it raised.

    Raises:
        DeviceLostError: the device is lost.
        DeviceUnavailableError: the device is unavailable for now.
    """
    hung = isinstance(error, BatchTimeoutError)
    if isinstance(error, BatchTimeoutError):
        await restart(batch.model, error)
    elif isinstance(error, DeviceLostError | DeviceUnavailableError):
        raise error
    size = len(batch.inputs)
    if size == 1:  # a sample that does not fit alone says nothing about batches of others
        return Recovery([Part(0, 1, error)], None)
    unfit = [size] if isinstance(error, OutOfMemoryError) else []
    parts: list[Part] = []
    step = 1 if hung else (size + 1) // 2
    for first in range(0, size, step):
        retried = await _retry(run, restart, _slice(batch, first, min(first + step, size)))
        parts += (replace(part, first=part.first + first) for part in retried.parts)
        unfit += [] if retried.smallest_unfit is None else [retried.smallest_unfit]
    return Recovery(parts, min(unfit, default=None))


async def _retry(run: Run, restart: Restart, batch: Batch) -> Recovery:
    try:
        return Recovery([Part(0, len(batch.inputs), check_outputs(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is recovered part by part)
        error.__traceback__ = None  # its frames would keep the batch alive until the next garbage collection
        return await recover(run, restart, batch, error)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])
