"""The executor: runs one batch at a time on a device, in a thread or in another process."""

import asyncio
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from server.errors import BatchTimeoutError, DeviceLostError, WorkerDiedError

Logits = NDArray[np.float32]
TIMEOUT_FACTOR = 20.0  # the batch timeout is at least this multiple of the greatest expected service time
LOAD_TIMEOUT = 600.0  # s to load a model while others are served, or again
_T = TypeVar("_T")
_LATE = 0.5  # s; a timer that fires later than this was delayed by a pause of the whole process


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, or some stages of one, for the device.

    Attributes:
        model: name of the model.
        inputs: for each sample the decoded sample as the model's codec made it, such as uint8 [H, W, 3]; after the
            first stage the output of the previous stage.
        first_stage: the first stage to run, counted from 0.
        stages: number of stages to run; None runs to the end.
        standby: where the launch after it is offered; None if there is none.
        id: of the model on its device; empty if that is its name.
    """

    model: str
    inputs: Sequence[Any]
    first_stage: int = 0
    stages: int | None = None
    standby: "Standby | None" = None
    id: str = ""

    @property
    def model_id(self) -> str:
        """The id of the model on its device."""
        return self.id or self.model

    @property
    def last_stage(self) -> int | None:
        """The stage before which the batch ends; None if it runs to the end."""
        return None if self.stages is None else self.first_stage + self.stages


class Standby:
    """Place for one launch that the device starts by itself when the batch in service ends.

    It saves the round trip to the event loop, and so two thread wake-ups, between two batches. The event loop offers
    and withdraws the launch, the device's thread takes it. A deque's methods are atomic, so a launch is either taken or
    withdrawn. While a worker runs a batch, launches that it can take are offered to the worker itself.

    Attributes:
        worker: what runs the batch in service, if that is a worker.
    """

    __slots__ = ("_offered", "_to_worker", "worker")

    def __init__(self) -> None:
        self._offered: deque[_Offer] = deque()
        self.worker: StandbyWorker | None = None
        self._to_worker = False

    def offer(self, batch: Batch, done: "asyncio.Future[Completion]") -> None:
        """Offer a batch; `done` is the future of its completion. Nothing may be offered before."""
        self._to_worker = self.worker is not None and self.worker.offer(batch, done)
        if not self._to_worker:
            self._offered.append((batch, done))

    def withdraw(self) -> bool:
        """Withdraw the offer; false if it was taken."""
        if self._to_worker:
            assert self.worker is not None
            return self.worker.withdraw()
        try:
            self._offered.pop()
        except IndexError:
            return False
        return True

    def take(self, outputs: Sequence[Any]) -> "_Offer | None":
        """Take the offer, if there is one, after a batch with these outputs: they are its inputs if it has none."""
        try:
            batch, done = self._offered.pop()
        except IndexError:
            return None
        return (batch if batch.inputs else replace(batch, inputs=outputs)), done


class StandbyWorker(Protocol):
    """Takes standby launches in another process."""

    def offer(self, batch: Batch, done: "asyncio.Future[Completion]", /) -> bool:
        """Offer a batch, as `Standby.offer`; False if this cannot take it."""
        ...

    def withdraw(self) -> bool:
        """Withdraw the offer; False if it was taken."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a batch that did not fail.

    Attributes:
        outputs: one for each input, in order: float32 [classes] after the last stage, else inputs of the next stage.
        started: start of service on the device, s of time.monotonic.
        finished: completion, s of time.monotonic.
        next_started: start of the standby launch that the device took after it; None if it took none.
        cpu_time: user and system time of the worker's process from its start, or from the end of the batch before, to
            its end, s, without that of calls in other threads, such as `decode`, that ended meanwhile; None without a
            worker.
    """

    outputs: Sequence[Any]
    started: float
    finished: float
    next_started: float | None = None
    cpu_time: float | None = None


_Offer = tuple[Batch, asyncio.Future[Completion]]


class Executor(Protocol):
    """Runs batches for the dispatcher, one at a time.

    Attributes:
        name: the device's name in metrics and logs.
    """

    name: str

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Start the batch and return the future of its completion, or of the device's exception.

        After a batch that does not fail, the offer of `batch.standby` is taken and started before the future is done.
        """
        ...


