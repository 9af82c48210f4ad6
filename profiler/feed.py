"""The load whose energy is measured: batches of one size through the executor that serves, one right after another."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from profiler.energy import Clock, Load, feeding
from server.backends.executor import Batch, Completion, Executor


class Feed(Protocol):
    """Gives a device something to do."""

    def __call__(self, batch_size: int, share: float = 1.0, /) -> AbstractContextManager[Load]:
        """Serve batches of one size while the context is open.

        Args:
            batch_size: b.
            share: of the time that the device is to be in service, about; 1 is back to back.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutorFeed:
    """A Feed through an executor, awaited from a thread of its own: whoever measures may sleep meanwhile.

    Attributes:
        executor: runs the batches; nothing else uses it meanwhile.
        model: its name there.
        samples: decoded inputs; a batch takes them in turn.
        rng: draws the gaps of a part load: equal ones could beat with a sensor that looks away most of the time.
        clock: tells s.
        sleep: for so many s, on the feed's thread.
    """

    executor: Executor
    model: str
    samples: Sequence[Any]
    rng: np.random.Generator
    clock: Clock
    sleep: Callable[[float], object]

    @contextmanager
    def __call__(self, batch_size: int, share: float = 1.0, /) -> Iterator[Load]:
        """Serve while the context is open; leaving it, also by Ctrl-C, waits for the batch in hand."""
        batch = Batch(self.model, take(self.samples, batch_size))
        # a loop of its own that is nobody's current one: the runner is made here, used in the thread, and closed here
        with (
            asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
            feeding(lambda: self._turn(runner, batch, share), self.clock) as load,
        ):
            yield load

    def _turn(self, runner: asyncio.Runner, batch: Batch, share: float) -> None:
        async def once() -> Completion:
            return await self.executor.run(batch)

        completion = runner.run(once())
        if share < 1.0:
            service = completion.finished - completion.started
            self.sleep(service * (1.0 / share - 1.0) * float(self.rng.uniform(0.5, 1.5)))


def take(samples: Sequence[Any], batch_size: int) -> list[Any]:
    """A batch of the samples, in turn."""
    return [samples[i % len(samples)] for i in range(batch_size)]
