"""Recovery of failed batches: retry parts of the batch, so that only the failing samples fail.

A batch that does not fit the device's memory is halved until it does. A batch that raises, or whose outputs are not
finite, is bisected down to the failing samples. A batch whose model's process died is run again first, since something
else may have killed it, and so is a request alone. If the device is lost or unavailable, recovery ends with its
exception.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from server.backends.executor import Batch, Completion, check_outputs
from server.errors import (
    BatchTimeoutError,
    DeviceLostError,
    DeviceUnavailableError,
    OutOfMemoryError,
    WorkerDiedError,
    one_line,
)

_T = TypeVar("_T")
_MOST_DEATHS, _WITHIN = 5, 60.0  # in this time, s
_BACKOFF = 0.05  # s, doubled with each death
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


class Deaths:
    """Deaths of models' processes on a device, without a served batch between.

    Those while a batch is run again and in parts are not counted.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._instants: list[float] = []

    def clear(self) -> None:
        """A batch was served."""
        self._instants.clear()

    async def count(self, error: WorkerDiedError, now: float) -> None:
        """Count a death at an instant, s, and wait longer after each.

        Raises:
            WorkerDiedError: this one; there were five in a minute, so the device is lost.
        """
        self._instants = [at for at in self._instants if at > now - _WITHIN] + [now]
        if len(self._instants) >= _MOST_DEATHS:
            raise error
        if len(self._instants) > 1:
            await asyncio.sleep(_BACKOFF * 2.0 ** len(self._instants))

    async def survive(self, restart: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> None:
        """Restart a process, again if it dies while its model is loaded; raises as `count`."""
        while True:
            try:
                return await restart()
            except WorkerDiedError as died:
                await self.count(died, clock())


async def recover(run: Run, restart: Restart, batch: Batch, error: Exception, first: bool = True) -> Recovery:
    """Retry the two halves of a batch that failed with `error`, and halves of those that fail again.

    After the batch timeout each request is retried alone: every attempt that hangs takes that long.

    Args:
        run: runs a part of the batch.
        restart: makes the device usable again after the batch timeout; raises DeviceLostError or
            DeviceUnavailableError if it cannot.
        batch: the batch.
        error: the exception that it raised.
        first: whether it has been run once, as it is.

    Raises:
        DeviceLostError: the device is lost.
        DeviceUnavailableError: the device is unavailable for now.
    """
    hung, died = isinstance(error, BatchTimeoutError), isinstance(error, WorkerDiedError)
    if isinstance(error, BatchTimeoutError | WorkerDiedError):
        await restart(batch.model, error)
    elif isinstance(error, DeviceLostError | DeviceUnavailableError):
        raise error
    if died and first:
        return await _retry(run, restart, batch)
    size = len(batch.inputs)
    if size == 1:  # a sample that does not fit alone says nothing about batches of others
        return Recovery([Part(0, 1, error)], None)
    unfit = [size] if isinstance(error, OutOfMemoryError) else []
    parts: list[Part] = []
    step = 1 if hung else (size + 1) // 2
    for begin in range(0, size, step):
        part_of_batch = _slice(batch, begin, min(begin + step, size))
        retried = await _retry(run, restart, part_of_batch, len(part_of_batch.inputs) == 1)
        parts += (replace(part, first=part.first + begin) for part in retried.parts)
        unfit += [] if retried.smallest_unfit is None else [retried.smallest_unfit]
    return Recovery(parts, min(unfit, default=None))


async def _retry(run: Run, restart: Restart, batch: Batch, first: bool = False) -> Recovery:
    try:
        return Recovery([Part(0, len(batch.inputs), check_outputs(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is recovered part by part)
        error.__traceback__ = None  # its frames refer to the inputs and to the future that has it: a cycle
        return await recover(run, restart, batch, error, first)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])