@runtime_checkable
class RestartableExecutor(Protocol):
    """An Executor that may survive a batch that does not end, or the death of its process."""

    async def restart(self, model: str, error: DeviceLostError, /) -> None:
        """Make the device usable after a batch of `model` ended by this error; raises it if it cannot."""
        ...


@runtime_checkable
class RecoverableExecutor(Protocol):
    """An Executor whose device may be unavailable for some time and recovers by itself, such as another server.

    Its batches then raise DeviceUnavailableError.
    """

    async def check(self) -> None:
        """Check an idle device.

        Raises:
            DeviceUnavailableError: it is not available.
        """
        ...

    async def wait_until_available(self) -> None:
        """Wait until the device can serve again as before."""
        ...


def with_timeout(executor: Executor, batch: Batch, timeout: float) -> "asyncio.Future[Completion]":
    """Run a batch with a timeout, s.

    A call of the device cannot be cancelled from outside. After the timeout the future raises BatchTimeoutError, while
    the device runs on.
    """
    running = executor.run(batch)
    start_timeout(running, len(batch.inputs), timeout)
    return running


def start_timeout(running: "asyncio.Future[Completion]", size: int, timeout: float) -> None:
    """Start the timeout of a batch of this size that is in service; see `with_timeout`."""
    loop = asyncio.get_running_loop()

    def on_due(due: float) -> None:
        if running.done():
            return
        if loop.time() > due + _LATE:  # the process was paused, so the result may arrive next
            start_timeout(running, size, timeout)
        else:
            running.set_exception(BatchTimeoutError(f"a batch of {size} did not finish within {timeout:g} s"))

    timer = loop.call_later(timeout, on_due, loop.time() + timeout)
    running.add_done_callback(lambda _: timer.cancel())


def uploaded(executor: Executor, model: str, samples: Sequence[Any]) -> list[Any]:
    """The samples as inputs of batches, copied beforehand, if the executor can; `model` is the model's id."""
    upload: Callable[[str, Any], Any] | None = getattr(executor, "upload", None)
    return [*samples] if upload is None else [upload(model, sample) for sample in samples]


def check_outputs(batch: Batch, completion: Completion) -> Completion:
    """Check that the completion has one output for each input, and return it.

    Raises:
        RuntimeError: the numbers differ.
    """
    if len(completion.outputs) != len(batch.inputs):
        raise RuntimeError(f"{len(completion.outputs)} outputs for {len(batch.inputs)} inputs")
    return completion


