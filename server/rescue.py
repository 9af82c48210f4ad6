"""What becomes of a batch that failed: its parts are tried, so that only those fail who fail alone.

A batch that does not fit the device's memory is halved until it does. One that raises, or whose outputs are not
finite, is bisected until the poisoned samples stand alone. A device that does not come back, or says that it is lost,
ends it all.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policies.types import Request
from server.executor import Batch, Completion, DeviceLostError, Executor, OutOfMemoryError

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

    def of(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of the batch's requests that are in this part."""
        return requests[self.first : self.first + self.size]

    @property
    def error(self) -> str:
        """What was raised, in one line."""
        return f"{type(self.result).__name__}: {' '.join(str(self.result).split())[:200]}"


@dataclass(frozen=True, slots=True)
class Rescued:
    """What came of a failed batch.

    Attributes:
        parts: all of it, in order.
        largest: the largest part that was served after one had not fitted the memory; None if all fitted.
    """

    parts: Sequence[Part]
    largest: int | None


def watched(executor: Executor, batch: Batch, within: float) -> "asyncio.Future[Completion]":
    """Run a batch; it is held for hung after `within` s, since a device call cannot be ended from outside.

    The future raises DeviceLostError then.
    """
    running = executor.run(batch)
    timer = asyncio.get_running_loop().call_later(within, _give_up, running, len(batch.inputs), within)
    running.add_done_callback(lambda _: timer.cancel())
    return running


def _give_up(running: "asyncio.Future[Completion]", size: int, within: float) -> None:
    if not running.done():
        running.set_exception(DeviceLostError(f"a batch of {size} did not come back within {within:g} s"))


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
    if size == 1:
        return Rescued([Part(0, 1, error)], None)
    half = (size + 1) // 2
    left = await _attempt(run, _slice(batch, 0, half))
    right = await _attempt(run, _slice(batch, half, size))
    parts = [*left.parts, *(replace(part, first=part.first + half) for part in right.parts)]
    return Rescued(parts, _largest(parts, isinstance(error, OutOfMemoryError), left, right))


async def _attempt(run: Run, batch: Batch) -> Rescued:
    try:
        return Rescued([Part(0, len(batch.inputs), complete(batch, await run(batch)))], None)
    except Exception as error:  # noqa: BLE001  (whatever the device raised is looked into part by part)
        return await rescue(run, batch, error)


def _largest(parts: Sequence[Part], out_of_memory: bool, left: Rescued, right: Rescued) -> int | None:
    if not out_of_memory and left.largest is None and right.largest is None:
        return None
    return max((part.size for part in parts if isinstance(part.result, Completion)), default=1)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return replace(batch, inputs=batch.inputs[start:stop])
