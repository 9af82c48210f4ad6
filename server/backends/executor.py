"""The device runner: one batch at a time, in a thread of its own, so that the event loop is never blocked."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the device is given.

    Attributes:
        model: name of the model.
        inputs: one decoded sample each, as the model's codec made it: uint8 [H, W, 3]; after the first stage, what the
            stage before gave for each.
        first_stage: the stage at which all of them stand.
        stages: how many stages to run; None runs to the end.
        standby: standby launches of its further stages; None where it runs to the end.
    """

    model: str
    inputs: Sequence[Any]
    first_stage: int = 0
    stages: int | None = None
    standby: "StandbyLaunches | None" = None

    @property
    def last_stage(self) -> int | None:
        """The stage before which it ends; None: it runs to the end."""
        return None if self.stages is None else self.first_stage + self.stages


class StandbyLaunches:
    """Queue of launches that the device may start after a batch, each with the outputs of the one before as inputs.

    They save a round trip to the event loop, and so two thread wake-ups, between two stages. The event loop offers and
    withdraws them, the device's thread takes them. A deque's methods are atomic, so a launch is either taken or
    withdrawn.

    Attributes:
        taken: number of launches that the device has taken; final once the last of these is complete.
    """

    __slots__ = ("_offered", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self._offered: deque[_Work] = deque()

    def offer(self, batch: Batch) -> "asyncio.Future[Completion]":
        """Append a batch, and return the future of its completion."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._offered.append((batch, done))
        return done

    def withdraw(self) -> None:
        """Withdraw the launches that have not been taken."""
        self._offered.clear()

    def take(self, inputs: Sequence[Any]) -> "_Work | None":
        """Take the next launch and give it its inputs; None if there is none."""
        try:
            batch, done = self._offered.popleft()
        except IndexError:
            return None
        self.taken += 1
        return Batch(batch.model, inputs, batch.first_stage, batch.stages), done


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a batch.

    Attributes:
        outputs: one for each input, in order: float32 [classes] after the last stage, else inputs of the next stage.
        started: the instant at which the device took the batch, s on time.monotonic's clock.
        finished: the instant at which the outputs were there, s.
    """

    outputs: Sequence[Any]
    started: float
    finished: float


_Work = tuple[Batch, asyncio.Future[Completion]]


class Executor(Protocol):
    """Runs batches; awaited by the dispatcher, one at a time.

    Attributes:
        name: the device's, for metrics.
    """

    name: str

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Start at once; the future holds the outputs, or the device's exception.

        Launches of `batch.standby` may be taken and run before the future is done.
        """
        ...


class Device(Protocol):
    """The blocking side of an executor."""

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch to its end on the calling thread and return one output for each input."""
        ...


class ThreadExecutor:
    """An Executor whose device works in one daemon thread, started here and ended by `close`."""

    def __init__(self, device: Device, name: str = "") -> None:
        """`device` is touched by the thread alone from now on; `name` is for people."""
        self.name = name
        self._device = device
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Hand the batch to the thread."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._work.put((batch, done))
        return done

    def close(self) -> None:
        """End the thread after the batch in hand."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Run one batch and its standby launches; the thread keeps no reference to them while it waits for the next."""
        work = self._work.get()
        if work is None:
            return False
        then: _Work | None = work
        standby, results = work[0].standby, []
        while then is not None:
            result = self._result(then[0])
            results.append((then[1], result))
            then = None
            if standby is not None and isinstance(result, Completion):
                then = standby.take(result.outputs)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            work[1].get_loop().call_soon_threadsafe(_resolve, results)
        return True

    def _result(self, batch: Batch) -> Completion | Exception:
        started = time.monotonic()
        try:
            outputs = self._device.serve(batch)
        except Exception as error:  # noqa: BLE001  (whatever the device raises is the answer to this batch)
            return error
        return Completion(outputs, started, time.monotonic())


def _resolve(results: Sequence[tuple[asyncio.Future[Completion], Completion | Exception]]) -> None:
    for done, result in results:
        if done.done():
            continue
        if isinstance(result, Completion):
            done.set_result(result)
        else:
            done.set_exception(result)