class Device(Protocol):
    """A device that runs batches on the calling thread.

    A device of several models may have `restart(model, hung)`, which loads a model again, or raises DeviceLostError.
    """

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Run the batch, block until it is complete, and return one output for each input."""
        ...


class RunningBatch(Protocol):
    """A batch that a LaunchingDevice has started."""

    def wait(self) -> None:
        """Block until the batch is complete, or raise what `Device.serve` would."""
        ...

    def outputs(self) -> Sequence[Any]:
        """Return one output for each input; called once, after `wait`, and at the latest before the next `wait`."""
        ...


class LaunchingDevice(Device, Protocol):
    """A Device on which the next batch can be started before the outputs of a complete one are collected."""

    def launch(self, batch: Batch, /) -> RunningBatch | None:
        """Start the batch; None if only `serve` can run it."""
        ...


@runtime_checkable
class LoadedDevice(Device, Protocol):
    """A Device with a process of its own, in which its model is loaded, and can be loaded again."""

    def load(self) -> None:
        """Load the model."""
        ...

    def restart(self, hung: bool) -> None:
        """Load the model in a new process, unless one runs; if a batch `hung`, its process is killed first."""
        ...

    def watch(self, on_restart: Callable[[str], None]) -> None:
        """Have a function called at each restart of the process, in any thread, with "died" or "hung"."""
        ...

    def end(self) -> None:
        """End the process; a batch that runs fails."""
        ...


class DirectDevice(Device, Protocol):
    """A Device in another process, to which the event loop hands batches without a thread between."""

    def run(self, batch: Batch, ended: Callable[[], None], others: Callable[[], bool], /) -> asyncio.Future[Completion]:
        """Run a batch, and those that are taken from its standby.

        Args:
            batch: the batch.
            ended: called when the device is free again.
            others: whether other batches wait for the device; then none is taken from the standby.
        """
        ...


class ThreadExecutor:
    """An Executor that calls its device in one daemon thread, which `close` ends.

    Batches of a DirectDevice are handed over without the thread, unless batches wait for it.
    """

    def __init__(self, device: Device, name: str = "") -> None:
        """Start the thread; from now on `device` is used by this executor alone."""
        self.name = name
        self._device = device
        self._upload: Callable[[str, Any], Any] | None = getattr(device, "upload", None)
        self._direct: Callable[[Batch], DirectDevice | None] = getattr(device, "direct", lambda _: None)
        self._turn = threading.Lock()  # held while a batch is in service
        self._in_thread: deque[None] = deque()  # one for each batch that the thread has not run
        self._start()

    def run(self, batch: Batch, /) -> asyncio.Future[Completion]:
        """Hand the batch over, or queue it for the thread."""
        direct = self._direct(batch)
        if direct is not None and not self._in_thread and self._turn.acquire(blocking=False):
            return direct.run(batch, self._turn.release, lambda: len(self._in_thread) > 0)
        self._in_thread.append(None)
        if batch.standby is not None:
            batch.standby.worker = None
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._work.put(partial(self._serve, (batch, done)))
        return done

    def upload(self, model: str, sample: Any) -> Any:
        """Copy a sample to where the model of this id reads it, and return what is a batch's input in its place."""
        return sample if self._upload is None else self._upload(model, sample)

    def call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Queue a function for the thread, and return the future of its result."""
        done: Future[_T] = Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  (it is the result)
                done.set_exception(_as_exception(error))

        self._work.put(call)
        return done

    def call_between(self, function: Callable[[], _T]) -> "Future[_T]":
        """Queue a function for the thread, which calls it while no batch is in service."""
        self._in_thread.append(None)

        def alone() -> _T:
            with self._turn:
                return function()

        done = self.call(alone)
        done.add_done_callback(lambda _: self._in_thread.pop())
        return done

    def worker_of(self, model: str) -> dict[str, Any]:
        """Facts of the process of a model; empty without one."""
        find: Callable[[str], dict[str, Any]] | None = getattr(self._device, "worker_of", None)
        return {} if find is None else find(model)

    async def restart(self, model: str, error: DeviceLostError, /) -> None:
        """Go on in a new thread with the model loaded again; the old one ends when the model's old process does.

        Raises:
            WorkerDiedError: the new process has ended.
            DeviceLostError: `error`, if the device cannot do that.
        """
        restart = getattr(self._device, "restart", None)
        if restart is None:
            raise error
        hung = self._work
        self._start()
        restarted = self.call(partial(restart, model, isinstance(error, BatchTimeoutError)))
        with suppress(queue.Empty):
            while True:  # batches of a model that is being loaded may wait behind the one that is hung
                self._work.put(hung.get_nowait())
        hung.put(None)
        try:
            await asyncio.wait_for(asyncio.wrap_future(restarted), LOAD_TIMEOUT)
        except WorkerDiedError:
            raise
        except TimeoutError as late:
            raise DeviceLostError(f"{model} was not loaded again within {LOAD_TIMEOUT:g} s") from late
        except Exception as failed:
            raise error from failed

    def end(self) -> None:
        """End the thread after the batch that is running, without waiting for it."""
        self._work.put(None)

    def close(self) -> None:
        """End the thread, and wait for the batch that is running."""
        self.end()
        self._thread.join()

    def _start(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._work,), name="device", daemon=True)
        self._thread.start()

    def _serve(self, work: "_Offer") -> None:
        """Run a batch, unless its timeout has passed while it was queued, and then the standby launches.

        Each of these is taken, and started if the device can, before the loop is told of the batch before. The device
        is free when the loop is told of the last one, so that a direct batch may follow.
        """
        with self._turn:
            ended = None if work[1].done() else self._run_batches(work)
            self._in_thread.pop()
        if ended is not None:
            _resolve_soon(*ended)

    def _run_batches(self, work: "_Offer") -> tuple[asyncio.Future[Completion], Completion | Exception]:
        """Run a batch and its standby launches, and return the last one's future and result."""
        batch, done = work
        running = DeviceRun(self._device, batch)
        while True:
            standby, following, taken = running.batch.standby, None, None
            if running.wait() and standby is not None and self._may_follow(running.batch, done):
                taken = standby.take(running.outputs)
                following = None if taken is None else DeviceRun(self._device, taken[0])
            result = running.result(None if following is None else following.started)
            if following is None or taken is None:
                return done, result
            _resolve_soon(done, result)
            running, done = following, taken[1]
            del following, result, taken

    def _may_follow(self, batch: Batch, done: asyncio.Future[Completion]) -> bool:
        """Whether a standby launch may be taken: nothing is queued, and the batch before has not been abandoned.

        None is taken where the loop can hand batches over without the thread, which counts their CPU time.
        """
        return self._work.empty() and not done.done() and self._direct(batch) is None


