"""A Runtime without a GPU that runs nothing before it has to, and checks how its graphs and copies are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from server.backends.cuda.device_slots import CopyEvent
from server.backends.cuda.runtime import Replay


class FakeEvent:
    """The end of the work that was started before it."""

    def __init__(self, work: list[Callable[[], object]]) -> None:
        self._work = work
        self.before = [*work]

    def query(self) -> bool:
        return not any(step in self._work for step in self.before)

    def synchronize(self) -> None:
        while not self.query():
            self._work.pop(0)()


class FakeRuntime:
    """Compute and copy streams as lists of work, which is done when an event is waited for: as late as possible.

    Attributes:
        captured: number of graphs.
        replays: number of replays of each graph.
        uploads: numbers of rows of the copies of each group.
        fails: what a capture raises.
        poisoned: how often the free memory was filled with NaN.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.captured = 0
        self.replays: list[int] = []
        self.poisoned = 0
        self.uploads: list[list[int]] = []
        self.fails: Exception | None = None
        self.compute: list[Callable[[], object]] = []
        self.copies: list[Callable[[], object]] = []

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def upload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        self.uploads.append([1 if source.ndim == 3 else len(source) for _, source in copies])
        for target, source in copies:
            self.copies.append(partial(target.copy_, source))
        return FakeEvent(self.copies)

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.compute.append(partial(destination.copy_, source))
        if len(self.compute) == 1:  # nothing is before it, and what runs without a graph runs at once
            self.compute.pop()()

    def poison_free_memory(self) -> None:
        self.poisoned += 1

    def wait_for(self, copy: CopyEvent) -> None:
        copy.synchronize()

    def capture(self, run: Callable[[], None]) -> Replay:
        if self.fails is not None:
            raise self.fails
        number, self.captured = self.captured, self.captured + 1
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            self.compute.append(run)

        return replay

    def record(self) -> CopyEvent:
        return FakeEvent(self.compute)
