"""What becomes of a batch that failed: its parts are tried, so that only those fail who fail alone.

A batch that does not fit the device's memory is halved until it does. One that raises, or whose outputs are not
finite, is bisected until the poisoned samples stand alone. A device that does not come back, or says that it is lost,
ends it all.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from server.backends.executor import Batch, Completion, Executor
from server.errors import DeviceLostError, OutOfMemoryError

_T = TypeVar("_T")
_LATE = 0.5  # s by which a timer is not late unless the process was paused
Run = Callable[[Batch], "asyncio.Future[Completion]"]


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbours of a failed batch that were tried together.

    Attributes:
        first: index of the first one in the batch.
        size: how many.
        result: what came of them; an exception only for one alone.
    """

    first: int
    size: int
    result: Completion | Exception

    def of(self, whole: Sequence[_T]) -> Sequence[_T]:
        """What of the batch's requests, or inputs, is in this part."""
        return whole[self.first : self.first + self.size]

    @property
    def error(self) -> str:
        """What was raised, in one line."""
        return f"{type(self.result).__name__}: {' '.join(str(self.result).split())[:200]}"


@dataclass(frozen=True, slots=True)
class Rescued:
    """What came of a failed batch.

    Attributes:
        parts: all of it, in order.
        unfit: the least size that did not fit the memory; None if all fitted.
    """

    parts: Sequence[Part]
    unfit: int | None

    @property
    def largest(self) -> int | None:
        """The largest size to try from now on: half of what did not fit; None if all fitted."""
        return None if self.unfit is None else max(1, (self.unfit + 1) // 2)


def watched(executor: Executor, batch: Batch, within: float) -> "asyncio.Future[Completion]":
    """Run a batch; it is held for hung after `within` s, since a device call cannot be ended from outside.

    The future raises DeviceLostError then.
    """
    running = executor.run(batch)
    _watch(running, len(batch.inputs), within)
    return running


def _watch(running: "asyncio.Future[Completion]", size: int, within: float) -> None:
    loop = asyncio.get_running_loop()

    def on_due(due: float) -> None:
        if running.done():
            return
        if loop.time() > due + _LATE:  # the whole process stood still; the result may be here before the next one
            _watch(running, size, within)
        else:
            running.set_exception(DeviceLostError(f"a batch of {size} did not come back within {within:g} s"))

    timer = loop.call_later(within, on_due, loop.time() + within)
    running.add_done_callback(lambda _: timer.cancel())


def complete(batch: Batch, completion: Completion) -> Completion:
    """The completion, if it holds one output for each input.

    Raises:
        RuntimeError: it does not.
    """
    if len(completion.outputs) != len(batch.inputs):
        raise RuntimeError(f"{len(completion.outputs)} outputs for {len(batch.inputs)} inputs")
    return completion


async def rescue(run: Run, batch: Batch, error: Exception) -> Rescued:
    """Try the parts of a batch that failed with `error`.

    Raises:
        DeviceLostError: the device was lost meanwhile, or is.
    """
    if isinstance(error, DeviceLostError):
        raise error
    size = len(batch.inputs)
    unfit = size if isinstance(error, OutOfMemoryError) else None
    if size == 1:
        return Rescued([Part(0, 1, error)], unfit)
    half = (size + 1) // 2
    left = await _attempt(run, _slice(batch, 0, half))
    right = await _attempt(run, _slice(batch, half, size))
    parts = [*left.parts, *(replace(part, first=part.first + half) for part in right.parts)]
    return Rescued(parts, min((n for n in (unfit, left.unfit, right.unfit) if n is not None), default=None))


async def _attempt(run: Run, batch: Batch) -> Rescued:
    try:
        return Rescued([Part(0, len(batch.inputs), complete(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is looked into part by part)
        return await rescue(run, batch, error)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])