class DeviceRun:
    """A batch from its start on the device to its result.

    Attributes:
        batch: the batch.
        started: start of service, s of time.monotonic.
        outputs: those that a device without `launch` has returned.
    """

    def __init__(self, device: Device, batch: Batch) -> None:
        """Start the batch, if the device can launch it."""
        self.batch = batch
        self.outputs: Sequence[Any] = ()
        self._device = device
        self._error: Exception | None = None
        self._launched: RunningBatch | None = None
        self.started = self._finished = time.monotonic()
        launch: Callable[[Batch], RunningBatch | None] | None = getattr(device, "launch", None)
        if launch is not None:
            with self._caught():
                self._launched = launch(batch)

    def wait(self) -> bool:
        """Wait for the completion, or run the batch if it was not launched; return whether it has not failed."""
        if self._error is None:
            with self._caught():
                if self._launched is not None:
                    self._launched.wait()
                else:
                    self.started = time.monotonic()
                    self.outputs = self._device.serve(self.batch)
                self._finished = time.monotonic()
                if self._launched is None:
                    check_outputs(self.batch, Completion(self.outputs, self.started, self._finished))
        return self._error is None

    def result(self, next_started: float | None) -> Completion | Exception:
        """Return the completion, with the start of the batch after it, or what the device raised."""
        if self._error is None and self._launched is not None:
            with self._caught():
                self.outputs = self._launched.outputs()
        return self._error or Completion(self.outputs, self.started, self._finished, next_started)

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (whatever the device raises is the result of this batch)
            traceback.clear_frames(error.__traceback__)  # their arrays would live until the next garbage collection
            self._error = _as_exception(error)


def _as_exception(error: BaseException) -> Exception:
    """The exception, or a RuntimeError in place of one that would end a thread or an event loop, such as SystemExit."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which a future cannot have
        return error
    return RuntimeError(f"the model raised {type(error).__name__}")


def _work_off(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Call the functions of a queue until None; no reference to one is kept while waiting for the next."""
    while (function := work.get()) is not None:
        function()
        del function


def _resolve_soon(done: asyncio.Future[Completion], result: Completion | Exception) -> None:
    """Set the result of a batch in its loop, from another thread."""
    with suppress(RuntimeError):  # the loop was closed meanwhile
        done.get_loop().call_soon_threadsafe(resolve, done, result)


def resolve(done: asyncio.Future[Completion], result: Completion | Exception) -> None:
    """Set the result of a batch, unless it was given up."""
    if done.done():
        return
    if isinstance(result, Completion):
        done.set_result(result)
    else:
        done.set_exception(result)
