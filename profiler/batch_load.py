"""Load for energy measurements: batches of one size through the server's executor, back to back or with gaps."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from profiler.back_to_back import Rotation, back_to_back
from profiler.energy import RunningLoad, feed_batches
from server.backends.executor import Batch, Executor


class BatchLoad(Protocol):
    """A source of load on a device."""

    def __call__(self, batch_size: int, share: float = 1.0, /) -> AbstractContextManager[RunningLoad]:
        """Run batches of one size while the context is open.

        Args:
            batch_size: b.
            share: approximate share of time in service; 1 is back to back.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """A BatchLoad that runs an executor's batches on its own thread.

    Attributes:
        executor: runs the batches; nothing else uses it meanwhile.
        model: the model's name in the executor.
        samples: decoded inputs, used in rotation.
        rng: draws the gaps of a partial load; equal gaps could alias with a sensor that samples only part of the time.
        clock: current time, s.
        sleep: sleeps for a number of seconds, on the load's thread.
    """

    executor: Executor
    model: str
    samples: Sequence[Any]
    rng: np.random.Generator
    clock: Callable[[], float]
    sleep: Callable[[float], object]

    @contextmanager
    def __call__(self, batch_size: int, share: float = 1.0, /) -> Iterator[RunningLoad]:
        """Run batches while the context is open; leaving it waits for the batch in service, also on Ctrl-C."""
        inputs = Rotation(self.samples)
        batches = (Batch(self.model, inputs.take(batch_size)) for _ in count())
        # created and closed here but used on the thread, so its event loop must not become this thread's current one
        with (
            asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
            feed_batches(lambda on_batch: runner.run(self._run(batches, share, on_batch)), self.clock) as load,
        ):
            yield load

    async def _run(self, batches: Iterator[Batch], share: float, on_batch: Callable[[], bool]) -> None:
        """Run batches until `on_batch`, called after each, returns False."""
        if share == 1.0:
            async with aclosing(back_to_back(self.executor, batches)) as cycles:
                async for _ in cycles:
                    if not on_batch():
                        return
        for batch in batches:
            completion = await self.executor.run(batch)
            service = completion.finished - completion.started
            self.sleep(service * (1.0 / share - 1.0) * float(self.rng.uniform(0.5, 1.5)))
            if not on_batch():
                return
