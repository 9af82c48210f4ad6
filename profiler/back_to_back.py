"""Batches back to back: the device starts each one by itself, as it does in a loaded server."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from server.backends.executor import Batch, Completion, Executor, Standby
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors


@dataclass(frozen=True, slots=True)
class Cycle:
    """A batch that has run.

    Attributes:
        batch: the batch.
        completion: its completion.
        seconds: time from its launch to that of the next batch, s; of the last batch its service time.
    """

    batch: Batch
    completion: Completion
    seconds: float


async def back_to_back(executor: Executor, batches: Iterable[Batch]) -> AsyncGenerator[Cycle, None]:
    """Run batches, each offered to the device while the one before it is in service; yield their cycles in order.

    The cycle, not the service time, is what a batch costs a loaded device: it includes the hand-over to the next batch,
    also where a batch ended before the next one was offered, which then is launched from here. Cycles are yielded while
    a batch is in service and the next one is offered, so that what is done with them delays no launch. Closing the
    iterator waits for the batch in service.

    Raises:
        SpecError: a batch fails.
    """
    standby, remaining = Standby(), iter(batches)
    running: asyncio.Future[Completion] | None = None  # of a batch that the device has started by itself
    offered: asyncio.Future[Completion] | None = None
    ready = list[Cycle]()
    alone: tuple[Batch, Completion] | None = None  # a batch after which the device started none by itself
    try:
        batch = _next(remaining, standby)
        while batch is not None:
            running = running or executor.run(batch)
            following = _next(remaining, standby)
            if following is not None:
                offered = asyncio.get_running_loop().create_future()
                standby.offer(following, offered)
            for cycle in ready:
                yield cycle
            ready.clear()
            with one_line_errors(f"{batch.model}: a batch of {len(batch.inputs)}", SAMPLE_HINT):
                completion = await running
            running, offered = None if standby.withdraw() else offered, None
            if alone is not None:
                ready.append(Cycle(*alone, completion.started - alone[1].started))
                alone = None
            if completion.next_started is None:
                alone = batch, completion
            else:
                ready.append(Cycle(batch, completion, completion.next_started - completion.started))
            batch = following
        for cycle in ready:
            yield cycle
        if alone is not None:
            yield Cycle(*alone, alone[1].finished - alone[1].started)
    finally:
        for each in (running, None if standby.withdraw() else offered):
            if each is not None and not each.done():
                with suppress(Exception):
                    await each


def _next(batches: Iterator[Batch], standby: Standby) -> Batch | None:
    batch = next(batches, None)
    return None if batch is None else replace(batch, standby=standby)


class Rotation:
    """Takes the inputs of batches from the samples in rotation, each batch where the one before ended."""

    def __init__(self, samples: Sequence[Any]) -> None:
        """`samples` are decoded, at least one."""
        self._samples = samples
        self._next = 0

    def take(self, count: int) -> list[Any]:
        """Inputs of a batch of this size."""
        begin, samples = self._next, self._samples
        self._next = (begin + count) % len(samples)
        if begin + count <= len(samples):
            return list(samples[begin : begin + count])
        return [samples[index % len(samples)] for index in range(begin, begin + count)]
